"""The end of a step on the device: its counts become final, and the kept rows refresh the policy's recency.

The arithmetic is that of `experts/policy.py`, in integers, so both providers evict the same experts.
"""

import triton
import triton.language as tl
from torch import Tensor

from outrider.config import PolicyName
from outrider.kernels.device.resolve import PREFILL

_CHUNK = 1024


@triton.jit
def _commit(
    ids, kept, count, prefill, worth, clock, pending, seen, R,
    EXPERTS: tl.constexpr, K: tl.constexpr, EB: tl.constexpr, CHUNK: tl.constexpr, LRU: tl.constexpr,
    SHIFT: tl.constexpr, FRACTION: tl.constexpr, PREFILL: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0)
    rows = tl.load(count)
    if rows == 0:
        return
    in_prefill = tl.load(prefill) != 0
    total = seen + layer * 2 * PREFILL + tl.where(in_prefill, PREFILL, 0)
    for place in tl.static_range(3):
        tl.store(total + place, tl.load(total + place) + tl.load(pending + layer * 3 + place))
        tl.store(pending + layer * 3 + place, 0)
    if in_prefill:
        return
    e = tl.arange(0, EB)
    used = tl.zeros((EB,), tl.int32)
    for at in range(0, rows * K, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        stays = (pair < rows * K) & (tl.load(kept + pair // K, mask=pair < rows * K, other=0) != 0)
        expert = tl.load(ids + layer.to(tl.int64) * R * K + pair, mask=stays, other=EB)
        used += tl.gather(tl.histogram(expert, 2 * EB), e, 0)
    if tl.sum(used, axis=0) == 0:
        return
    own = worth + layer * EXPERTS + e
    value = tl.load(own, mask=e < EXPERTS, other=0)
    if LRU:
        now = tl.load(clock + layer) + 1
        tl.debug_barrier()  # every thread has read it
        tl.store(clock + layer, now)
        value = tl.where(used > 0, now, value)
    else:
        value = value - (value >> SHIFT) + (used.to(tl.int64) << FRACTION)
    tl.store(own, value, mask=e < EXPERTS)


def commit(
    ids: Tensor,
    kept: Tensor,
    count: Tensor,
    prefill: Tensor,
    worth: Tensor,
    clock: Tensor,
    pending: Tensor,
    seen: Tensor,
    policy: PolicyName,
    shift: int,
    fraction: int,
) -> None:
    """End the step of all layers; a step without rows ends nothing.

    Args:
        ids: int32 [layers, R, k]; kept: int32 [R], 1 for a row that stays.
        worth: int64 [layers, experts]; clock: int64 [layers]; pending: int32 [layers, 3]; seen: int64 [layers, 10].
        shift, fraction: of the decayed LFU.
    """
    layers, rows, k = ids.shape
    experts = worth.shape[1]
    chunk = min(_CHUNK, triton.next_power_of_2(rows * k))
    _commit[(layers,)](
        ids, kept, count, prefill, worth, clock, pending, seen, rows, experts, k, triton.next_power_of_2(experts),
        chunk, policy == "lru", shift, fraction, PREFILL, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
