"""The end of a queued greedy round on the device: which drafts stand, where each sequence stands then, and what to tell
the host. The rule is that of `spec/acceptance.py`; without drafts a round is the case of one row.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from outrider.kernels.device.set_rows import Standing

FIELDS = 3
"""What stands in a line of `said` before the tokens: accepted drafts, rows, tokens."""
DRAFTS_NOT_FINITE = -1
"""Stands in place of the accepted drafts of a round whose drafts had no finite logits."""


@triton.jit
def _accept(
    anchors, lengths, left, stops, number, times, turn, choices, drafts, count, kept, said, draft_stride,
    S: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, DRAFTS: tl.constexpr, STOPS: tl.constexpr,
    FIELDS: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    this = tl.load(turn)
    if CLOCK:
        tl.store(times + this * 3 + 2, globaltimer())
    s = tl.arange(0, S)
    live = s < tl.load(number)
    follow = tl.load(left + s, mask=live, other=0)
    width = tl.minimum(follow, WIDTH)
    start = tl.cumsum(width, axis=0) - width
    i = tl.arange(0, W)[None, :]
    exists = i < width[:, None]
    row = start[:, None] + i
    choice = tl.load(choices + row, mask=exists, other=0)
    draft = tl.full((S, W), -1, tl.int32)
    if DRAFTS > 0:
        draft = tl.load(drafts + s[:, None] * draft_stride + i, mask=exists & (i < DRAFTS), other=-1)
    fell = exists & ((choice != draft) | (choice < 0))
    accepted = tl.minimum(tl.min(tl.where(fell, i, W), axis=1), width)
    emitted = tl.minimum(accepted + 1, width)
    ends = choice < 0
    for stop in tl.static_range(STOPS):
        ends = ends | (choice == tl.load(stops + stop * LINES + s, mask=live, other=-1)[:, None])
    ends = ends & (i < emitted[:, None])
    emitted = tl.minimum(emitted, tl.min(tl.where(ends, i + 1, W + 1), axis=1))
    committed = tl.minimum(tl.minimum(accepted, width - 1), emitted) + 1
    tl.store(kept + row, (i < committed[:, None]).to(tl.int32), mask=exists)

    bad = exists & (i < DRAFTS) & (draft < 0)
    told = tl.where(tl.max(bad.to(tl.int32), axis=1) > 0, -1, accepted)
    line = said + (this * LINES + s) * LINE
    tl.store(line, told, mask=s < LINES)
    tl.store(line + 1, width, mask=s < LINES)
    tl.store(line + 2, emitted, mask=s < LINES)
    tl.store(line[:, None] + FIELDS + i, choice, mask=exists)

    wrong = live & ((told < 0) | (tl.max((ends & (choice < 0)).to(tl.int32), axis=1) > 0))
    if tl.max(wrong.to(tl.int32), axis=0) > 0:
        tl.store(count, 0)  # what cannot be settled is not committed either
    over = live & ((emitted == follow) | (tl.max(ends.to(tl.int32), axis=1) > 0) | (told < 0))
    tl.store(anchors + s, tl.sum(tl.where(i == emitted[:, None] - 1, choice, 0), axis=1), mask=live)
    tl.store(lengths + s, tl.load(lengths + s, mask=live, other=0) + committed, mask=live)
    tl.store(left + s, follow - emitted, mask=live)
    tl.store(turn, this + 1)
    if tl.max(over.to(tl.int32), axis=0) > 0:
        tl.store(number, 0)


def accept(
    standing: Standing,
    width: int,
    choices: Tensor,
    count: Tensor,
    kept: Tensor,
    said: Tensor,
    drafts: Tensor | None = None,
    num_drafts: int = 0,
    draft_stride: int = 0,
) -> None:
    """Settle a round whose rows `set_verify_rows` made.

    Args:
        choices: int32 [R], the target's choice of each row, -1 for a row whose logits are not finite.
        count: int32 [1], rows of the round; set to 0 where logits are not finite, so that nothing is committed.
        kept: int32 [R], 1 for a row that stays in KV memory.
        said: int32 [turns, sequences, FIELDS + width]; a round that does not run says that it has no tokens.
        drafts: as for `set_verify_rows`; num_drafts: drafts of a block.
    """
    _, lines, line = said.shape
    _accept[(1,)](
        standing.anchors, standing.lengths, standing.left, standing.stops, standing.number, standing.times,
        standing.turn, choices, drafts, count, kept, said, draft_stride, triton.next_power_of_2(len(standing.anchors)),
        triton.next_power_of_2(width), width, num_drafts, len(standing.stops), FIELDS, line, lines,
        said.device.type == "cuda", num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
