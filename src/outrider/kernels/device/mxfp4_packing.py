"""MXFP4 weights as tensor-core register fragments: the layout that `mxfp4.cu` reads.

A matrix [N, K] (N a multiple of 16, K of 32) becomes
    words   uint8 [N/16, G, 32, 16]   G = ceil(K/64) groups; each lane's four 32-bit words, one a k16 step
    scales  uint8 [N/16, G, 8, 2, 2]  (row g, half h of the group, rows g and g + 8), exponent + 126

Lane (g, c) = (lane / 4, lane % 4) holds columns 16c .. 16c+15 of its group for rows g and g+8. Word j has columns
16c+4j .. +3 as the four A registers of mma.m16n8k16: a0, a1 rows g, g+8 of the first two columns, a2, a3 of the others.
Each register is two codes (even column low), whose bits are spread so that it takes a shift and a mask to read them:
`_MAGNITUDE` and `_SIGN` say where. Columns of a product may be permuted as long as both sides are, which is why a lane
may own 16 neighbours.

In a gated matrix, row g of a tile is gate row 8t+g and row g+8 is up row 8t+g, so one thread has both.
"""

import torch
from torch import Tensor

from outrider.kernels import mxfp4

SCALE_SHIFT = 126
MOST_SCALE = 128
"""The largest stored E8M0 scale: 2^(scale - 127) * 2^126 has to be a bfloat16."""

_MAGNITUDE = (
    ((0, 1, 2), (16, 17, 18)),
    ((4, 5, 6), (20, 21, 22)),
    ((10, 11, 12), (26, 27, 28)),
    ((14, 7, 8), (30, 23, 24)),
)
_SIGN = ((9, 25), (13, 29), (19, 3), (15, 31))


def groups(columns: int) -> int:
    """Groups of 64 columns, the last one filled up with zeros."""
    return -(-columns // 64)


def pack(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(words, scales) of a matrix in its stored form, blocks uint8 [N, K/32, 16] and scales uint8 [N, K/32].

    Raises: ValueError if a scale is above `MOST_SCALE`.
    """
    rows, halves = scales.shape
    if int(scales.max()) > MOST_SCALE:
        raise ValueError(f"an MXFP4 scale of 2^{int(scales.max()) - mxfp4.SCALE_BIAS} is too large to be packed")
    missing = -halves % 2
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(rows, halves * 32)
    codes = torch.nn.functional.pad(codes, (0, 32 * missing))
    scales = torch.nn.functional.pad(scales, (0, missing), value=mxfp4.SCALE_BIAS)
    # [tile, half of the tile, g, group, c, j, register half, parity]
    codes = codes.view(rows // 16, 2, 8, -1, 4, 4, 2, 2)
    words = torch.zeros(codes.permute(0, 3, 2, 4, 5, 1, 6, 7).shape[:5], dtype=torch.int32, device=blocks.device)
    for register in range(4):
        for parity in range(2):
            code = codes[:, register % 2, :, :, :, :, register // 2, parity].permute(0, 2, 1, 3, 4).int()
            for bit, to in enumerate((*_MAGNITUDE[register][parity], _SIGN[register][parity])):
                words |= ((code >> bit) & 1) << to
    packed = words.contiguous().view(torch.uint8).view(rows // 16, -1, 32, 16)
    spread = scales.view(rows // 16, 2, 8, -1, 2).permute(0, 3, 2, 4, 1) + SCALE_SHIFT
    return packed, spread.contiguous()


def unpack(words: Tensor, scales: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(blocks, scales) as stored, of a packed matrix with `columns` columns."""
    tiles, count = words.shape[:2]
    packed = words.contiguous().view(torch.int32).view(tiles, count, 8, 4, 4)
    codes = torch.zeros(tiles, 2, 8, count, 4, 4, 2, 2, dtype=torch.uint8, device=words.device)
    for register in range(4):
        for parity in range(2):
            code = torch.zeros_like(packed)
            for bit, at in enumerate((*_MAGNITUDE[register][parity], _SIGN[register][parity])):
                code |= ((packed >> at) & 1) << bit
            codes[:, register % 2, :, :, :, :, register // 2, parity] = code.permute(0, 2, 1, 3, 4).to(torch.uint8)
    flat = codes.view(tiles * 16, count * 64)[:, :columns]
    blocks = (flat[:, 0::2] | (flat[:, 1::2] << 4)).view(tiles * 16, -1, 16)
    stored = (scales - SCALE_SHIFT).permute(0, 4, 2, 1, 3).reshape(tiles * 16, -1)
    return blocks, stored[:, : columns // 32].contiguous()


def gated_rows(inner: int) -> Tensor:
    """The row of the interleaved matrix (gate 2i, up 2i+1) in each row of a gated packed one, int64 [2 * inner]."""
    unit = torch.arange(inner).view(-1, 8)
    return torch.cat((2 * unit, 2 * unit + 1), dim=1).flatten()
