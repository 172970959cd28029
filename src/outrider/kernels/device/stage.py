"""What a layer lacks of its experts, fetched once ahead of a long prompt: into empty slots, then beside the cache.

Nothing is evicted, so decoding finds its residents as it left them.
"""

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.device.resolve import IN_SLOT, MOVED, PREFILL, LayerState

_EMPTY = -1


@triton.jit
def _stage(
    count, slot_of, expert_of, slot_address, home, seen, places, staged, sources, targets, fetches, SLOTS, PLACES,
    EXPERTS: tl.constexpr, EB: tl.constexpr, SB: tl.constexpr, EMPTY: tl.constexpr, IN_SLOT: tl.constexpr,
    MOVED: tl.constexpr,
):  # fmt: skip
    e, s = tl.arange(0, EB), tl.arange(0, SB)
    is_expert = e < EXPERTS
    if tl.load(count) == 0:
        tl.store(fetches, 0)
        return
    absent = is_expert & (tl.load(slot_of + e, mask=is_expert, other=0) < 0)
    index = tl.cumsum(absent.to(tl.int32), axis=0) - 1
    free = (s < SLOTS) & (tl.load(expert_of + s, mask=s < SLOTS, other=0) < 0)
    number = tl.sum(free.to(tl.int32), axis=0)
    order = tl.cumsum(free.to(tl.int32), axis=0) - 1
    match = free[None, :] & (order[None, :] == index[:, None])
    slot = tl.sum(tl.where(match, s[None, :], 0), axis=1)
    fills = absent & (index < number)
    waits = absent & (index >= number) & (index - number < PLACES)
    place = tl.load(places + index - number, mask=waits, other=0)
    target = tl.where(fills, tl.load(slot_address + slot, mask=fills, other=0), place)
    tl.store(staged + e, tl.where(fills, IN_SLOT, place), mask=is_expert)
    tl.store(sources + index, tl.load(home + e, mask=absent, other=0), mask=fills | waits)
    tl.store(targets + index, target, mask=fills | waits)
    moved = tl.sum((fills | waits).to(tl.int32), axis=0)
    tl.store(fetches, moved)
    tl.store(seen + MOVED, tl.load(seen + MOVED) + moved)
    tl.store(slot_of + e, slot, mask=fills)
    tl.store(expert_of + slot, e, mask=fills)


def stage(
    count: Tensor,
    state: LayerState,
    places: Tensor,
    staged: Tensor,
    sources: Tensor,
    targets: Tensor,
    fetches: Tensor,
) -> None:
    """List the fetches of a layer's absent experts, by ascending expert: those that find an empty slot are resident
    from then on, the others get a place.

    Args:
        count: int32 [1], rows of the prompt; 0 lists nothing.
        places: int64 [most that can be absent from a full cache], addresses.
        staged: int64 [experts]: where `resolve` finds each: 0 as the cache says, IN_SLOT likewise but fetched for this
            prompt, else the address.
        sources, targets: int64 [experts]; fetches: int32 [1].
    """
    experts, slots = len(state.slot_of), len(state.expert_of)
    _stage[(1,)](
        count, state.slot_of, state.expert_of, state.slot_address, state.home, state.seen, places, staged, sources,
        targets, fetches, slots, len(places), experts, triton.next_power_of_2(experts), triton.next_power_of_2(slots),
        _EMPTY, IN_SLOT, PREFILL + MOVED, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
