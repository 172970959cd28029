"""Root mean square norm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in float32."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., dim] and weight [dim] of any float dtype; returns x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * (wide * scale)).to(x.dtype)
