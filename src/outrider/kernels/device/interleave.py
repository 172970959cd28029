"""Columns of activations in the order in which `mxfp4_wide.cu` multiplies them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _interleave(x, out, columns, x_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_group = place % 64
    column = place - in_group + in_group // 2 % 4 * 16 + in_group // 16 * 4 + in_group // 8 % 2 * 2 + place % 2
    value = tl.load(x + row * x_stride + column, mask=place < columns, other=0.0)
    tl.store(out + row * out_stride + place, value, mask=place < columns)


def interleave(x: Tensor, out: Tensor) -> None:
    """In each 64 columns of x [R, a multiple of 64], place 16 j + 8 h + 2 q + i of `out` becomes column
    16 q + 4 j + 2 h + i (q, j < 4; h, i < 2)."""
    rows, columns = len(x), out.shape[1]
    grid = (rows, triton.cdiv(columns, _BLOCK))
    _interleave[grid](x, out, columns, x.stride(0), out.stride(0), _BLOCK, num_warps=4, enable_fp_fusion=False)


def reference(x: Tensor) -> Tensor:
    """x with its columns in that order."""
    q, j, h, i = torch.meshgrid(*(torch.arange(n) for n in (4, 4, 2, 2)), indexing="ij")
    column = torch.empty(64, dtype=torch.int64)
    column[(16 * j + 8 * h + 2 * q + i).flatten()] = (16 * q + 4 * j + 2 * h + i).flatten()
    return x.view(len(x), -1, 64)[:, :, column.to(x.device)].flatten(1)
