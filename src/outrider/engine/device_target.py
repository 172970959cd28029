"""The target as captured graphs: one for each row bucket, replayed with the rows of a step in place.

A `models/target.py:TargetModel`. On a CPU (Triton's interpreter) the same kernels run without a graph.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.core import ExpertKey, Phase
from outrider.experts.device_provider import DeviceProvider
from outrider.kernels.device import linear
from outrider.kvcache.pages import PageTable
from outrider.kvcache.storage import KVStorage
from outrider.models.batch import Batch, Observer, Span
from outrider.models.device_decoder import Buffers, DeviceDecoder
from outrider.models.rows import BUCKETS, Rows, RowsOf, bucket_for


class DeviceTarget:
    """Owns the buffers and graphs.

    Args:
        rows: most rows of a step; sequences: most sequences of a step; pages: most pages of one.
        taps: layers whose residual stream a drafter reads.
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        kv: KVStorage,
        provider: DeviceProvider,
        rows: int,
        sequences: int,
        pages: int,
        taps: tuple[int, ...],
        graphs: bool = True,
    ) -> None:
        self.decoder, self.kv, self.provider = decoder, kv, provider
        table, config = decoder.embedding, decoder.config
        self._device = table.device
        self._rows = Rows(rows, sequences, pages, self._device)
        self._buckets = BUCKETS[: BUCKETS.index(bucket_for(rows)) + 1]
        most = self._buckets[-1]
        plan = [Buffers(config, bucket, most, taps, table.dtype, None).nbytes for bucket in self._buckets]
        memory = torch.zeros(max(plan), dtype=torch.uint8, device=self._device)
        self._buffers = {b: Buffers(config, b, most, taps, table.dtype, memory) for b in self._buckets}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._last = self._buffers[self._buckets[0]]
        if graphs and self._device.type == "cuda":
            self._capture()

    def forward(
        self, phase: Phase, tables: Sequence[PageTable], tokens: Sequence[Sequence[int]], observer: Observer
    ) -> tuple[Tensor, Batch]:
        """As `Target.forward`, but the rows that it returns are those that `logits` takes: behind the final norm."""
        spans, batch = self._batch(tables, tokens)
        self._rows.set(spans)
        buffers = self._buffers[bucket_for(batch.spans[-1].stop)]
        self.provider.begin_step(phase)
        self._run(buffers)
        self._last = buffers
        count = batch.spans[-1].stop
        for layer, ids in enumerate(buffers.ids[:, :count]):
            observer.routed(layer, ids)
        for layer, tap in buffers.taps.items():
            observer.residual(layer, tap[:count])
        return buffers.h[:count, : self.decoder.config.hidden_size], batch

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] of some rows of what `forward` returned."""
        head = self.decoder.head
        tiled = -(-len(hidden) // linear.ROWS) * linear.ROWS
        x = torch.nn.functional.pad(hidden, (0, 0, 0, tiled - len(hidden)))
        out = torch.empty(1, tiled, len(head), dtype=torch.float32, device=self._device)
        linear.project(x, head, out, torch.tensor([tiled], dtype=torch.int32, device=self._device))
        return out[0, : len(hidden)]

    def commit(self, kept_rows: Sequence[int]) -> None:
        """End the step that `forward` opened, on the device."""
        self._rows.keep(kept_rows)
        self.provider.commit_rows(self._last.ids, self._rows.kept, self._rows.count)

    @property
    def expert_nbytes(self) -> Mapping[ExpertKey, int]:
        """Exact stored payload bytes of every expert."""
        return self.provider.expert_nbytes

    def _run(self, buffers: Buffers) -> None:
        graph = self._graphs.get(buffers.rows)
        if graph is None:
            self.decoder.forward(self._rows, buffers, self.kv, self.provider)
        else:
            graph.replay()

    def _capture(self) -> None:
        """Record every bucket. The first run, without rows, compiles what has to be compiled."""
        for bucket, buffers in self._buffers.items():
            self._run(buffers)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run(buffers)
            self._graphs[bucket] = graph

    def _batch(self, tables: Sequence[PageTable], tokens: Sequence[Sequence[int]]) -> tuple[list[RowsOf], Batch]:
        spans, rows = [], []
        ids: list[int] = []
        for table, own in zip(tables, tokens, strict=True):
            start, stop = table.length, table.length + len(own)
            table.append(len(own))
            ids += own
            rows.append(RowsOf(own, start, table.slots(start, stop), table.pages))
            spans.append(Span(len(ids) - len(own), len(ids), start, torch.empty(0)))
        positions = [p for span in rows for p in range(span.position, span.position + len(span.tokens))]
        slots = [slot for span in rows for slot in span.slots]
        return rows, Batch(self._tensor(ids), self._tensor(positions), self._tensor(slots), tuple(spans))

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
