"""Rows of the embedding table, and the first norm of a forward."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _embed(ids, table, x, count, H, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(count):
        return
    at = tl.arange(0, BLOCK)
    value = tl.load(table + tl.load(ids + row).to(tl.int64) * H + at, mask=at < H, other=0.0)
    tl.store(x + row.to(tl.int64) * H + at, value, mask=at < H)


def embed(ids: Tensor, table: Tensor, x: Tensor, count: Tensor) -> None:
    """x [R, H] = rows `ids` (int32 [R]) of `table` [vocab, H]."""
    block = triton.next_power_of_2(x.shape[1])
    _embed[(len(x),)](ids, table, x, count, x.shape[1], block, num_warps=4, enable_fp_fusion=False)


def reference(ids: Tensor, table: Tensor) -> Tensor:
    """[R, H]."""
    return table[ids.long()]
