"""One expert's MLP over its stored parts: the reference that every faster expert kernel is compared with.

Packed parts are decoded for each use; nothing is kept, so an expert costs no memory beside its slot.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core import ExpertWeights
from outrider.kernels import mxfp4
from outrider.kernels.linear import linear


def clamped_swiglu_expert(x: Tensor, weights: ExpertWeights, alpha: float, limit: float) -> Tensor:
    """gpt-oss: (up + 1) * gate * sigmoid(alpha * gate) with clamps, gate and up interleaved, biases. x [rows, hidden].

    Args: weights with gate_up_proj and down_proj as blocks + scales [out, in] or plain [in, out], and their biases.
    """
    gate_up = linear(x, _gpt_oss_matrix(weights, "gate_up_proj", x.dtype), weights["gate_up_proj_bias"].to(x.dtype))
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    inner = (up + 1) * (gate * torch.sigmoid(gate * alpha))
    return linear(inner, _gpt_oss_matrix(weights, "down_proj", x.dtype), weights["down_proj_bias"].to(x.dtype))


def swiglu_expert(x: Tensor, weights: ExpertWeights) -> Tensor:
    """Qwen3: silu(gate) * up. x [rows, hidden].

    Args: weights gate_proj, up_proj, down_proj, each `.weight` [out, in] or `.weight_blocks` and `.weight_scales`.
    """
    gate, up, down = (_matrix(weights, f"{name}_proj.weight", x.dtype) for name in ("gate", "up", "down"))
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)


def _matrix(weights: ExpertWeights, name: str, dtype: torch.dtype) -> Tensor:
    if f"{name}_blocks" in weights:
        return mxfp4.unpack(weights[f"{name}_blocks"], weights[f"{name}_scales"], dtype)
    return weights[name].to(dtype)


def _gpt_oss_matrix(weights: ExpertWeights, name: str, dtype: torch.dtype) -> Tensor:
    """[out, in], whichever way it is stored."""
    matrix = _matrix(weights, name, dtype)
    return matrix if f"{name}_blocks" in weights else matrix.T
