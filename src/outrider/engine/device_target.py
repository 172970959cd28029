"""The target as captured graphs: one for each row bucket, replayed with the rows of a step in place.

A `models/target.py:TargetModel`. On a CPU (Triton's interpreter) the same kernels run without a graph.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.core import ExpertKey, Phase
from outrider.engine.queued_rounds import MOST_ROUNDS, QueuedRounds
from outrider.experts.device_provider import DeviceProvider
from outrider.kernels.device import linear
from outrider.kernels.device.attention import PROMPT_UNIT
from outrider.kernels.device.graph import captured
from outrider.kernels.device.set_rows import MOST_STOPS
from outrider.kvcache.pages import PageTable
from outrider.kvcache.storage import KVStorage
from outrider.models.batch import Batch, Observer, Span
from outrider.models.device_decoder import Buffers, DeviceDecoder, DeviceExperts, LongBuffers
from outrider.models.long_prompt import LongPrompt
from outrider.models.rows import Rows, RowsOf, bucket_for, buckets_up_to
from outrider.models.target import QueuedTokens, RoundTimes
from outrider.spec.device_drafter import DeviceDrafter


class DeviceTarget:
    """Owns the buffers and graphs; its own `queue`.

    Args:
        rows: most rows of a step; sequences: most sequences of a step; pages: most pages of one.
        drafter: what drafts in rounds without the host, whose verifies have up to `width` rows of a sequence.
        prompt_rows: most rows of a long prompt, a multiple of the largest bucket; 0: prompts stay within the buckets.
        graphs: off runs the same kernels one by one.
        experts: stands between decoder and provider, None: nothing does.
    """

    most_rounds, most_stops = MOST_ROUNDS, MOST_STOPS

    def __init__(
        self,
        decoder: DeviceDecoder,
        kv: KVStorage,
        provider: DeviceProvider,
        rows: int,
        sequences: int,
        pages: int,
        drafter: DeviceDrafter | None = None,
        width: int = 1,
        prompt_rows: int = 0,
        graphs: bool = True,
        experts: DeviceExperts | None = None,
    ) -> None:
        self.decoder, self.kv, self.provider = decoder, kv, provider
        table, config = decoder.embedding, decoder.config
        self._device = table.device
        self._experts = experts or provider
        self._buckets = buckets_up_to(rows)
        most, taps = self._buckets[-1], drafter.config.tap_layers if drafter else ()
        self._rows = {
            Phase.DECODE: Rows(most, sequences, pages, self._device),
            Phase.PREFILL: Rows(most, sequences, pages, self._device, PROMPT_UNIT),
        }
        plan = [Buffers(config, bucket, most, taps, table.dtype, None).nbytes for bucket in self._buckets]
        memory = torch.zeros(max(plan), dtype=torch.uint8, device=self._device)
        self._buffers = {b: Buffers(config, b, most, taps, table.dtype, memory) for b in self._buckets}
        self._last = self._rows[Phase.DECODE], self._buffers[self._buckets[0]]
        self._width, self._streamed = width, False
        self.most_sequences = sequences
        drafts = drafter.config.num_drafts if drafter else 0
        self.most_verify_rows = bucket_for(min(most, sequences * (drafts + 1)))
        self.times: RoundTimes | None = None
        self._queued = QueuedRounds(
            decoder.head, self._rows[Phase.DECODE], self._buffers, self._run, provider, drafter, width, sequences,
            graphs,
        )  # fmt: skip
        self._forwards: dict[tuple[Phase, int], Callable[[], None]] = {
            (phase, bucket): partial(self._run, own, phase)
            for phase in Phase
            for bucket, own in self._buffers.items()
            if phase is Phase.PREFILL or bucket <= self.most_verify_rows
        }
        if graphs and self._device.type == "cuda":
            self._forwards = {key: captured(run) for key, run in self._forwards.items()}
        self._long = None
        if prompt_rows:
            long = LongBuffers(config, prompt_rows, self._buffers[most], taps, table.dtype, self._device)
            self._long = LongPrompt(decoder, kv, provider.streamed(prompt_rows), long, pages, graphs)

    def forward(
        self, phase: Phase, tables: Sequence[PageTable], tokens: Sequence[Sequence[int]], observer: Observer
    ) -> tuple[Tensor, Batch]:
        """As `Target.forward`, but the rows that it returns are those that `logits` takes: behind the final norm."""
        spans = [_grown(table, own) for table, own in zip(tables, tokens, strict=True)]
        count = sum(len(span.tokens) for span in spans)
        self.provider.begin_step(phase)
        self._streamed = count > self._buckets[-1]
        if self._streamed:
            assert self._long and phase is Phase.PREFILL and len(spans) == 1, "only a prompt may be so long"
            buffers: Buffers | LongBuffers = self._long.buffers
            batch = _batch(spans, *self._long.run(*spans))
        else:
            rows, buffers = self._rows[phase], self._buffers[bucket_for(count)]
            rows.set(spans)
            self._forwards[phase, buffers.rows]()
            self._last = rows, buffers
            batch = _batch(spans, rows.ids, rows.positions, rows.slots, rows.tables)
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
        linear.project(x, head, out, torch.full((1,), tiled, dtype=torch.int32, device=self._device))
        return out[0, : len(hidden)]

    def commit(self, kept_rows: Sequence[int]) -> None:
        """End the step that `forward` opened, on the device."""
        if self._streamed and self._long:
            self._long.commit()
        else:
            rows, buffers = self._last
            rows.keep(kept_rows)
            self.provider.commit_rows(buffers.ids, rows.kept, rows.count)
        self.provider.count_steps(1, streamed=self._streamed)

    @property
    def queue(self) -> "DeviceTarget":
        """Rounds that are queued without the host between them."""
        return self

    @property
    def expert_nbytes(self) -> Mapping[ExpertKey, int]:
        """Exact stored payload bytes of every expert."""
        return self.provider.expert_nbytes

    def decode(
        self,
        tables: Sequence[PageTable],
        anchors: Sequence[int],
        left: Sequence[int],
        stops: Sequence[frozenset[int]],
        rounds: int,
    ) -> list[list[QueuedTokens]]:
        """See `RoundQueue`."""
        lengths = [table.length for table in tables]
        for table, most in zip(tables, left, strict=True):
            table.append(min(rounds * self._width, most))
        self._queued.start(tables, anchors, lengths, left, stops)
        self.provider.begin_step(Phase.DECODE)
        self._last = self._rows[Phase.DECODE], self._queued.run(rounds, len(tables))
        said = self._queued.read(rounds, len(tables))
        settled = sum(all(own.settled for own in each) for each in said)
        self.times = self._queued.times(settled)
        self.provider.count_steps(settled)
        return said

    def routes(self, rows: int) -> list[list[list[int]]]:
        """See `RoundQueue`."""
        ids: list[list[list[int]]] = self._last[1].ids[:, :rows].tolist()
        return ids

    def _run(self, buffers: Buffers, phase: Phase = Phase.DECODE) -> None:
        self.decoder.forward(self._rows[phase], buffers, self.kv, self._experts)


def _grown(table: PageTable, tokens: Sequence[int]) -> RowsOf:
    """Rows of `tokens`, for which the table grows."""
    start, stop = table.length, table.length + len(tokens)
    table.append(len(tokens))
    return RowsOf(tokens, start, table.slots(start, stop), table.pages)


def _batch(spans: Sequence[RowsOf], ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor) -> Batch:
    """The batch as views of what was set: it holds until the next step sets its own."""
    found, end = [], 0
    for line, span in enumerate(spans):
        start, end = end, end + len(span.tokens)
        found.append(Span(start, end, span.position, tables[line]))
    return Batch(ids[:end], positions[:end], slots[:end], tuple(found))
