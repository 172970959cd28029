"""Cache lookup, eviction and work lists of one layer by one block of threads: what the host-driven provider does in
Python (`experts/host_provider.py`), with the same hits, misses and victims.

Resident experts of the union come first. Cold ones take *lanes*: empty slots, then residents that the union does not
need, the cheapest first (ties by slot index), then, where fewer than two are left, residents that it does need. If
there are more cold experts than lanes they pass through the lanes in turn: only the last ones stay. The others are
read where they lie, or copied to a place outside the cache if their many rows would read them more than once. Prefill
takes empty slots and two more. A long prompt finds what it lacks where `stage.py` put it, and changes nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.device.work import Work

WAVE_LANES = 2
_CHUNK = 1024
READ_IN_PLACE = 16
"""Rows of an expert up to which it is read where it lies: what one pass over its weights serves."""
_EMPTY = -1
_AFTER_ALL = 1 << 62
HITS, MISSES, OVERFLOW, EVICTIONS, MOVED = range(5)
"""Places in `LayerState.seen`; those of prefill follow at `PREFILL` + place."""
PREFILL = 5
IN_SLOT = -1
"""Stands in `staged` for an expert that was fetched into a slot for this step."""


@dataclass(frozen=True)
class LayerState:
    """The cache of one layer, in device memory.

    Attributes:
        slot_of: int32 [experts], -1: absent. expert_of: int32 [slots], -1: empty.
        worth: int64 [experts], what the policy knows of each expert, the smallest evicted first.
        slot_address, home: int64 [slots], [experts]: addresses of the slots, and of the records in host memory.
        pending: int32 [3], hits, misses, overflow of the step that is not committed.
        seen: int64 [10], counts of committed steps; evictions and moved experts count at once.
    """

    slot_of: Tensor
    expert_of: Tensor
    worth: Tensor
    slot_address: Tensor
    home: Tensor
    pending: Tensor
    seen: Tensor


@triton.jit
def _resolve(
    ids, count, prefill, slot_of, expert_of, worth, slot_address, home, staging, pending, seen,
    address, start, pairs, bounds, sources, targets, fetches, late_sources, late_targets, late_fetches, cursor, fetched,
    SLOTS, STAGES, EXPERTS: tl.constexpr, K: tl.constexpr, EB: tl.constexpr, SB: tl.constexpr, CHUNK: tl.constexpr,
    SMALL: tl.constexpr, EMPTY: tl.constexpr, AFTER_ALL: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
    EVICTIONS: tl.constexpr, MOVED: tl.constexpr, PREFILL: tl.constexpr, STREAMED: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, EB)
    s = tl.arange(0, SB)
    is_expert, is_slot = e < EXPERTS, s < SLOTS
    number = tl.load(count) * K
    in_prefill = tl.load(prefill) != 0

    # The union, and how many rows go to each of its experts. Pairs that do not exist fall into a bin of their own.
    rows = tl.zeros((EB,), tl.int32)
    for at in range(0, number, CHUNK):
        pair = at + tl.arange(0, CHUNK)
        expert = tl.load(ids + pair, mask=pair < number, other=EB)
        both = tl.histogram(expert, 2 * EB)
        rows += tl.gather(both, e, 0)
    slot = tl.load(slot_of + e, mask=is_expert, other=EMPTY)
    needed = rows > 0
    there = slot >= 0
    if STREAMED:
        brought = tl.load(fetched + e, mask=is_expert, other=0)
        there = there & (brought == 0)
    held = needed & there
    cold = needed & (there == 0)
    hits = tl.sum(held.to(tl.int32), axis=0)
    misses = tl.sum(cold.to(tl.int32), axis=0)

    # Entries in their order: resident, fetched, read in place; `first` is where an entry's pairs begin.
    held_rows = tl.where(held, rows, 0)
    first = tl.cumsum(held_rows, axis=0) - held_rows
    entry = tl.cumsum(held.to(tl.int32), axis=0) - 1
    tl.store(address + entry, tl.load(slot_address + slot, mask=held, other=0), mask=held)
    tl.store(start + entry, first, mask=held)
    tl.store(start + hits + misses, number)
    tl.store(bounds + 1, hits)
    tl.store(bounds + 2, hits + misses)
    tl.store(bounds + 4, hits + misses)
    tl.store(pending, hits)
    tl.store(pending + 1, misses)
    overflow = tl.maximum(hits + misses - SLOTS, 0)
    tl.store(pending + 2, 0 if STREAMED else overflow)

    beside = 0
    late = 0
    if STREAMED:
        cold_rows = tl.where(cold, rows, 0)
        cold_first = tl.sum(held_rows, axis=0) + tl.cumsum(cold_rows, axis=0) - cold_rows
        first = tl.where(cold, cold_first, first)
        cold_entry = hits + tl.cumsum(cold.to(tl.int32), axis=0) - 1
        far = tl.where(brought > 0, brought, tl.load(home + e, mask=cold, other=0))
        near = tl.load(slot_address + slot, mask=cold & (slot >= 0), other=0)
        tl.store(address + cold_entry, tl.where(slot >= 0, near, far), mask=cold)
        tl.store(start + cold_entry, cold_first, mask=cold)
    elif misses > 0:
        # Slots in the order in which they are given away.
        occupant = tl.load(expert_of + s, mask=is_slot, other=EMPTY)
        filled = occupant >= 0
        in_use = filled & (tl.gather(needed.to(tl.int32), tl.maximum(occupant, 0), 0) > 0)
        key = tl.load(worth + occupant, mask=filled, other=-1)
        key = tl.where(in_use, key + AFTER_ALL // 2, key)
        key = tl.where(is_slot, key, AFTER_ALL)
        before = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (s[None, :] < s[:, None]))
        place = tl.sum(before.to(tl.int32), axis=1)
        empty = tl.sum((is_slot & (occupant < 0)).to(tl.int32), axis=0)
        spare = SLOTS - tl.sum(in_use.to(tl.int32), axis=0)
        idle = tl.minimum(tl.minimum(misses, spare), tl.where(in_prefill, empty + LANES, SLOTS))
        lanes = tl.maximum(idle, tl.minimum(misses, LANES))

        # Cold expert number i passes through lane i mod lanes; the last of each lane stays.
        index = tl.cumsum(cold.to(tl.int32), axis=0) - 1
        stays = cold & (index + lanes >= misses)
        passes = cold & (index + lanes < misses)
        lane = index % lanes
        match = stays[:, None] & (place[None, :] == lane[:, None]) & is_slot[None, :]
        new_slot = tl.sum(tl.where(match, s[None, :], 0), axis=1)
        lost = is_slot & (place < lanes) & filled

        staying = tl.sum(stays.to(tl.int32), axis=0)
        stay_rows, pass_rows = tl.where(stays, rows, 0), tl.where(passes, rows, 0)
        before_stay = tl.sum(held_rows, axis=0)
        before_pass = before_stay + tl.sum(stay_rows, axis=0)
        cold_first = tl.where(
            stays,
            before_stay + tl.cumsum(stay_rows, axis=0) - stay_rows,
            before_pass + tl.cumsum(pass_rows, axis=0) - pass_rows,
        )
        first = tl.where(cold, cold_first, first)
        cold_entry = hits + tl.where(
            stays,
            tl.cumsum(stays.to(tl.int32), axis=0) - 1,
            staying + tl.cumsum(passes.to(tl.int32), axis=0) - 1,
        )
        from_home = tl.load(home + e, mask=cold, other=0)
        in_slot = tl.load(slot_address + new_slot, mask=stays, other=0)
        many = passes & (rows > TILE)
        stage = tl.cumsum(many.to(tl.int32), axis=0) - 1
        staged = many & (stage < STAGES)
        in_stage = tl.load(staging + stage, mask=staged, other=0)
        tl.store(address + cold_entry, tl.where(stays, in_slot, tl.where(staged, in_stage, from_home)), mask=cold)
        tl.store(start + cold_entry, cold_first, mask=cold)

        # What is fetched beside the residents' work, and what waits for it: slots that are in use until then.
        now = stays & (lane < idle)
        later = stays & (lane >= idle)
        late = tl.sum(later.to(tl.int32), axis=0)
        at_now, at_later = tl.cumsum(now.to(tl.int32), axis=0) - 1, tl.cumsum(later.to(tl.int32), axis=0) - 1
        tl.store(sources + at_now, from_home, mask=now)
        tl.store(targets + at_now, in_slot, mask=now)
        beside = tl.sum(now.to(tl.int32), axis=0)
        tl.store(sources + beside + stage, from_home, mask=staged)
        tl.store(targets + beside + stage, in_stage, mask=staged)
        beside += tl.sum(staged.to(tl.int32), axis=0)
        tl.store(late_sources + at_later, from_home, mask=later)
        tl.store(late_targets + at_later, in_slot, mask=later)

        # The cache as it will be.
        tl.debug_barrier()
        tl.store(slot_of + occupant, EMPTY, mask=lost)
        tl.store(slot_of + e, new_slot, mask=stays)
        tl.store(expert_of + new_slot, e, mask=stays)
        evicted = tl.sum(lost.to(tl.int64), axis=0) + misses - staying
        tl.store(seen + EVICTIONS, tl.load(seen + EVICTIONS) + evicted)
        moved = seen + MOVED + tl.where(in_prefill, PREFILL, 0)
        tl.store(moved, tl.load(moved) + misses)
    tl.store(fetches, beside)
    tl.store(late_fetches, late)

    # Each pair's place in its expert's list.
    if SMALL > 0:
        pair = tl.arange(0, SMALL)
        own = tl.load(ids + pair, mask=pair < number, other=EB)
        earlier = (own[None, :] == own[:, None]) & (pair[None, :] < pair[:, None])
        to = tl.gather(first, tl.minimum(own, EB - 1), 0) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(pairs + to, pair, mask=pair < number)
    else:
        tl.store(cursor + e, first, mask=is_expert)
        tl.debug_barrier()
        for at in range(0, number, CHUNK):
            pair = at + tl.arange(0, CHUNK)
            own = tl.load(ids + pair, mask=pair < number, other=0)
            tl.store(pairs + tl.atomic_add(cursor + own, 1, mask=pair < number), pair, mask=pair < number)


@dataclass(frozen=True)
class Late:
    """Fetches into slots whose residents are computed first: addresses int64 [slots], and how many, int32 [1]."""

    sources: Tensor
    targets: Tensor
    fetches: Tensor

    @classmethod
    def empty(cls, slots: int, device: torch.device) -> "Late":
        """Room for `slots`."""
        sources = torch.zeros(slots, dtype=torch.int64, device=device)
        return cls(sources, torch.zeros_like(sources), torch.zeros(1, dtype=torch.int32, device=device))


def resolve(
    ids: Tensor,
    count: Tensor,
    prefill: Tensor,
    state: LayerState,
    work: Work,
    late: Late,
    staging: Tensor,
    cursor: Tensor,
    staged: Tensor | None = None,
) -> None:
    """Look up the union of the first `count` rows of `ids` (int32 [R, k]), decide who goes, and write the work lists.

    Args:
        prefill: int32 [1], 1 in a prefill step.
        staging: int64 [places], addresses outside the cache for experts that only pass; may be empty.
        cursor: scratch int32 [experts].
        staged: int64 [experts], of a long prompt (`stage.py`): nothing is fetched and no slot changes.
    """
    rows, k = ids.shape
    experts, slots = len(state.slot_of), len(state.expert_of)
    small = triton.next_power_of_2(rows * k) if rows * k <= 64 else 0
    chunk = min(_CHUNK, triton.next_power_of_2(rows * k))
    _resolve[(1,)](
        ids, count, prefill, state.slot_of, state.expert_of, state.worth, state.slot_address, state.home, staging,
        state.pending, state.seen, work.address, work.start, work.pairs, work.bounds, work.sources, work.targets,
        work.fetches, late.sources, late.targets, late.fetches, cursor, staged, slots, len(staging), experts, k,
        triton.next_power_of_2(experts), triton.next_power_of_2(slots), chunk, small, _EMPTY, _AFTER_ALL, WAVE_LANES,
        READ_IN_PLACE, EVICTIONS, MOVED, PREFILL, staged is not None, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
