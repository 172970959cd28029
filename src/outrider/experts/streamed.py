"""Experts of long prompts: what a layer lacks comes once, while the layer before it computes, and evicts nothing."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.kernels.device.commit import commit
from outrider.kernels.device.experts import ExpertKernel
from outrider.kernels.device.fetch import fetch
from outrider.kernels.device.resolve import Late, LayerState, resolve
from outrider.kernels.device.stage import stage
from outrider.kernels.device.work import Work


@dataclass(frozen=True)
class _Staging:
    """Of one layer: addresses and bytes of its places, where its experts are, and its fetches."""

    places: Tensor
    records: Tensor
    staged: Tensor
    sources: Tensor
    targets: Tensor
    fetches: Tensor

    @classmethod
    def of(cls, places: int, nbytes: int, experts: int, device: torch.device) -> "_Staging":
        records = torch.zeros(places, nbytes, dtype=torch.uint8, device=device)
        table = torch.tensor([r.data_ptr() for r in records], dtype=torch.int64, device=device)
        staged, sources, targets = (torch.zeros(experts, dtype=torch.int64, device=device) for _ in range(3))
        return cls(table, records, staged, sources, targets, torch.zeros(1, dtype=torch.int32, device=device))


class StreamedExperts:
    """Prompts of up to `rows` rows over the caches of `states`, one a layer; queued on the current stream.

    Its pending counts are its own, so that decoding may go on between two layers.

    Args:
        places: most experts of a layer that a full cache lacks; 0: every expert is resident.
        seen: int64 [layers, 10], the counts of all layers. overlap: fetch on a stream of its own.
    """

    def __init__(
        self,
        kernel: ExpertKernel,
        states: list[LayerState],
        k: int,
        rows: int,
        places: int,
        nbytes: int,
        seen: Tensor,
        overlap: bool,
    ) -> None:
        experts, device = len(states[0].slot_of), states[0].slot_of.device
        pending = torch.zeros(len(states), 3, dtype=torch.int32, device=device)
        self._pending, self._seen = pending, seen
        self._kernel, self._k, self._nbytes = kernel, k, nbytes
        self._states = [replace(state, pending=own) for state, own in zip(states, pending, strict=True)]
        self._staging = [_Staging.of(places, nbytes, experts, device) for _ in range(2)] if places else []
        self._work = Work.empty(experts, rows * k, device)
        self._late = Late.empty(1, device)
        self._cursor = torch.zeros(experts, dtype=torch.int32, device=device)
        self._prefill = torch.ones(1, dtype=torch.int32, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and overlap else None
        self._ahead = False

    def fetch_ahead(self, layer: int, count: Tensor) -> None:
        """Start to fetch what a layer lacks (none if there is no such layer), count int32 [1]: rows of the prompt."""
        self._ahead = bool(self._staging) and layer < len(self._states)
        if not self._ahead:
            return
        own = self._staging[layer % 2]
        lists = (own.sources, own.targets, own.fetches)
        if self._side is None:
            stage(count, self._states[layer], own.places, own.staged, *lists)
            fetch(*lists, self._nbytes)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            stage(count, self._states[layer], own.places, own.staged, *lists)
            fetch(*lists, self._nbytes)

    def join(self) -> None:
        """Wait for what `fetch_ahead` started."""
        if self._side is not None and self._ahead:  # a stream that a graph did not fork cannot be joined in it
            torch.cuda.current_stream().wait_stream(self._side)

    def run(self, layer: int, x: Tensor, ids: Tensor, count: Tensor, inner: Tensor, out: Tensor, room: Tensor) -> None:
        """Send rows to their experts, which `fetch_ahead` has brought; as `DeviceProvider.run`."""
        work, none = self._work, self._late.sources[:0]
        staged = self._staging[layer % 2].staged if self._staging else None
        resolve(ids, count, self._prefill, self._states[layer], work, self._late, none, self._cursor, staged)
        self._kernel.run(x, work, work.every, self._k, inner, out, room)

    def commit(self, ids: Tensor, count: Tensor) -> None:
        """End the step of prompts that went to `ids` (int32 [layers, R, k]); recency is not touched."""
        none = self._seen[:0]
        commit(ids, count, count, self._prefill, none, none, self._pending, self._seen, "decayed-lfu", 0, 0)


def streamed_nbytes(places: int, record_nbytes: int) -> int:
    """Bytes of both layers' places."""
    return 2 * places * record_nbytes
