"""The host-driven provider: Python chooses victims, a copy thread moves bytes, on any device.

Contract: all state but the progress of a fetch belongs to the caller's thread. A slot's bytes change only while no
compute uses them: an expert is pinned from the moment `resolve` yields it until the next one is asked for. What counts
(hits, recency) is merged in `commit`; what was moved or evicted counts at once, since it happened.

How a layer is resolved: resident experts of the union come first, then those in flight, then the cold ones, which pass
through *lanes*: slots that the union does not need, the cheapest victims first. If there are fewer lanes than cold
experts the lanes are reused within the step (waves), so a union may be larger than the layer's slots. Prefill may take
free slots and two more per layer, so that a long prompt does not evict what decoding uses.
"""

import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.config import PolicyName
from outrider.core import Band, ExpertKey, ExpertWeights, Phase
from outrider.experts.fetch import CopyBackend, Fetch, FetchQueue
from outrider.experts.policy import POLICIES, CachePolicy
from outrider.experts.slots import LayerSlots, Slot
from outrider.experts.store import ExpertStore
from outrider.stats import ExpertCounters

WAVE_LANES = 2
"""Lanes kept when no slot is to spare: one is computed from while the other fills."""


def _close(queue: FetchQueue) -> None:
    """Stop the copy thread, then free what it read from."""
    queue.close()
    queue.store.close()


@dataclass
class _Step:
    """What an open step has seen so far."""

    phase: Phase
    hits: int = 0
    misses: int = 0
    late: int = 0
    overflow: int = 0
    cold_bytes: int = 0
    routes: dict[int, list[list[int]]] = field(default_factory=dict)


class HostProvider:
    """`ExpertProvider` over `slots_per_layer` slots on `device`, filled from `store` through `backend`."""

    def __init__(
        self,
        store: ExpertStore,
        slots_per_layer: dict[int, int],
        num_experts: int,
        policy: PolicyName,
        backend: CopyBackend,
        device: torch.device,
    ) -> None:
        self.store = store
        self.counters = ExpertCounters()
        self.num_experts = num_experts
        self._queue = FetchQueue(store, backend)
        self._layers = {n: LayerSlots(n, count, store.layout, device) for n, count in slots_per_layer.items()}
        self._policies: dict[int, CachePolicy] = {n: POLICIES[policy](num_experts) for n in slots_per_layer}
        self._step: _Step | None = None
        self._running: tuple[int, frozenset[int]] = (-1, frozenset())
        self.close = weakref.finalize(self, _close, self._queue)

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, phase: Phase) -> None:
        """Start a step; pending counts of an uncommitted step are dropped."""
        self._step = _Step(phase)
        self._running = (-1, frozenset())

    def resolve(self, layer: int, expert_ids: Tensor) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield each expert of the union of `expert_ids` (int64 [rows, k]) once, with its weights in their slot.

        Raises: RuntimeError outside a step or for a layer that the step has resolved; OutriderError if an expert
            cannot be read.
        """
        step = self._open_step()
        if layer in step.routes:
            raise RuntimeError(f"layer {layer} was already resolved in this step")
        step.routes[layer] = expert_ids.tolist()
        union = sorted({expert for row in step.routes[layer] for expert in row})
        self._running = (layer, frozenset(union))
        slots = self._layers[layer]
        held = [slots.of_expert[e] for e in union if e in slots.of_expert]
        hits = [slot for slot in held if self._resident(slot)]
        late = [slot for slot in held if slot not in hits]
        cold = deque(e for e in union if e not in slots.of_expert)
        for slot in late:
            self.counters.promotions += self._queue.demand(slot.loaded_by)
        idle, busy = self._lanes(layer, union, len(cold), step.phase)
        self._tally(step, layer, hits, late, cold)

        lanes, filling = deque(idle), deque[Slot]()
        self._fill(layer, lanes, cold, filling)
        for slot in hits + late:
            yield self._use(slot)
        lanes.extend(busy)
        while cold or filling:
            self._fill(layer, lanes, cold, filling)
            slot = filling.popleft()
            yield self._use(slot)
            if cold:
                lanes.append(slot)

    def commit(self, kept_rows: Sequence[int]) -> None:
        """End the step: merge its counts; in a decode step `kept_rows` refresh the recency of their experts.

        Raises: RuntimeError outside a step.
        """
        step, self._step = self._open_step(), None
        self._running = (-1, frozenset())
        if step.phase is Phase.PREFILL:
            self.counters.prefill_steps += 1
            self.counters.prefill_hits += step.hits
            self.counters.prefill_misses += step.misses
            self.counters.prefill_cold_bytes += step.cold_bytes
            return
        self.counters.steps += 1
        self.counters.hits += step.hits
        self.counters.misses += step.misses
        self.counters.late += step.late
        self.counters.overflow += step.overflow
        self.counters.cold_bytes += step.cold_bytes
        for layer, routes in step.routes.items():
            if used := Counter(expert for row in kept_rows for expert in routes[row]):
                self._policies[layer].touch(used)

    # --- ahead of demand ----------------------------------------------------------------------------------------------

    def prefetch(self, keys: Iterable[ExpertKey], priority: Band = Band.ROUTE_AHEAD) -> list[ExpertKey]:
        """Queue fetches of absent experts as one list; returns those that were queued.

        An expert that is on its way in a less urgent band is promoted. One for which its layer has no slot to spare
        is dropped and counted.

        Raises: ValueError for a key that the store does not hold; then nothing is queued.
        """
        keys = list(keys)
        if unknown := [key for key in keys if key not in self.store.expert_nbytes]:
            raise ValueError(f"there is no expert {tuple(unknown[0])}")
        fetches = {}
        for key in keys:
            slots = self._layers[key.layer]
            if key.expert in slots.of_expert:
                fetch = slots.of_expert[key.expert].loaded_by
                self.counters.promotions += self._queue.promote(fetch, priority)
            elif (slot := self._spare(key.layer)) is None:
                self.counters.dropped_prefetches += 1
            else:
                fetches[key] = self._load(slots, slot, key.expert, priority, demanded=False)
        self._queue.submit(list(fetches.values()))
        return list(fetches)

    def cancel_prefetches(self) -> int:
        """Take back every fetch that nobody demanded and that is not done; returns how many."""
        ahead = [
            (slots, slot, slot.fetch)
            for slots in self._layers.values()
            for slot in slots.slots
            if slot.fetch and not slot.fetch.done and not slot.fetch.demanded
        ]
        self._queue.cancel(fetch for _, _, fetch in ahead)
        for slots, slot, fetch in ahead:
            if fetch.cancelled:
                self._clear(slots, slot)
        return sum(fetch.cancelled for _, _, fetch in ahead)

    def preload(self, keys: Iterable[ExpertKey]) -> Iterator[int]:
        """Load `keys` into free slots and yield the bytes of each as it arrives; not counted as prefetches."""
        waiting = []
        for key in keys:
            slots = self._layers[key.layer]
            waiting.append(self._load(slots, next(s for s in slots.slots if s.expert is None), key.expert))
        self._queue.submit(waiting)
        for fetch in waiting:
            self._queue.wait(fetch)
            yield self.store.layout.record_nbytes

    # --- figures and resets -------------------------------------------------------------------------------------------

    @property
    def expert_nbytes(self) -> Mapping[ExpertKey, int]:
        """Exact stored payload bytes of every expert."""
        return self.store.expert_nbytes

    @property
    def slots_total(self) -> int:
        """Slots over all layers."""
        return sum(len(slots.slots) for slots in self._layers.values())

    @property
    def num_offloaded(self) -> int:
        """Experts of layers whose slots do not hold them all; 0 means that every expert is resident."""
        return sum(self.num_experts for slots in self._layers.values() if len(slots.slots) < self.num_experts)

    def resident_keys(self) -> list[ExpertKey]:
        """Experts whose bytes are all in their slot now."""
        return [
            ExpertKey(layer, expert)
            for layer, slots in self._layers.items()
            for expert, slot in slots.of_expert.items()
            if self._resident(slot)
        ]

    @property
    def occupancy_bytes(self) -> int:
        """Payload bytes of all wholly resident experts."""
        return sum(self.store.expert_nbytes[key] for key in self.resident_keys())

    def keys_that_fit(self) -> list[ExpertKey]:
        """The first experts of every layer, as many as it has slots."""
        return [ExpertKey(layer, e) for layer, slots in self._layers.items() for e in range(len(slots.slots))]

    def weights_of(self, key: ExpertKey) -> ExpertWeights | None:
        """The slot views of a resident expert, None if it is not resident; for checks and tests."""
        slot = self._layers[key.layer].of_expert.get(key.expert)
        return slot.weights if slot is not None and self._resident(slot) else None

    def snapshot(self) -> ExpertCounters:
        """The counters so far, those of the copy thread included. Reading changes nothing."""
        counted = ExpertCounters(**vars(self.counters))
        counted.h2d_bytes = dict(self._queue.h2d_bytes)
        counted.prefetched_bytes = self._queue.prefetched_bytes
        counted.exposed_fetch_seconds = self._queue.backend.exposed_seconds()
        return counted

    def reset_counters(self) -> None:
        """Zero the counters; slots, recency and fetches under way stay."""
        self.counters = ExpertCounters()
        self._queue.reset_counters(s.fetch for slots in self._layers.values() for s in slots.slots if s.fetch)

    def reset_cache(self) -> None:
        """Empty all slots and forget recency; the next step starts cold and gives the same tokens."""
        self._queue.cancel(s.fetch for slots in self._layers.values() for s in slots.slots if s.fetch)
        for layer, slots in self._layers.items():
            for slot in slots.slots:
                self._clear(slots, slot)
            self._policies[layer].reset()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open_step(self) -> _Step:
        if self._step is None:
            raise RuntimeError("no step is open; call begin_step first")
        return self._step

    def _resident(self, slot: Slot) -> bool:
        return slot.fetch is not None and self._queue.backend.arrived(slot.fetch)

    def _tally(self, step: _Step, layer: int, hits: list[Slot], late: list[Slot], cold: Sequence[int]) -> None:
        step.hits += len(hits)
        step.late += len(late)
        step.misses += len(late) + len(cold)
        step.overflow += max(0, len(hits) + len(late) + len(cold) - len(self._layers[layer].slots))
        absent = [*(slot.expert for slot in late), *cold]
        step.cold_bytes += sum(self.store.expert_nbytes[ExpertKey(layer, e)] for e in absent if e is not None)

    def _lanes(self, layer: int, union: Sequence[int], cold: int, phase: Phase) -> tuple[list[Slot], list[Slot]]:
        """Slots for `cold` experts: (usable at once, usable when the union's held experts have been computed)."""
        slots, needed = self._layers[layer], set(union)
        free = [slot for slot in slots.slots if slot.expert is None]
        rest = [slot for slot in slots.slots if slot.expert is not None and slot.expert not in needed]
        victims = self._by_policy(layer, [s for s in rest if self._resident(s)])
        victims += self._by_policy(layer, [s for s in rest if not self._resident(s)])
        most = len(free) + WAVE_LANES if phase is Phase.PREFILL else len(slots.slots)
        idle = (free + victims)[: min(cold, most)]
        if len(idle) >= min(cold, WAVE_LANES):
            return idle, []
        held = self._by_policy(layer, [s for s in slots.slots if s.expert in needed])
        return idle, held[: min(cold, WAVE_LANES) - len(idle)]

    def _by_policy(self, layer: int, slots: list[Slot]) -> list[Slot]:
        by_index = {slot.index: slot for slot in slots}
        order = self._policies[layer].order((s.index, s.expert) for s in slots if s.expert is not None)
        return [by_index[index] for index in order]

    def _spare(self, layer: int) -> Slot | None:
        """A slot that a prefetch may take: a free one, else the cheapest resident whose prefetch was not in vain."""
        slots = self._layers[layer]
        running = self._running[1] if self._running[0] == layer else frozenset()
        for slot in slots.slots:
            if slot.expert is None:
                return slot
        candidates = [s for s in slots.slots if self._resident(s) and s.used and s.expert not in running]
        return next(iter(self._by_policy(layer, candidates)), None)

    def _fill(self, layer: int, lanes: deque[Slot], cold: deque[int], filling: deque[Slot]) -> None:
        """Start a demand fetch in every lane that is free now."""
        count = min(len(lanes), len(cold))
        taken = [lanes.popleft() for _ in range(count)]
        self._queue.cancel(slot.fetch for slot in taken if slot.fetch)
        slots = self._layers[layer]
        self._queue.submit([self._load(slots, slot, cold.popleft()) for slot in taken])
        filling += taken

    def _load(
        self, slots: LayerSlots, slot: Slot, expert: int, band: Band = Band.ON_DEMAND, demanded: bool = True
    ) -> Fetch:
        """Give `slot`, into which nothing is being copied, to `expert`; the caller submits the fetch."""
        if slot.expert is not None:
            self.counters.evictions += slot.loaded_by.done
            self._clear(slots, slot)
        fence = self._queue.backend.fence()
        fetch = Fetch(ExpertKey(slots.layer, expert), slot.record, band, demanded, fence)
        slots.assign(slot, expert, fetch)
        return fetch

    def _clear(self, slots: LayerSlots, slot: Slot) -> None:
        """Empty `slot`; what was prefetched into it and never used is waste."""
        if slot.fetch and not slot.used:
            self.counters.wasted_prefetch_bytes += slot.fetch.ahead
            self.counters.cancelled_prefetches += slot.fetch.cancelled and not slot.fetch.demanded
        slots.release(slot)

    def _use(self, slot: Slot) -> tuple[int, ExpertWeights]:
        assert slot.expert is not None
        if not self._resident(slot):
            self._queue.wait(slot.loaded_by)
        slot.used = True
        return slot.expert, slot.weights
