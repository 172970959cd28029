"""Which drafts of a verify stand, and the token after them: pure functions over a batch.

A verify of width w runs rows 0..w-1: row 0 carries the anchor, row i the draft d_i. Row i-1 predicts the token at
d_i's place, so d_1..d_w are all *tested*, d_w by the last row although it has no row of its own. Accepted is the
longest prefix of tested drafts that stand. If all of d_1..d_w stand, d_w is the last token; otherwise the row behind
the prefix gives the token in place of the draft that fell. Either way a verify gives `accepted` drafts, and one token
more unless accepted = w. A place for which nothing was drafted counts as a draft that falls, which makes plain
decoding the case w = 1.

The last draft tested is never thrown away for a fresh draw: a rule that chose w after looking at d_w would bias the
output.

Shapes: S sequences, W the largest width, V the vocabulary. Rows beyond a sequence's own width are ignored.
"""

import torch
from torch import Tensor

from outrider.kernels.warp import draw

NOTHING = -1
"""Stands in `drafts` where nothing was drafted."""


def accept_greedy(choices: Tensor, drafts: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy verification: a draft stands if it is the target's choice.

    Args:
        choices: int64 [S, W], the target's argmax of each row.
        drafts: int64 [S, W], column i holds d_{i+1}, or NOTHING.
        widths: int64 [S], each from 1 to W.

    Returns: (accepted int64 [S], the token in place of the first draft that fell int64 [S], NOTHING if none did).
    """
    accepted = _leading(choices == drafts, widths)
    return accepted, _at(choices, accepted, widths)


def accept_sampled(
    target_probs: Tensor,
    draft_probs: Tensor,
    drafts: Tensor,
    widths: Tensor,
    uniforms: Tensor,
    last_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

    A draft stands with probability min(1, target_probs / draft_probs); in place of the first that falls comes a draw
    from what the target has beyond the draft, max(0, target_probs - draft_probs). The tokens are distributed as the
    target's own, whatever the drafter, provided that each draft was drawn from its `draft_probs` row.

    Args:
        target_probs, draft_probs: float [S, W, V], both warped alike; row i of `draft_probs` is what d_{i+1} was drawn
            from, all zero where nothing was drafted.
        drafts: int64 [S, W], column i holds d_{i+1}, or NOTHING.
        widths: int64 [S], each from 1 to W.
        uniforms: float64 [S, W] in [0, 1), one a test; last_uniforms: float64 [S], for the last token.

    Returns: (accepted int64 [S], the token in place of the first draft that fell int64 [S], NOTHING if none did).
    """
    tested = drafts.clamp(min=0).unsqueeze(-1)
    wanted = target_probs.gather(-1, tested).squeeze(-1).double()
    offered = draft_probs.gather(-1, tested).squeeze(-1).double()
    accepted = _leading((uniforms * offered < wanted) & (drafts != NOTHING), widths)
    row = accepted.clamp(max=target_probs.shape[1] - 1).view(-1, 1, 1).expand(-1, 1, target_probs.shape[2])
    target = target_probs.gather(1, row).squeeze(1).double()
    left = (target - draft_probs.gather(1, row).squeeze(1).double()).clamp(min=0)
    left = torch.where((left > 0).any(-1, keepdim=True), left, target)
    return accepted, torch.where(accepted < widths, draw(left, last_uniforms), NOTHING)


def committed_rows(accepted: int, width: int, emitted: int) -> int:
    """Rows of a verify that stay in KV memory: the anchor and the accepted drafts that had a row and were emitted.

    `emitted` is smaller than the verify gave where a stop token or the length limit ended the sequence.
    """
    return min(accepted, width - 1, emitted) + 1


def _leading(stands: Tensor, widths: Tensor) -> Tensor:
    """How many columns from the left are true, within each row's width."""
    within = torch.arange(stands.shape[1], device=stands.device) < widths.unsqueeze(-1)
    return (stands & within).long().cumprod(-1).sum(-1)


def _at(choices: Tensor, accepted: Tensor, widths: Tensor) -> Tensor:
    row = accepted.clamp(max=choices.shape[1] - 1).unsqueeze(-1)
    return torch.where(accepted < widths, choices.gather(1, row).squeeze(1), NOTHING)
