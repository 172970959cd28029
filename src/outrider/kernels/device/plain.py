"""Experts in plain floats: row-major matrices, one order of K for any number of rows and any tile of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core import ExpertPart, ExpertWeights
from outrider.kernels.device.experts import ExpertShape, gate_up_of
from outrider.kernels.device.work import Work

_FEW, _MANY = (16, 32), (64, 64)
"""Rows and columns of a tile."""


@triton.jit
def _gate_up(
    x, inner, address, start, pairs, bounds, INNER, K, x_stride, inner_stride, bias_at, alpha, limit,
    VISITS: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    entry = tl.load(bounds) + tl.program_id(1)
    if entry >= tl.load(bounds + 1):
        return
    record = tl.multiple_of(tl.load(address + entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
    first = tl.load(start + entry)
    number = tl.load(start + entry + 1) - first
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    weight = record + n[:, None] * K
    for done in range(0, number, ROWS):
        m = done + tl.arange(0, ROWS)
        pair = tl.load(pairs + first + m, mask=m < number, other=0)
        row = x + (pair // VISITS).to(tl.int64)[:, None] * x_stride
        gate = tl.zeros((ROWS, BN), tl.float32)
        up = tl.zeros((ROWS, BN), tl.float32)
        for step in range(tl.cdiv(K, BK)):
            k = step * BK + tl.arange(0, BK)[None, :]
            a = tl.load(row + k, mask=(m < number)[:, None] & (k < K), other=0.0)
            wanted = (n < INNER)[:, None] & (k < K)
            gate = tl.dot(a, tl.load(weight + k, mask=wanted, other=0.0).T, gate)
            up = tl.dot(a, tl.load(weight + INNER * K + k, mask=wanted, other=0.0).T, up)
        if BIASED:
            gate += tl.load(record + bias_at + n, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
            up += tl.load(record + bias_at + INNER + n, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            result = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
        else:
            result = up * (gate / (1.0 + tl.exp(-gate)))
        to = inner + pair.to(tl.int64)[:, None] * inner_stride + n[None, :]
        tl.store(to, result.to(inner.dtype.element_ty), mask=(m < number)[:, None] & (n < INNER)[None, :])


@triton.jit
def _down(
    inner, out, address, start, pairs, bounds, N, K, inner_stride, weight_at, bias_at,
    BIASED: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    entry = tl.load(bounds) + tl.program_id(1)
    if entry >= tl.load(bounds + 1):
        return
    record = tl.multiple_of(tl.load(address + entry).to(tl.pointer_type(inner.dtype.element_ty)), 16)
    first = tl.load(start + entry)
    number = tl.load(start + entry + 1) - first
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    weight = record + weight_at + n[:, None] * K
    for done in range(0, number, ROWS):
        m = done + tl.arange(0, ROWS)
        pair = tl.load(pairs + first + m, mask=m < number, other=0).to(tl.int64)
        row = inner + pair[:, None] * inner_stride
        sums = tl.zeros((ROWS, BN), tl.float32)
        for step in range(tl.cdiv(K, BK)):
            k = step * BK + tl.arange(0, BK)[None, :]
            a = tl.load(row + k, mask=(m < number)[:, None] & (k < K), other=0.0)
            b = tl.load(weight + k, mask=(n < N)[:, None] & (k < K), other=0.0)
            sums = tl.dot(a, b.T, sums)
        if BIASED:
            sums += tl.load(record + bias_at + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out + pair[:, None] * N + n[None, :], sums, mask=(m < number)[:, None] & (n < N)[None, :])


class PlainExperts:
    """`ExpertKernel` of weights in `dtype`, which is that of the activations, too."""

    def __init__(self, shape: ExpertShape, dtype: torch.dtype = torch.bfloat16) -> None:
        self._shape, self._dtype = shape, dtype

    def parts(self) -> tuple[ExpertPart, ...]:
        """gate over up, then down, each followed by its bias if there is one."""
        hidden, inner, dtype = self._shape.hidden, self._shape.inner, str(self._dtype).removeprefix("torch.")
        both = ExpertPart("gate_up", dtype, (2 * inner, hidden))
        down = ExpertPart("down", dtype, (hidden, inner))
        if not self._shape.biased:
            return (both, down)
        return (
            both,
            ExpertPart("gate_up_bias", dtype, (2 * inner,)),
            down,
            ExpertPart("down_bias", dtype, (hidden,)),
        )

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """Stored parts by name."""
        packed = {"gate_up": torch.cat(gate_up_of(weights))}
        if self._shape.biased:
            bias = weights["gate_up_proj_bias"]
            packed["gate_up_bias"] = torch.cat((bias[0::2], bias[1::2]))
            packed |= {"down": weights["down_proj"].T, "down_bias": weights["down_proj_bias"]}
        else:
            packed["down"] = weights["down_proj.weight"]
        return {name: part.to(self._dtype).contiguous() for name, part in packed.items()}

    def run(
        self, x: Tensor, work: Work, bounds: Tensor, k: int, inner: Tensor, out: Tensor, room: Tensor | None = None
    ) -> None:
        """See `ExpertKernel`."""
        shape, entries = self._shape, len(work.address)
        (rows, columns), warps, stages = (_FEW, 4, 4) if room is None else (_MANY, 8, 2)
        at = _offsets(shape, 256 // x.element_size())
        lists = (work.address, work.start, work.pairs, bounds)
        _gate_up[(triton.cdiv(shape.inner, columns), entries)](
            x, inner, *lists, shape.inner, shape.hidden, x.stride(0), inner.stride(0), at[1], shape.alpha,
            shape.limit or 0.0, k, shape.biased, shape.limit is not None, rows, columns, 128, num_warps=warps,
            num_stages=stages, enable_fp_fusion=False,
        )  # fmt: skip
        _down[(triton.cdiv(shape.hidden, columns), entries)](
            inner, out, *lists, shape.hidden, shape.inner, inner.stride(0), at[2], at[3],
            shape.biased, rows, columns, 128, num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip


def _offsets(shape: ExpertShape, aligned: int) -> tuple[int, int, int, int]:
    """Where gate_up, its bias, down and its bias start in a record whose parts are `aligned`, all in elements."""

    def padded(elements: int) -> int:
        return -(-elements // aligned) * aligned

    bias = padded(2 * shape.inner * shape.hidden)
    down = bias + (padded(2 * shape.inner) if shape.biased else 0)
    return 0, bias, down, down + padded(shape.hidden * shape.inner)
