"""MXFP4: 32 weights share one power-of-two scale and take four bits each (17 bytes for 32 weights).

Format (OCP Microscaling Formats v1.0; the byte order is that of the published gpt-oss checkpoints):
    blocks  uint8 [..., K/32, 16]   two E2M1 codes a byte, the even column in the low nibble
    scales  uint8 [..., K/32]       E8M0, value 2^(scale - 127)

A code is sign, two exponent bits, one mantissa bit: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
"""

from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32
SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES))
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=1)  # byte -> (low, high)
_SCALES = torch.ldexp(torch.ones(256, 1), torch.arange(256).unsqueeze(1) - SCALE_BIAS)
_SCALES[255] = float("nan")
# Between two neighbours the even code wins a tie, as IEEE rounding does.
_MIDPOINTS = torch.tensor([(a + b) / 2 for a, b in pairwise(_MAGNITUDES)])


def unpack(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode to `dtype` [..., K]; exact for float32 and bfloat16 with scales from 1 to 251.

    Args: blocks uint8 [..., K/32, 16], scales uint8 [..., K/32], both on one device.
    """
    values = torch.nn.functional.embedding(blocks.int(), _PAIRS.to(blocks.device))  # [..., K/32, 16, 2]
    factors = torch.nn.functional.embedding(scales.int(), _SCALES.to(blocks.device))  # [..., K/32, 1]
    return values.flatten(-2).mul_(factors).flatten(-2).to(dtype)


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Encode [..., K] (K a multiple of 32, finite) to (blocks, scales).

    Each block takes the OCP scale, floor(log2(max|w|)) - 2, or the next larger one where that gives a smaller squared
    error (it does when the maximum would saturate). Values on the grid of a block that uses 4 or 6 come back bit for
    bit; a block of zeros gets scale 127.

    Raises: ValueError if K is not a multiple of 32 or a value is not finite.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"MXFP4 packs rows of a multiple of {BLOCK} values, got {weight.shape[-1]}")
    groups = weight.float().reshape(*weight.shape[:-1], -1, BLOCK)
    largest = groups.abs().amax(-1)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("MXFP4 cannot encode infinite or NaN weights")
    exponent = torch.frexp(largest).exponent - 1 - 2  # frexp: largest = m * 2^e with m in [0.5, 1)
    exponent = torch.where(largest > 0, exponent, 0).clamp(-SCALE_BIAS, 254 - SCALE_BIAS)
    larger = (exponent + 1).clamp(max=254 - SCALE_BIAS)
    codes, error = _round(groups, exponent)
    codes_larger, error_larger = _round(groups, larger)
    better = error_larger < error
    codes = torch.where(better.unsqueeze(-1), codes_larger, codes)
    exponent = torch.where(better, larger, exponent)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks, (exponent + SCALE_BIAS).to(torch.uint8)


def _round(groups: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes (uint8 [..., 32]) under 2^exponent, and the squared error relative to that scale's unit."""
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1))
    magnitude = scaled.abs()
    midpoints = _MIDPOINTS.to(groups.device)
    below = torch.bucketize(magnitude, midpoints, right=False)  # a tie stays with the lower code
    above = torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(below % 2 == 0, below, above)
    error = torch.ldexp(_VALUES.to(groups.device)[code] - magnitude, exponent.unsqueeze(-1)).double().square().sum(-1)
    return (code | (torch.signbit(groups).int() << 3)).to(torch.uint8), error
