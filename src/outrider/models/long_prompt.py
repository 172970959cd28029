"""A long prompt through the captured decoder, layer by layer for all of its rows: a graph a layer.

Attention runs in slices of a bucket, so that its scratch stays small; experts see all rows at once, so that what a
layer lacks of them is fetched once. Bits are those of the same rows in buckets. Between two layers other graphs may
run.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.kernels.device.attention import PROMPT_UNIT
from outrider.kernels.device.graph import captured
from outrider.kvcache.storage import KVStorage
from outrider.models.device_decoder import DeviceDecoder, LongBuffers
from outrider.models.rows import Rows, RowsOf


class LongExperts(Protocol):
    """Expert memory as a long prompt sees it; see `experts/streamed.py`."""

    def fetch_ahead(self, layer: int, count: Tensor) -> None:
        """Start to fetch what a layer lacks."""

    def join(self) -> None:
        """Wait for it."""

    def run(self, layer: int, x: Tensor, ids: Tensor, count: Tensor, inner: Tensor, out: Tensor, room: Tensor) -> None:
        """Send rows to their experts."""

    def commit(self, ids: Tensor, count: Tensor) -> None:
        """End the step."""


class LongPrompt:
    """Up to as many rows of one sequence as `buffers` have; `pages`: most pages of it."""

    def __init__(
        self,
        decoder: DeviceDecoder,
        kv: KVStorage,
        experts: LongExperts,
        buffers: LongBuffers,
        pages: int,
        graphs: bool,
    ) -> None:
        device = decoder.embedding.device
        self.buffers, self._decoder, self._kv, self._experts = buffers, decoder, kv, experts
        self._slice = buffers.slices[0].rows
        self._rows = [Rows(self._slice, 1, pages, device, PROMPT_UNIT) for _ in buffers.slices]
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._steps: list[Callable[[], None]] = [
            self._begin,
            *(partial(self._layer, index) for index in range(len(decoder.layers))),
        ]
        if graphs and device.type == "cuda":
            self._steps = [captured(step) for step in self._steps]

    def run(self, prompt: RowsOf) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the rows; leaves `buffers`, as a forward of the decoder leaves its own.

        Returns: ids, positions, slots int32 [buffers' rows] and tables int32 [1, pages], as they were set.
        """
        for start, rows in zip(range(0, len(self.buffers.x), self._slice), self._rows, strict=True):
            span = slice(start, start + self._slice)
            tokens = prompt.tokens[span]
            own = RowsOf(tokens, prompt.position + start, prompt.slots[span], prompt.pages)
            rows.set([own] if tokens else [])
        self._count.fill_(len(prompt.tokens))
        for step in self._steps:
            step()
        columns = zip(*((rows.ids, rows.positions, rows.slots) for rows in self._rows), strict=True)
        ids, positions, slots = (torch.cat(column) for column in columns)
        return ids, positions, slots, self._rows[0].tables

    def commit(self) -> None:
        """End the step: its counts become final."""
        self._experts.commit(self.buffers.ids, self._count)

    def _begin(self) -> None:
        self._experts.fetch_ahead(0, self._count)
        for rows, own in zip(self._rows, self.buffers.slices, strict=True):
            self._decoder.begin(rows, own)
        self._experts.join()

    def _layer(self, index: int) -> None:
        b = self.buffers
        self._experts.fetch_ahead(index + 1, self._count)
        for rows, own in zip(self._rows, b.slices, strict=True):
            self._decoder.mix(index, rows, own, self._kv)
        self._experts.run(index, b.h, b.ids[index], self._count, b.inner, b.expert_out, b.room)
        self._decoder.add(index, b, self._count)
        self._experts.join()
