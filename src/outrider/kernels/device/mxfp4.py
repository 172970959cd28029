"""Experts in MXFP4: CUDA C++ over register fragments, packed as `mxfp4_packing.py` says.

`mxfp4.cu` reads weights as fast as memory gives them and serves up to 16 rows a pass, `mxfp4_wide.cu` multiplies many
rows an expert. Both give the same bits.
"""

import torch
import triton
from torch import Tensor

from outrider.core import ExpertPart, ExpertWeights
from outrider.kernels.device.cuda import CudaKernel
from outrider.kernels.device.experts import ExpertShape
from outrider.kernels.device.interleave import interleave
from outrider.kernels.device.mxfp4_packing import gated_rows, groups, pack
from outrider.kernels.device.work import Work

MOST_BLOCKS = 2048
"""Thread blocks of a launch: they take tiles in turn, so that few entries start few idle blocks."""

MOST_SHARES = 8
"""Thread blocks that share the rows of an expert."""

_GATE_UP = {"TILES": 2, "PARTS": 2, "DEPTH": 3, "GATED": 1}
_DOWN = {"TILES": 1, "PARTS": 4, "DEPTH": 3, "GATED": 0}
"""The fastest of those tried (docs/decisions/0008-device-kernels.md). PARTS decides bits, so it never varies."""

_WIDE = (
    {"WARPS": 4, "BLOCKS": 4, "COLUMNS": 4, "STAGES": 4},
    {"WARPS": 8, "BLOCKS": 1, "COLUMNS": 8, "STAGES": 3},
)
"""For up to 32 rows an expert, and for more."""


class Mxfp4Experts:
    """`ExpertKernel` of packed MXFP4 weights. `columns`: most tiles of 8 rows that one pass over the weights serves."""

    def __init__(self, shape: ExpertShape, columns: int = 2) -> None:
        self._shape = shape
        self._few = tuple(
            CudaKernel("mxfp4.cu", "project", macros | {"COLUMNS": columns}) for macros in (_GATE_UP, _DOWN)
        )
        self._wide = [(_wide_kernel(_GATE_UP, wide), _wide_kernel(_DOWN, wide)) for wide in _WIDE]

    def parts(self) -> tuple[ExpertPart, ...]:
        """Words, scales and bias of gate_up, then of down."""
        return tuple(
            part
            for name, rows, columns in self._matrices()
            for part in (
                ExpertPart(f"{name}_words", "uint8", (rows // 16, groups(columns), 32, 16)),
                ExpertPart(f"{name}_scales", "uint8", (rows // 16, groups(columns), 8, 2, 2)),
                *([ExpertPart(f"{name}_bias", "bfloat16", (rows,))] if self._shape.biased else []),
            )
        )

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        """Stored parts by name. Raises: ValueError for a scale that is too large."""
        packed: dict[str, Tensor] = {}
        for name, (blocks, scales) in self._stored(weights).items():
            packed[f"{name}_words"], packed[f"{name}_scales"] = pack(blocks, scales)
            if self._shape.biased:
                packed[f"{name}_bias"] = weights[f"{name}_proj_bias"]
        return packed

    def run(
        self, x: Tensor, work: Work, bounds: Tensor, k: int, inner: Tensor, out: Tensor, room: Tensor | None = None
    ) -> None:
        """See `ExpertKernel`."""
        for source in (x, inner):
            if source.stride(0) % 64:
                raise ValueError(f"rows of activations are {source.stride(0)} columns apart, not a multiple of 64")
        kernels: tuple[CudaKernel, ...] = self._few
        if room is not None:
            interleave(x, room)
            x, kernels = room, self._wide[len(work.pairs) > 32 * len(work.address)]
        shape, at = self._shape, self._offsets()
        lists = (work.address, work.start, work.pairs, bounds)
        for kernel, source, target, rows, columns, visits, places in (
            (kernels[0], x, inner, 2 * shape.inner, shape.hidden, k, at[:3]),
            (kernels[1], inner, out, shape.hidden, shape.inner, 1, at[3:]),
        ):
            tiles, threads, shared, shares = _geometry(kernel, len(work.pairs) // len(work.address))
            blocks = min(triton.cdiv(rows // 16, tiles) * len(work.address), MOST_BLOCKS)
            kernel.launch(
                (blocks, shares), threads, shared,
                source, target, *lists, rows, groups(columns), visits, source.stride(0), target.stride(0), *places,
                shape.alpha, shape.limit or 0.0,
            )  # fmt: skip

    def _matrices(self) -> tuple[tuple[str, int, int], ...]:
        """(name, rows, columns) of both."""
        return (
            ("gate_up", 2 * self._shape.inner, self._shape.hidden),
            ("down", self._shape.hidden, self._shape.inner),
        )

    def _offsets(self) -> tuple[int, ...]:
        """Where words, scales and bias of both start in a record, in bytes (-1: no bias)."""
        offset, places = 0, []
        for _, rows, columns in self._matrices():
            sizes = [rows * groups(columns) * 32, rows * groups(columns) * 2, 2 * rows if self._shape.biased else 0]
            for nbytes in sizes:
                places.append(offset if nbytes else -1)
                offset += -(-nbytes // 256) * 256
        return tuple(places)

    def _stored(self, weights: ExpertWeights) -> dict[str, tuple[Tensor, Tensor]]:
        """Blocks and scales of both matrices, gate_up in the order of its packed rows."""
        stored = {}
        for kind in ("blocks", "scales"):
            if f"gate_up_proj_{kind}" in weights:
                both, down = weights[f"gate_up_proj_{kind}"], weights[f"down_proj_{kind}"]
            else:
                gate, up, down = (weights[f"{name}_proj.weight_{kind}"] for name in ("gate", "up", "down"))
                both = torch.stack((gate, up), dim=1).flatten(0, 1)
            stored[kind] = both[gated_rows(self._shape.inner).to(both.device)], down
        return {name: (stored["blocks"][i], stored["scales"][i]) for i, name in enumerate(("gate_up", "down"))}


def _geometry(kernel: CudaKernel, rows: int) -> tuple[int, int, int, int]:
    """Weight tiles of a block, its threads and shared bytes, and blocks that share the `rows` of an expert."""
    macros = kernel.macros
    if "WARPS" in macros:
        return macros["WARPS"], 32 * macros["WARPS"], 0, max(1, min(rows // (8 * macros["COLUMNS"]), MOST_SHARES))
    warps = macros["TILES"] * macros["PARTS"]
    return macros["TILES"], 32 * warps, warps * macros["COLUMNS"] * 512, 1


def _wide_kernel(macros: dict[str, int], wide: dict[str, int]) -> CudaKernel:
    return CudaKernel("mxfp4_wide.cu", "project_wide", wide | {name: macros[name] for name in ("PARTS", "GATED")})
