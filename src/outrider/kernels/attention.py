"""Attention of a few rows on one sequence's keys and values, with sliding windows and sinks.

Keys are taken in splits at fixed absolute positions and combined in order by the online softmax (Milakov and
Gimelshein 2018, arXiv 1805.02867), so a row's bits depend neither on the rows beside it nor on how long the sequence
has grown: a split that a row does not see leaves its running sums untouched. A sink is a logit without a value
(Xiao et al. 2023, arXiv 2309.17453; learned per head in gpt-oss).
"""

import torch
from torch import Tensor

from outrider.kernels.linear import pad_rows

KEY_SPLIT = 256


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_position: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of rows at positions first_position, first_position + 1, ... on keys at positions 0, 1, ...

    Args:
        query: [rows, heads, dim]; row r sees the keys at positions <= first_position + r, of those the last `window`.
            If not `causal`, it also sees those of the rows behind it (a draft block).
        keys, values: [length, kv_heads, dim], length a multiple of KEY_SPLIT that covers the rows' own positions;
            what lies beyond them is masked but must be finite.
        sinks: [heads] or None.

    Returns: [rows, heads, dim].
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    padded = pad_rows(query)
    tiled = padded.shape[0]
    # [kv_heads, rows * group, dim]: one matrix product per kv head serves its whole group.
    q = padded.view(tiled, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, tiled * group, dim)
    position = (first_position + torch.arange(tiled, device=q.device)).clamp_(max=first_position + rows - 1)
    position = position.repeat_interleave(group).unsqueeze(-1)  # [rows * group, 1]
    last = position if causal else first_position + rows - 1
    if sinks is None:
        top = q.new_full((kv_heads, tiled * group, 1), torch.finfo(torch.float32).min, dtype=torch.float32)
        total = torch.zeros_like(top)
    else:
        top = sinks.float().view(kv_heads, 1, group).expand(-1, tiled, -1).reshape(kv_heads, -1, 1)
        total = torch.ones_like(top)
    output = q.new_zeros(q.shape, dtype=torch.float32)

    first = 0 if window is None else max(0, first_position - window + 1) // KEY_SPLIT
    for split in range(first, (first_position + rows - 1) // KEY_SPLIT + 1):
        span = slice(split * KEY_SPLIT, (split + 1) * KEY_SPLIT)
        at = torch.arange(span.start, span.stop, device=q.device)
        hidden = (at > last).expand(tiled * group, -1)
        if window is not None:
            hidden = hidden | (at <= position - window)
        scores = torch.bmm(q, keys[span].permute(1, 2, 0)).float() * dim**-0.5
        scores.masked_fill_(hidden, float("-inf"))
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - new_top)
        shrink = torch.exp(top - new_top)
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + torch.bmm(weights.to(q.dtype), values[span].transpose(0, 1)).float()
        top = new_top

    output = (output / total).to(query.dtype).view(kv_heads, tiled, group, dim)
    return output.transpose(0, 1).reshape(tiled, heads, dim)[:rows]
