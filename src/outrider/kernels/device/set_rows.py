"""The start of a queued round on the device: rows of a draft block, or of the verify behind it, for every sequence.

What the host would write into `models/rows.py` comes from where each sequence stands, which the last round left on the
device. Where the queue has stopped there are no rows, and all that follows does nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from outrider.kernels.device.attention import UNIT

MOST_STOPS = 16
"""Stop tokens of one sequence that the device can watch for."""

_PAGE = 16
_NO_STOP = -3


class Standing:
    """Where each sequence stands, int32 [S]: its anchor, the tokens that it has in KV memory (the anchor's position),
    and how many may still follow.

    Attributes:
        stops: int32 [MOST_STOPS, S], negative where there is none. number: int32 [1], sequences that run: 0 after one
            ended. turn: int32 [1], the round.
        times: int64 [turns, 3], nanoseconds of the device's clock when a round began, had its drafts, and had its
            verify; 0 where there is no such clock.
    """

    def __init__(self, sequences: int, turns: int, device: torch.device) -> None:
        self._state = torch.zeros(3 + MOST_STOPS, sequences, dtype=torch.int32, device=device)
        self.anchors, self.lengths, self.left = self._state[:3].unbind(0)
        self.stops = self._state[3:]
        self.number, self.turn = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self.times = torch.zeros(turns, 3, dtype=torch.int64, device=device)

    def start(
        self, anchors: Sequence[int], lengths: Sequence[int], left: Sequence[int], stops: Sequence[frozenset[int]]
    ) -> None:
        """Before the first round; a sequence has at most `MOST_STOPS` stop tokens."""
        watched = [[*own, *[_NO_STOP] * (MOST_STOPS - len(own))] for own in stops]
        state = torch.tensor([anchors, lengths, left, *zip(*watched, strict=True)], dtype=torch.int32)
        self._state[:, : len(anchors)].copy_(state)
        self.number.fill_(len(anchors))
        self.turn.zero_()


class RowColumns(NamedTuple):
    """What is written, int32, as in `models/rows.py`: how many rows and units there are [1], tables
    [sequences, pages], others [R]."""

    number: Tensor
    ids: Tensor
    positions: Tensor
    limits: Tensor
    slots: Tensor
    sequences: Tensor
    unit_first: Tensor
    unit_rows: Tensor
    units_number: Tensor
    tables: Tensor


@triton.jit
def _set_rows(
    anchors, lengths, left, number, times, turn, drafts, count, ids, positions, limits, slots, sequences, unit_first,
    unit_rows, units_number, tables, table_width, mask_id, draft_stride,
    S: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DRAFTED: tl.constexpr,
    UNIT: tl.constexpr, PAGE: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    if CLOCK:
        stamp = times + tl.load(turn) * 3
        if BLOCK:
            tl.store(stamp, globaltimer())
        else:
            tl.store(stamp + 1, globaltimer())
            if not DRAFTED:
                tl.store(stamp, tl.load(stamp + 1))
    s = tl.arange(0, S)
    live = s < tl.load(number)
    width = tl.where(live, WIDTH, 0)
    if not BLOCK:
        width = tl.minimum(tl.load(left + s, mask=live, other=0), WIDTH)
    start = tl.cumsum(width, axis=0) - width
    length = tl.load(lengths + s, mask=live, other=0)
    i = tl.arange(0, W)[None, :]
    exists = i < width[:, None]
    token = tl.load(anchors + s, mask=live, other=0)[:, None] + tl.zeros((S, W), tl.int32)
    if DRAFTED:
        draft = tl.load(drafts + s[:, None] * draft_stride + i - 1, mask=exists & (i > 0), other=0)
        # A draft without finite logits is no token: it may not be looked up, and `accept` tells the host.
        token = tl.where(i > 0, tl.maximum(draft, 0), token)
    if BLOCK:
        token = tl.where(i > 0, mask_id, token)
    row = start[:, None] + i
    position = length[:, None] + i
    page = tl.load(tables + s[:, None] * table_width + position // PAGE, mask=exists, other=0)
    tl.store(ids + row, token, mask=exists)
    tl.store(positions + row, position, mask=exists)
    if BLOCK:
        tl.store(limits + row, length[:, None] + WIDTH - 1 + tl.zeros((S, W), tl.int32), mask=exists)
    else:
        tl.store(limits + row, position, mask=exists)
    tl.store(slots + row, page * PAGE + position % PAGE, mask=exists)
    tl.store(sequences + row, s[:, None] + tl.zeros((S, W), tl.int32), mask=exists)
    units = (width + UNIT - 1) // UNIT
    unit = (tl.cumsum(units, axis=0) - units)[:, None] + i
    first = start[:, None] + i * UNIT
    tl.store(unit_first + unit, first, mask=i < units[:, None])
    tl.store(unit_rows + unit, tl.minimum(width[:, None] - i * UNIT, UNIT), mask=i < units[:, None])
    tl.store(count, tl.sum(width, axis=0))
    tl.store(units_number, tl.sum(units, axis=0))


def set_block_rows(standing: Standing, rows: RowColumns, width: int, mask_id: int) -> None:
    """The anchor and `width` - 1 masks of every sequence, at the positions behind what is in KV memory; each row sees
    the whole block."""
    _launch(standing, rows, width, block=True, drafts=None, draft_stride=0, mask_id=mask_id)


def set_verify_rows(
    standing: Standing, rows: RowColumns, width: int, drafts: Tensor | None = None, draft_stride: int = 0
) -> None:
    """The anchor and the first drafts of every sequence, `width` rows of each but no more than tokens may follow.

    Args: drafts: int32, d_1 of sequence s at s * draft_stride, negative for one whose logits are not finite.
    """
    _launch(standing, rows, width, block=False, drafts=drafts, draft_stride=draft_stride, mask_id=0)


def _launch(
    standing: Standing,
    rows: RowColumns,
    width: int,
    block: bool,
    drafts: Tensor | None,
    draft_stride: int,
    mask_id: int,
) -> None:
    _set_rows[(1,)](
        standing.anchors, standing.lengths, standing.left, standing.number, standing.times, standing.turn, drafts,
        *rows, rows.tables.shape[1], mask_id, draft_stride, triton.next_power_of_2(len(standing.anchors)),
        triton.next_power_of_2(width), width, block, drafts is not None, UNIT, _PAGE, rows.ids.device.type == "cuda",
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
