"""The experts' MLPs over a work list: one interface, a kernel for each way that weights are stored.

`inner[pair] = act(gate, up)` of the pair's row, then `out[pair] = down(inner[pair])` in float32. The sum over a row's
pairs, in the order of their rank, belongs to the next kernel (`norm.py`), so an expert may run whenever its bytes are
there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.core import ExpertPart, ExpertWeights
from outrider.kernels.device.work import Work


@dataclass(frozen=True)
class ExpertShape:
    """hidden, inner: columns of the two projections; biased: both have a bias (gpt-oss).

    alpha, limit: of the clamped SwiGLU; limit None is silu(gate) * up.
    """

    hidden: int
    inner: int
    biased: bool
    alpha: float = 1.702
    limit: float | None = None


class ExpertKernel(Protocol):
    """Stored form, packing and computation of one kind of weights."""

    def parts(self) -> tuple[ExpertPart, ...]:
        """The tensors of a packed record, in order."""

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """A checkpoint's expert in packed form. Raises: ValueError for weights that cannot be packed."""

    def run(
        self, x: Tensor, work: Work, bounds: Tensor, k: int, inner: Tensor, out: Tensor, room: Tensor | None = None
    ) -> None:
        """Compute the entries of `bounds` (int32 [2], of `work`).

        Args:
            x: bfloat16 [R, hidden], rows a multiple of 64 apart and zero behind `hidden`.
            inner: bfloat16 [R * k, inner], likewise; out: float32 [R * k, hidden].
            room: of x's shape and its like, for steps of many rows an expert, whose `inner` no other step may use; the
                results are the same bits without it (None).
        """


def many_rows(rows: int, k: int, experts: int) -> bool:
    """Whether steps of so many rows are worth the kernels for many: more than one pass of 16 rows an expert."""
    return rows * k > 16 * experts


def activate(gate: Tensor, up: Tensor, shape: ExpertShape) -> Tensor:
    """The reference of what stands between the projections."""
    if shape.limit is None:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    return (up + 1) * (gate * torch.sigmoid(shape.alpha * gate))


def reference(
    dense: Mapping[int, tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]],
    x: Tensor,
    ids: Tensor,
    shape: ExpertShape,
) -> Tensor:
    """float32 [R * k, hidden] of rows x [R, hidden] sent to `ids` [R, k].

    Args:
        dense: by expert gate, up [inner, hidden], down [hidden, inner], bias of gate and up in a row, bias of down.
    """
    out = torch.zeros(ids.numel(), shape.hidden)
    for pair, expert in enumerate(ids.flatten().tolist()):
        gate, up, down, bias, down_bias = (None if t is None else t.float() for t in dense[expert])
        row = x[pair // ids.shape[1], : shape.hidden].float()
        assert gate is not None and up is not None and down is not None
        g, u = gate @ row, up @ row
        if bias is not None and down_bias is not None:
            g, u = g + bias[: shape.inner], u + bias[shape.inner :]
        inner = activate(g, u, shape).to(x.dtype).float()
        out[pair] = down @ inner + (0 if down_bias is None else down_bias)
    return out


def gate_up_of(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Plain gate and up [inner, hidden] of a checkpoint's expert: interleaved columns (gpt-oss) or two matrices."""
    if "gate_proj.weight" in weights:
        return weights["gate_proj.weight"], weights["up_proj.weight"]
    both = weights["gate_up_proj"].T
    return both[0::2], both[1::2]
