"""What a captured forward reads: the rows of a step in fixed device buffers, filled by one copy from the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.device.attention import UNIT
from outrider.kernels.device.set_rows import RowColumns

BUCKETS = (16, 32, 64, 128, 256, 512)
"""Row counts that forwards are captured for."""

_SCALARS = 2
_COLUMNS = 8


@dataclass(frozen=True)
class RowsOf:
    """Some rows of one sequence: tokens, the first at `position`, their KV token slots, and the sequence's pages.

    to_the_end: every row sees the keys of all of them (a draft block), not just those up to its own.
    """

    tokens: Sequence[int]
    position: int
    slots: Sequence[int]
    pages: Sequence[int]
    to_the_end: bool = False


class Rows:
    """int32 views of one device buffer for up to `most` rows.

    Attributes:
        count [1]: rows that exist. units: first row and rows of each attention unit [R], and how many [1].
        ids, positions, limits, slots, sequences, kept [R]: token, absolute position, last position that it sees, KV
            token slot, line of `tables`, and 1 for a row that a commit keeps.
        tables [sequences, pages]: pages of each sequence in order. columns: all that the device may set itself.
        unit: most rows of an attention unit.
    """

    def __init__(self, most: int, sequences: int, pages: int, device: torch.device, unit: int = UNIT) -> None:
        self.unit = unit
        fields = _COLUMNS * most + _SCALARS
        self._device_buffer = torch.zeros(fields, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staging = torch.zeros(fields, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.zeros(sequences, pages, dtype=torch.int32, device=device)
        self._table_staging = torch.zeros(sequences, pages, dtype=torch.int32, pin_memory=pinned)
        self.count, number, *columns = self._views(self._device_buffer)
        self.ids, self.positions, self.limits, self.slots, self.sequences, self.kept, first, rows = columns
        self.units = (first, rows, number)
        self.columns = RowColumns(
            self.count, self.ids, self.positions, self.limits, self.slots, self.sequences, *self.units, self.tables
        )
        self._copied = torch.cuda.Event() if pinned else None

    def _views(self, buffer: Tensor) -> list[Tensor]:
        scalars, columns = buffer[:_SCALARS], buffer[_SCALARS:].view(_COLUMNS, -1)
        return [scalars[0:1], scalars[1:2], *columns.unbind(0)]

    def set(self, spans: Sequence[RowsOf]) -> None:
        """Queue the copy of a step's rows on the current stream; its rows are kept unless `keep` says otherwise."""
        self._wait()
        count, number, ids, positions, limits, slots, sequences, kept, first, rows = self._views(self._staging)
        at = unit = 0
        for line, span in enumerate(spans):
            end = at + len(span.tokens)
            ids[at:end] = torch.tensor(span.tokens, dtype=torch.int32)
            positions[at:end] = torch.arange(span.position, span.position + len(span.tokens), dtype=torch.int32)
            limits[at:end] = span.position + len(span.tokens) - 1 if span.to_the_end else positions[at:end]
            slots[at:end] = torch.tensor(span.slots, dtype=torch.int32)
            sequences[at:end] = line
            for start in range(at, end, self.unit):
                first[unit], rows[unit] = start, min(self.unit, end - start)
                unit += 1
            at = end
        kept[:at] = 1
        kept[at:] = 0
        count[0], number[0] = at, unit
        self._device_buffer.copy_(self._staging, non_blocking=True)
        self._copy_tables([span.pages for span in spans])
        self._record()

    def set_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """Queue the copy of the sequences' pages alone: the device makes the rows."""
        self._wait()
        self._copy_tables(tables)
        self._record()

    def keep(self, rows: Sequence[int]) -> None:
        """Mark the rows that the next commit keeps; queued likewise."""
        self._wait()
        kept = self._views(self._staging)[7]
        kept[:] = 0
        kept[torch.tensor(rows, dtype=torch.int64)] = 1
        self.kept.copy_(kept, non_blocking=True)
        self._record()

    def _copy_tables(self, tables: Sequence[Sequence[int]]) -> None:
        for line, pages in enumerate(tables):
            self._table_staging[line, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.tables[: len(tables)].copy_(self._table_staging[: len(tables)], non_blocking=True)

    def _wait(self) -> None:
        """The staging memory may be written when its last copy is over."""
        if self._copied:
            self._copied.synchronize()

    def _record(self) -> None:
        if self._copied:
            self._copied.record()


def bucket_for(rows: int) -> int:
    """The smallest bucket that holds `rows`."""
    return next(bucket for bucket in BUCKETS if bucket >= rows)


def buckets_up_to(rows: int) -> tuple[int, ...]:
    """All buckets that steps of up to `rows` rows use."""
    return BUCKETS[: BUCKETS.index(bucket_for(rows)) + 1]
