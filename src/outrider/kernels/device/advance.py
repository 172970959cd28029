"""The end of a greedy round on the device: keep the tokens, see whether a sequence stops, and set up the next round.

The host queues several rounds at once. When a sequence stops, `count` becomes 0 and the rounds behind do nothing.
"""

import triton
import triton.language as tl
from torch import Tensor

MOST_STOPS = 16
"""Stop tokens of one sequence that the device can watch for."""
STOPPED = -2
"""Stands in `said` where a round did not run."""

_PAGE = 16


@triton.jit
def _advance(
    tokens, stops, said, turn, count, units, ids, positions, limits, slots, tables, width,
    ROWS: tl.constexpr, STOPS: tl.constexpr, STOPPED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    number = tl.load(count)
    now = tl.load(turn)
    runs = row < number
    token = tl.load(tokens + row, mask=runs, other=STOPPED)
    tl.store(said + now * ROWS + row, token)
    tl.store(turn, now + 1)
    watched = tl.load(stops + row[:, None] * STOPS + tl.arange(0, STOPS)[None, :])
    stop = tl.max((watched == token[:, None]).to(tl.int32), axis=1) > 0
    over = runs & (stop | (token < 0))
    if tl.max(over.to(tl.int32), axis=0) > 0:
        tl.store(count, 0)
        tl.store(units, 0)
        return
    position = tl.load(positions + row, mask=runs, other=0) + 1
    page = tl.load(tables + row * width + position // PAGE, mask=runs, other=0)
    tl.store(ids + row, token, mask=runs)
    tl.store(positions + row, position, mask=runs)
    tl.store(limits + row, position, mask=runs)
    tl.store(slots + row, page * PAGE + position % PAGE, mask=runs)


def advance(
    tokens: Tensor,
    stops: Tensor,
    said: Tensor,
    turn: Tensor,
    count: Tensor,
    units: Tensor,
    ids: Tensor,
    positions: Tensor,
    limits: Tensor,
    slots: Tensor,
    tables: Tensor,
) -> None:
    """One row a sequence, line i of `tables` for row i; all int32.

    Args:
        tokens [R]: what was chosen, -1 for a row whose logits are not finite, which stops too.
        stops [R, MOST_STOPS]: -3 where there is none. said [turns, R]; turn [1]: the line to write next.
        count, units [1]; ids, positions, limits, slots [R]: as in `models/rows.py`, set for the next round.
        tables [sequences, pages]: pages for one token more than the round's must be there.
    """
    rows = said.shape[1]
    _advance[(1,)](
        tokens, stops, said, turn, count, units, ids, positions, limits, slots, tables, tables.shape[1], rows,
        stops.shape[1], STOPPED, _PAGE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
