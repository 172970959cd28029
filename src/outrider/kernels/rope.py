"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) in its half-split form, with YaRN (arXiv 2309.00071)."""

import math

import torch
from torch import Tensor

from outrider.config import Yarn


def rope_frequencies(head_dim: int, theta: float, yarn: Yarn | None) -> tuple[Tensor, float]:
    """(inverse frequencies float32 [head_dim/2], factor on cos and sin)."""
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if yarn is None:
        return plain, 1.0
    low, high = (_turns_at(turns, head_dim, theta, yarn) for turns in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Dimensions that turn often keep their frequency, those that turn seldom are interpolated, with a ramp between.
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1.0 - ramp.clamp(0, 1)
    factor = yarn.attention_factor
    if factor is None:
        factor = 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0
    return plain / yarn.factor * (1 - keep) + plain * keep, factor


def rope_tables(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each `dtype` [rows, head_dim/2], for int64 positions [rows]."""
    angles = positions.float().unsqueeze(-1) * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [rows, heads, head_dim] by the tables of its rows."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _turns_at(turns: float, head_dim: int, theta: float, yarn: Yarn) -> float:
    """The dimension (a real number) that makes `turns` full turns over the original context."""
    return head_dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
