"""The device-driven provider: lookup, eviction, fetch and expert MLPs are kernels that read and write device memory.

Contract: between `begin_step` and `commit` everything is queued on torch's current stream and nothing is read back, so
a whole step may be captured in a CUDA graph. The host reads counters and residency only when asked, and waits for the
stream then. Hits, misses and victims are those of the host-driven provider on the same trace.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outrider.config import PolicyName
from outrider.core import Band, ExpertKey, ExpertWeights, Phase
from outrider.experts.home import Home
from outrider.experts.layout import ExpertLayout
from outrider.experts.policy import DecayedLFU
from outrider.experts.streamed import StreamedExperts
from outrider.kernels.device import commit as commit_kernel
from outrider.kernels.device.experts import ExpertKernel
from outrider.kernels.device.fetch import fetch
from outrider.kernels.device.resolve import PREFILL, READ_IN_PLACE, Late, LayerState, resolve
from outrider.kernels.device.work import Work
from outrider.stats import ExpertCounters


class DeviceProvider:
    """Expert memory of `slots_per_layer` slots on `device`.

    Beside the slots it has `staging_slots` places for experts that a step reads and does not keep.

    Args:
        home: where absent experts are read from; None if every expert has a slot.
        rows: the most rows of a step; k: experts of a row.
        overlap: fetch on a stream of its own, beside the work of the resident experts.

    Attributes:
        mark: called with a layer and what it has reached, where a clock may be read (`bench/timeline.py`).
    """

    mark: Callable[[int, str], None] = staticmethod(lambda layer, reached: None)

    def __init__(
        self,
        kernel: ExpertKernel,
        home: Home | None,
        expert_nbytes: Mapping[ExpertKey, int],
        slots_per_layer: dict[int, int],
        num_experts: int,
        k: int,
        rows: int,
        policy: PolicyName,
        device: torch.device,
        overlap: bool = True,
    ) -> None:
        self.kernel, self.expert_nbytes, self.num_experts = kernel, expert_nbytes, num_experts
        self.layout = ExpertLayout.of(kernel.parts())
        self._home, self._device, self._policy, self._k = home, device, policy, k
        self._layers = {layer: index for index, layer in enumerate(slots_per_layer)}
        self._slots = list(slots_per_layer.values())
        self._records = torch.zeros(sum(self._slots), self.layout.record_nbytes, dtype=torch.uint8, device=device)
        self._first = [sum(self._slots[:i]) for i in range(len(self._slots))]
        layers = len(self._slots)
        self._worth = torch.zeros(layers, num_experts, dtype=torch.int64, device=device)
        self._clock = torch.zeros(layers, dtype=torch.int64, device=device)
        self._pending = torch.zeros(layers, 3, dtype=torch.int32, device=device)
        self._seen = torch.zeros(layers, 2 * PREFILL, dtype=torch.int64, device=device)
        stages = staging_slots(num_experts, k, rows) if home else 0
        self._stages = torch.zeros(stages, self.layout.record_nbytes, dtype=torch.uint8, device=device)
        self._staging = self._table([stage.data_ptr() for stage in self._stages])
        self._states = [self._state(index, layer) for layer, index in self._layers.items()]
        self._work = Work.empty(num_experts, rows * k, device)
        self._late = Late.empty(max(self._slots), device)
        self._cursor = torch.zeros(num_experts, dtype=torch.int32, device=device)
        self.prefill = torch.zeros(1, dtype=torch.int32, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and home and overlap else None
        self._dropped = 0
        self._steps = {Phase.DECODE: 0, Phase.PREFILL: 0}
        self._streamed = 0
        self._phase = Phase.DECODE
        self.close = weakref.finalize(self, _close, home, device)

    # --- a step: queued on the current stream -------------------------------------------------------------------------

    def begin_step(self, phase: Phase) -> None:
        """Start a step; what was not committed is dropped."""
        self._phase = phase
        self.prefill.fill_(phase is Phase.PREFILL)

    def run(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        count: Tensor,
        inner: Tensor,
        out: Tensor,
        room: Tensor | None = None,
    ) -> None:
        """Send rows to their experts: out[row * k + rank] = the expert's MLP of the row.

        Args:
            x [R, hidden], `inner`, `out`, `room`: as `ExpertKernel.run`.
            ids: int32 [R, k]; count: int32 [1], rows that exist.
        """
        state, work = self._states[self._layers[layer]], self._work
        self.mark(layer, "routed")
        resolve(ids, count, self.prefill, state, work, self._late, self._staging, self._cursor)
        self.mark(layer, "resolved")
        if self._home is None:
            self.kernel.run(x, work, work.resident, self._k, inner, out, room)
            self.mark(layer, "resident")
            return
        if self._side is None:
            self._fetch(layer)
        else:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._fetch(layer)
        self.kernel.run(x, work, work.resident, self._k, inner, out, room)
        self.mark(layer, "resident")
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        fetch(self._late.sources, self._late.targets, self._late.fetches, self.layout.record_nbytes)
        self.mark(layer, "joined")
        self.kernel.run(x, work, work.absent, self._k, inner, out, room)
        self.mark(layer, "absent")

    def _fetch(self, layer: int) -> None:
        work = self._work
        self.mark(layer, "fetch")
        fetch(work.sources, work.targets, work.fetches, self.layout.record_nbytes)
        self.mark(layer, "fetched")

    def commit_rows(self, ids: Tensor, kept: Tensor, count: Tensor) -> None:
        """End the step on the device: merge its counts; in a decode step the kept rows refresh recency.

        Args: ids: int32 [layers, R, k], what every layer's rows went to; kept: int32 [R], 1 for a row that stays.
        """
        commit_kernel.commit(
            ids, kept, count, self.prefill, self._worth, self._clock, self._pending, self._seen, self._policy,
            DecayedLFU.SHIFT, DecayedLFU.FRACTION,
        )  # fmt: skip

    def streamed(self, rows: int) -> StreamedExperts:
        """This memory for prompts of up to `rows` rows."""
        return StreamedExperts(
            self.kernel, self._states, self._k, rows, places_for(self.num_experts, self._slots),
            self.layout.record_nbytes, self._seen, self._side is not None,
        )  # fmt: skip

    def count_steps(self, steps: int, streamed: bool = False) -> None:
        """Add committed steps of the phase that began last; the device does not count them."""
        self._steps[self._phase] += steps
        self._streamed += steps if streamed else 0

    # --- figures and resets: these wait for the device ------------------------------------------------------------

    def preload(self, records: Iterable[tuple[ExpertKey, Tensor]]) -> Iterator[int]:
        """Put packed records into the next free slots; yields the bytes of each."""
        for key, record in records:
            index = self._layers[key.layer]
            state = self._states[index]
            slot = int((state.expert_of >= 0).sum())
            self._records[self._first[index] + slot].copy_(record)
            state.expert_of[slot], state.slot_of[key.expert] = key.expert, slot
            yield record.numel()

    def fetch_for_probe(self, keys: Iterable[ExpertKey]) -> int:
        """Queue the fetch of some records into the first slots of all, which must be empty; the bytes that it moves."""
        assert self._home is not None
        sources = [self._home.record(key).data_ptr() for key in keys][: len(self._records)]
        targets = [record.data_ptr() for record in self._records[: len(sources)]]
        number = torch.tensor([len(sources)], dtype=torch.int32, device=self._device)
        fetch(self._table(sources), self._table(targets), number, self.layout.record_nbytes)
        return len(sources) * self.layout.record_nbytes

    def prefetch(self, keys: Iterable[ExpertKey], priority: Band = Band.ROUTE_AHEAD) -> list[ExpertKey]:
        """Nothing is prefetched yet: every key is dropped and counted."""
        self._dropped += len(list(keys))
        return []

    @property
    def slots_total(self) -> int:
        """Slots over all layers."""
        return sum(self._slots)

    @property
    def num_offloaded(self) -> int:
        """Experts of layers whose slots do not hold them all; 0 means that every expert is resident."""
        return sum(self.num_experts for count in self._slots if count < self.num_experts)

    def resident_keys(self) -> list[ExpertKey]:
        """Experts in slots, by layer and slot."""
        return [
            ExpertKey(layer, expert)
            for layer, index in self._layers.items()
            for expert in self._states[index].expert_of.tolist()
            if expert >= 0
        ]

    @property
    def occupancy_bytes(self) -> int:
        """Payload bytes of all resident experts."""
        return sum(self.expert_nbytes[key] for key in self.resident_keys())

    def weights_of(self, key: ExpertKey) -> ExpertWeights | None:
        """The packed parts of a resident expert, None if it is not resident; for checks and tests."""
        index = self._layers[key.layer]
        slot = int(self._states[index].slot_of[key.expert])
        return None if slot < 0 else self.layout.view(self._records[self._first[index] + slot])

    def snapshot(self) -> ExpertCounters:
        """The counters so far. Reading changes nothing."""
        seen = self._seen.sum(0).tolist()
        hits, misses, overflow, evictions, moved = seen[:PREFILL]
        prefill_hits, prefill_misses, _, _, prefill_moved = seen[PREFILL:]
        payload = next(iter(self.expert_nbytes.values()))
        counted = ExpertCounters(
            hits=hits,
            misses=misses,
            prefill_hits=prefill_hits,
            prefill_misses=prefill_misses,
            cold_bytes=misses * payload,
            prefill_cold_bytes=prefill_misses * payload,
            evictions=evictions,
            overflow=overflow,
            dropped_prefetches=self._dropped,
            steps=self._steps[Phase.DECODE],
            prefill_steps=self._steps[Phase.PREFILL],
            streamed_steps=self._streamed,
            exposed_fetch_seconds=None,
        )
        counted.h2d_bytes[Band.ON_DEMAND] = (moved + prefill_moved) * self.layout.record_nbytes
        return counted

    def reset_counters(self) -> None:
        """Zero the counters; slots and recency stay."""
        self._seen.zero_()
        self._steps = dict.fromkeys(self._steps, 0)
        self._dropped = self._streamed = 0

    def reset_cache(self) -> None:
        """Empty all slots and forget recency; the next step starts cold and gives the same tokens.

        Where every expert has a slot there is nothing to bring them back from, and nothing happens.
        """
        if self._home is None:
            return
        for state in self._states:
            state.slot_of.fill_(-1)
            state.expert_of.fill_(-1)
        self._worth.zero_()
        self._clock.zero_()

    def _state(self, index: int, layer: int) -> LayerState:
        count = self._slots[index]
        base = self._records.data_ptr() + self._first[index] * self.layout.record_nbytes
        slots = [base + slot * self.layout.record_nbytes for slot in range(count)]
        home = self._home.addresses(layer) if self._home else [0] * self.num_experts

        def filled(length: int) -> Tensor:
            return torch.full((length,), -1, dtype=torch.int32, device=self._device)

        return LayerState(
            filled(self.num_experts),
            filled(count),
            self._worth[index],
            self._table(slots),
            self._table(home),
            self._pending[index],
            self._seen[index],
        )

    def _table(self, addresses: list[int]) -> Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)


def staging_slots(num_experts: int, k: int, rows: int) -> int:
    """Places outside the cache for experts that pass through a step of up to `rows` rows, with more than are read in
    place."""
    return 0 if rows <= READ_IN_PLACE else min(num_experts, rows * k // (READ_IN_PLACE + 1))


def places_for(num_experts: int, slots: Sequence[int]) -> int:
    """Experts that a layer may lack when its slots are full."""
    return num_experts - min(slots)


def _close(home: Home | None, device: torch.device) -> None:
    """Nothing may be reading when the records are freed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if home:
        home.close()
