"""The one sampling warp: temperature, then top-k, then top-p; and the draw from what is left.

Target, draft and plain decoding all go through here, which is what makes sampled verification lossless.
"""

import hashlib

import torch
from torch import Tensor

from outrider.config import SamplingParams


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities float32 [..., vocab] of `logits` under `params` (temperature > 0).

    Top-k keeps the k largest; top-p keeps the smallest set of largest tokens whose mass reaches p, the token that
    crosses p included. Among equal logits the smaller id comes first.
    """
    # Relative to the largest and bounded: a tiny temperature sharpens to the argmax, a huge one flattens to a draw
    # among all that can be drawn, and neither overflows.
    relative = logits.float() - logits.amax(-1, keepdim=True).float()
    probs = torch.softmax(relative / min(max(params.temperature, 1e-30), 1e30), dim=-1)
    if params.top_k == 0 and params.top_p >= 1:
        return probs
    ranked, ids = torch.sort(probs, dim=-1, descending=True, stable=True)
    if params.top_k:
        ranked[..., params.top_k :] = 0
        ranked /= ranked.sum(-1, keepdim=True)
    if params.top_p < 1:
        mass_before = ranked.cumsum(-1) - ranked
        ranked[..., 1:].masked_fill_(mass_before[..., 1:] >= params.top_p, 0)
        ranked /= ranked.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, ids, ranked)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token for each row of `probs` [rows, vocab], at `uniforms` float64 [rows] in [0, 1) of its cumulated mass.

    Rows need not sum to 1. Returns: int64 [rows]; never a token of probability zero, unless all are.
    """
    cumulated = probs.double().cumsum(-1)
    tokens = torch.searchsorted(cumulated, (uniforms * cumulated[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).byte().argmax(-1)  # rounding must not reach beyond it
    return torch.minimum(tokens, last)


def uniform(seed: int, *place: int | str) -> float:
    """The random number in [0, 1) that belongs to `place` in the output of a request with `seed`.

    It has no state, so nothing else that runs can shift it.
    """
    digest = hashlib.blake2b("/".join(map(str, (seed, *place))).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53
