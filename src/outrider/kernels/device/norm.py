"""Residual add and RMS norm in one pass: x += a sum of terms, h = norm(x).

The terms of a row are the parts of a projection, or the results of its experts with their weights, added in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.rms_norm import rms_norm


@triton.jit
def _add_norm(
    x, terms, mix, bias, weight, h, tap, count, eps, H, h_stride, tap_stride, term_stride, row_stride,
    TERMS: tl.constexpr, MIXED: tl.constexpr, BIASED: tl.constexpr, TAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(count):
        return
    at = tl.arange(0, BLOCK)
    inside = at < H
    total = tl.zeros((BLOCK,), tl.float32)
    for term in tl.static_range(TERMS):
        value = tl.load(terms + row.to(tl.int64) * row_stride + term * term_stride + at, mask=inside, other=0.0)
        if MIXED:
            value *= tl.load(mix + row * TERMS + term)
        total += value
    if BIASED:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    place = x + row.to(tl.int64) * H + at
    summed = (tl.load(place, mask=inside, other=0.0).to(tl.float32) + total).to(x.dtype.element_ty)
    tl.store(place, summed, mask=inside)
    if TAPPED:
        tl.store(tap + row.to(tl.int64) * tap_stride + at, summed, mask=inside)
    wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    normed = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * (wide * scale)
    tl.store(h + row.to(tl.int64) * h_stride + at, normed.to(h.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor,
    terms: Tensor | None,
    bias: Tensor | None,
    weight: Tensor,
    eps: float,
    h: Tensor,
    count: Tensor,
    mix: Tensor | None = None,
    tap: Tensor | None = None,
) -> None:
    """x += sum of terms + bias in place, h = norm(x), tap = x.

    Args:
        x [R, H]; tap [R, H], rows may be apart; h [R, at least H].
        terms: float32 [parts, R, H]; with `mix` float32 [R, k], float32 [R * k, H]; None adds nothing.
        bias, weight [H].
    """
    rows, hidden = x.shape
    count_terms, term_stride, row_stride = 0, 0, 0
    if mix is not None:
        count_terms, term_stride, row_stride = mix.shape[1], hidden, mix.shape[1] * hidden
    elif terms is not None:
        count_terms, term_stride, row_stride = len(terms), rows * hidden, hidden
    block = triton.next_power_of_2(hidden)
    tap_stride = 0 if tap is None else tap.stride(0)
    _add_norm[(rows,)](
        x, x if terms is None else terms, mix, bias, weight, h, tap, count, eps, hidden, h.stride(0), tap_stride,
        term_stride, row_stride, count_terms, mix is not None, bias is not None, tap is not None, block,
        num_warps=max(4, min(32, block // 128)), enable_fp_fusion=False,
    )  # fmt: skip


def reference(
    x: Tensor, terms: Tensor | None, bias: Tensor | None, weight: Tensor, eps: float, mix: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(x, h)."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if terms is not None:
        split = terms.unbind(0) if mix is None else (terms.view(*mix.shape, -1) * mix.unsqueeze(-1)).unbind(1)
        for term in split:
            total += term
    if bias is not None:
        total += bias.float()
    x = (x.float() + total).to(x.dtype)
    return x, rms_norm(x, weight, eps)
