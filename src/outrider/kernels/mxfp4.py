"""MXFP4: 32 weights share one power-of-two scale and take four bits each (17 bytes for 32 weights).

Format (OCP Microscaling Formats v1.0; the byte order is that of the published gpt-oss checkpoints):
    blocks  uint8 [..., K/32, 16]   two E2M1 codes a byte, the even column in the low nibble
    scales  uint8 [..., K/32]       E8M0, value 2^(scale - 127)

A code is sign, two exponent bits, one mantissa bit: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
"""

import torch
from torch import Tensor

BLOCK = 32
SCALE_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES))
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=1)  # byte -> (low, high)
_SCALES = torch.ldexp(torch.ones(256, 1), torch.arange(256).unsqueeze(1) - SCALE_BIAS)
_SCALES[255] = float("nan")


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
    magnitudes = groups.abs()
    larger = (exponent + 1).clamp(max=254 - SCALE_BIAS)
    codes, error = _round(magnitudes, exponent)
    codes_larger, error_larger = _round(magnitudes, larger)
    better = 4 * error_larger < error  # in units of the smaller scale
    codes = torch.where(better.unsqueeze(-1), codes_larger, codes).to(torch.uint8)
    codes |= torch.signbit(groups).to(torch.uint8) << 3
    exponent = torch.where(better, larger, exponent)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks, (exponent + SCALE_BIAS).to(torch.uint8)


def _round(magnitudes: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes (float32 [..., 32], 0 to 7) under 2^exponent, and the squared error in units of that scale.

    Codes are a half apart below 2, one apart below 4, two apart from there; `round` takes ties to even, which are the
    even codes.
    """
    scaled = magnitudes * torch.nn.functional.embedding(SCALE_BIAS - exponent, _SCALES.to(exponent.device))
    fine, middle = torch.round(scaled * 2), torch.round(scaled)
    coarse = torch.round(scaled * 0.5).clamp_(max=3)
    codes = torch.where(scaled < 2, fine, torch.where(scaled < 4, middle + 2, coarse + 4))
    values = torch.where(scaled < 2, fine * 0.5, torch.where(scaled < 4, middle, coarse * 2))
    return codes, (values - scaled).square_().sum(-1, dtype=torch.float64)
