"""silu(gate) * up, from the parts of one projection that holds gate over up."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu(gate_up, inner, count, R, INNER, inner_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(count):
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INNER
    gate = tl.zeros((BLOCK,), tl.float32)
    up = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        own = gate_up + (part * R + row).to(tl.int64) * 2 * INNER + at
        gate += tl.load(own, mask=inside, other=0.0)
        up += tl.load(own + INNER, mask=inside, other=0.0)
    result = up * (gate / (1.0 + tl.exp(-gate)))
    tl.store(inner + row.to(tl.int64) * inner_stride + at, result.to(inner.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, inner: Tensor, count: Tensor) -> None:
    """inner [R, I] of gate_up float32 [parts, R, 2 * I]."""
    parts, rows, both = gate_up.shape
    block = 1024
    _swiglu[(rows, triton.cdiv(both // 2, block))](
        gate_up, inner, count, rows, both // 2, inner.stride(0), parts, block, num_warps=4, enable_fp_fusion=False
    )


def reference(gate_up: Tensor) -> Tensor:
    """float32 [R, I]."""
    gate, up = gate_up.sum(0).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
