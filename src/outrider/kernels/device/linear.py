"""Projection of few rows by a matrix [N, K] that is read once: bound by memory, not by arithmetic.

One fixed order of K whatever the bucket and its tiles of rows: a row's sums are the same bits in all of them.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""What rows of `project` have to be a multiple of."""

_BLOCK_K = 64
_TILES = {16: (64, 4, 6), 32: (64, 4, 5), 64: (64, 4, 4), 128: (128, 8, 3)}
"""Rows of a tile -> columns, warps and stages: the fastest of those tried (docs/decisions/0008-device-kernels.md)."""
_BLOCKS = 256
"""Thread blocks that keep every multiprocessor of a large GPU reading."""


@triton.jit
def _project(
    x, weight, out, count, N, K, R, x_stride,
    PARTS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(2) * ROWS
    if first >= tl.load(count):
        return
    part = tl.program_id(1)
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    steps = tl.cdiv(K, BK)
    x_rows = x + rows[:, None] * x_stride
    weight_rows = weight + columns[:, None].to(tl.int64) * K
    sums = tl.zeros((ROWS, BN), tl.float32)
    for step in range(steps * part // PARTS, steps * (part + 1) // PARTS):
        k = step * BK + tl.arange(0, BK)[None, :]
        a = tl.load(x_rows + k, mask=k < K, other=0.0)
        b = tl.load(weight_rows + k, mask=(columns[:, None] < N) & (k < K), other=0.0)
        sums = tl.dot(a, b.T, sums)
    at = out + (part * R + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(at, sums, mask=columns[None, :] < N)


def parts_for(n: int, k: int) -> int:
    """Parts of K for a matrix [n, k], at most 8. It depends on the matrix alone, as bits depend on it."""
    return max(1, min(8, _BLOCKS // -(-n // (64 if n > 256 else 16)), k // 128))


def project(x: Tensor, weight: Tensor, out: Tensor, count: Tensor) -> None:
    """out[p] = x times part p of weight [N, K] transposed.

    Args: x [R, at least K] and weight of one dtype, R a multiple of 16; out float32 [parts, R, N].
    """
    parts, rows, n = out.shape
    tile = next(tile for tile in (128, 64, 32, 16) if rows % tile == 0)
    block, warps, stages = _TILES[tile] if n > 256 else (16, 4, 6)  # a router's matrix is small
    grid = (triton.cdiv(n, block), parts, rows // tile)
    _project[grid](
        x, weight, out, count, n, weight.shape[1], rows, x.stride(0), parts, tile, block, _BLOCK_K,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip


def reference(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """float32 [parts, R, N]."""
    steps = -(-x.shape[1] // _BLOCK_K)
    cuts = [steps * part // parts * _BLOCK_K for part in range(parts)] + [x.shape[1]]
    spans = [slice(a, b) for a, b in pairwise(cuts)]
    return torch.stack([x[:, span].float() @ weight[:, span].float().T for span in spans])
