"""The one sampling warp: temperature, then top-k, then top-p; and the draw from what is left.

Target, draft and plain decoding all go through here, which is what makes sampled verification lossless.
"""

import random

import torch
from torch import Tensor

from outrider.config import SamplingParams


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities float32 [..., vocab] of `logits` under `params` (temperature > 0).

    Top-k keeps the k largest; top-p keeps the smallest set of largest tokens whose mass reaches p, the token that
    crosses p included. Among equal logits the smaller id comes first.
    """
    # Relative to the largest, so that a tiny temperature sharpens to the argmax and does not overflow.
    relative = logits.float() - logits.amax(-1, keepdim=True).float()
    probs = torch.softmax(relative / max(params.temperature, 1e-30), dim=-1)
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


def draw(probs: Tensor, uniform: float) -> int:
    """The token of `probs` [vocab] at `uniform` in [0, 1) of the cumulated distribution."""
    cumulated = probs.double().cumsum(-1)
    token = int(torch.searchsorted(cumulated, uniform * cumulated[-1], right=True))
    return min(token, int(probs.nonzero()[-1]))  # rounding must not reach a token of probability zero


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) for output token `index` of a request with `seed`: no state, so nothing else that
    runs can shift it."""
    return random.Random(f"{seed}/{index}").random()
