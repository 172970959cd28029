"""Expert layers for training: sorted grouped products on CUDA, a plain loop elsewhere, and MXFP4 fake rounding.

Contract: both forms compute sum_k score[t, k] * (swiglu(x W1' + b1) W2' + b2) for the chosen experts. `fake_quant`
returns exactly the values that `kernels.mxfp4.pack` stores and passes gradients through unchanged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]
_BLOCK = 32
_LARGEST = 6.0
_CHUNKS = 128  # a long sum in parallel parts


def looped_experts(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """`x` [T, H], `chosen` int64 [T, k], `scores` [T, k], weights [E, 2I, H] and [E, H, I] -> [T, H]."""
    out = torch.zeros_like(x)
    for expert in range(weights[0].shape[0]):
        rows, slot = torch.where(chosen == expert)
        up = F.linear(x[rows], weights[0][expert], biases[0][expert])
        down = F.linear(activation(up), weights[1][expert], biases[1][expert])
        out = out.index_add(0, rows, down * scores[rows, slot, None].to(x.dtype))
    return out


@dataclass
class ExpertInputs:
    """Rows sorted by expert: `order` and its inverse int64 [T*k], `expert` of each sorted row, `ends` int32 [E]."""

    order: Tensor
    inverse: Tensor
    expert: Tensor
    ends: Tensor


def expert_inputs(chosen: Tensor, experts: int) -> ExpertInputs:
    """Sort the (token, slot) pairs of `chosen` int64 [T, k] by expert, without waiting for the device."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    counts = (chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)).sum((0, 1))
    return ExpertInputs(order, inverse, flat[order], counts.cumsum(0).to(torch.int32))


def grouped_experts(
    x: Tensor,
    rows: ExpertInputs,
    scores: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The same sum as `looped_experts` by two grouped products over sorted rows; bfloat16 on CUDA."""
    tokens, top_k = scores.shape
    pairs = x.unsqueeze(1).expand(tokens, top_k, x.shape[1]).reshape(tokens * top_k, x.shape[1])
    sorted_rows = _apply(_Permute, pairs, rows.order, rows.inverse)
    up = F.grouped_mm(sorted_rows, weights[0].transpose(1, 2), offs=rows.ends)
    up = _apply(_AddBias, up, biases[0], rows.expert)
    down = F.grouped_mm(activation(up), weights[1].transpose(1, 2), offs=rows.ends)
    down = _apply(_AddBias, down, biases[1], rows.expert)
    back = _apply(_Permute, down, rows.inverse, rows.order).view(tokens, top_k, -1)
    weighted: Tensor = (back * scores.unsqueeze(-1).to(back.dtype)).sum(1)
    return weighted


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    out = function.apply(*arguments)
    assert isinstance(out, Tensor)
    return out


class _Permute(torch.autograd.Function):
    """Rows in a new order; the gradient is the inverse gather (autograd's own would add atomically)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


class _AddBias(torch.autograd.Function):
    """Add each row's expert bias; its gradient, a sum over each expert's rows, is a product with a 0/1 matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
        ctx.save_for_backward(expert)
        ctx.experts = bias.shape[0]
        return x + bias[expert]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (expert,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        hits = (expert.unsqueeze(1) == torch.arange(ctx.experts, device=expert.device)).to(grad.dtype)
        chunks = math.gcd(len(expert), _CHUNKS)
        parts = hits.view(chunks, -1, ctx.experts).transpose(1, 2) @ grad.view(chunks, -1, grad.shape[1])
        return grad, parts.float().sum(0).to(grad.dtype), None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, rounding: Rounding) -> Tensor:
        ctx.dtype = weight.dtype
        return rounding(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None


def fake_quant(weight: Tensor, dtype: torch.dtype, rounding: Rounding) -> Tensor:
    """`rounding(weight)` in `dtype` (bfloat16 holds MXFP4 values exactly) with a straight-through gradient.

    Args: weight [..., K]; `rounding` is `mxfp4_values`, compiled or not.
    """
    return _apply(_StraightThrough, weight, dtype, rounding)


def mxfp4_values(weight: Tensor) -> Tensor:
    """`unpack(*pack(weight))` in arithmetic that a compiler can fuse; float32 [..., K], K a multiple of 32."""
    groups = weight.float().view(*weight.shape[:-1], -1, _BLOCK)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-120)
    # The exponent bits of a float32 are floor(log2) + 127.
    unit = ((largest.view(torch.int32) & 0x7F800000) - (2 << 23)).view(torch.float32)
    near, near_error = _round(groups, unit)
    far, far_error = _round(groups, unit * 2)
    return torch.where(far_error < near_error, far, near).flatten(-2)


def _round(groups: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest E2M1 multiples of `unit`, ties to the even code, and the squared error of each block in float64."""
    magnitude = (groups / unit).abs().clamp(max=_LARGEST)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.copysign((magnitude / step).round() * step * unit, groups)
    return rounded, (rounded - groups).double().square().sum(-1, keepdim=True)
