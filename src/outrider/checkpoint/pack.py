"""Repack the experts of a checkpoint to MXFP4: `outrider pack`.

Contract: only expert matrices change. Everything else is copied bit for bit: other tensors, tokenizer, chat template,
generation config; of `config.json` only `quantization_config` is new. gpt-oss is written in its published layout
([E, in, out] becomes blocks [E, out, in/32, 16] and scales [E, out, in/32], gate and up rows interleaved as they
were), Qwen3-MoE as `..._proj.weight_blocks` and `..._proj.weight_scales`. Memory stays at about one shard.
"""

from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from outrider.checkpoint.checkpoint import Checkpoint, open_checkpoint
from outrider.checkpoint.inventory import dense_tensors, expert_tensors
from outrider.checkpoint.shards import INDEX, read_json
from outrider.checkpoint.writer import SHARD_NBYTES, CheckpointWriter, refuse_occupied
from outrider.config import format_bytes
from outrider.core import Progress, no_progress
from outrider.errors import CheckpointError
from outrider.kernels import mxfp4

_CHUNK = 2**15  # values encoded at a time: the scratch stays in cache
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@dataclass(frozen=True)
class PackedTensor:
    """What packing did to one stored tensor.

    relative_error is the Frobenius norm of the difference over that of the tensor (0 for a tensor of zeros);
    max_error is the largest absolute difference.
    """

    name: str
    nbytes_before: int
    nbytes_after: int
    relative_error: float
    max_error: float


@dataclass(frozen=True)
class PackReport:
    """What `pack` did: errors with all packed tensors taken as one; bytes of tensors, without file headers."""

    source: Path
    out: Path
    family: str
    experts: int
    nbytes_before: int
    nbytes_after: int
    expert_nbytes_before: int
    expert_nbytes_after: int
    relative_error: float
    max_error: float
    copied_files: tuple[str, ...]
    tensors: tuple[PackedTensor, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"source": str(self.source), "out": str(self.out)}


def pack(source: Path, out: Path, progress: Progress = no_progress, *, shard_nbytes: int = SHARD_NBYTES) -> PackReport:
    """Write `source`, a checkpoint with plain experts, to the folder `out` with MXFP4 experts.

    Raises: CheckpointError if `source` is damaged, packed already, of sizes that are no multiples of 32 or holds values
        that are not finite, and if `out` cannot be written; nothing is left of `out` then.
    """
    refuse_occupied(out)
    checkpoint = open_checkpoint(source)
    _check_packable(checkpoint)
    before = {name: checkpoint.shards.tensor(name).nbytes for name in _in_order(checkpoint)}
    matrices = expert_tensors(checkpoint.config, (part for part in checkpoint.parts if len(part.shape) == 2))
    after = {name: n if name not in matrices else packed_nbytes(matrices[name].shape) for name, n in before.items()}
    files = other_files(source)
    tensors: list[PackedTensor] = []
    total = _Error()
    with CheckpointWriter(out, sum(after.values()), progress, "packing", shard_nbytes) as writer:
        quantized = {"quantization_config": {"quant_method": "mxfp4"}}
        writer.write_json("config.json", read_json(source / "config.json") | quantized)
        for path in files:
            writer.copy(path)
        for name in before:
            tensor = checkpoint.shards.tensor(name)
            if name not in matrices:
                writer.add(name, tensor)
                continue
            blocks, scales, error = _pack_tensor(checkpoint, name, tensor)
            writer.add(f"{name}_blocks", blocks)
            writer.add(f"{name}_scales", scales)
            tensors.append(PackedTensor(name, before[name], after[name], error.relative, error.largest))
            total.include(error)
    return PackReport(
        source=source,
        out=out,
        family=checkpoint.config.family,
        experts=len(checkpoint.config.moe_layers) * checkpoint.config.num_experts,
        nbytes_before=sum(before.values()),
        nbytes_after=sum(after.values()),
        expert_nbytes_before=sum(before[name] for name in matrices),
        expert_nbytes_after=sum(after[name] for name in matrices),
        relative_error=total.relative,
        max_error=total.largest,
        copied_files=tuple(path.name for path in files),
        tensors=tuple(tensors),
    )


def packed_nbytes(shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of `shape` as MXFP4: half a byte a value and one scale for 32 values."""
    values = torch.Size(shape).numel()
    return values // 2 + values // mxfp4.BLOCK


def other_files(folder: Path) -> list[Path]:
    """The files of a checkpoint folder that are neither weights, nor their index, nor the config; sorted."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.name not in ("config.json", INDEX) and not path.name.endswith(_OTHER_WEIGHTS)
    )


def render(report: PackReport) -> RenderableType:
    """The report for a terminal: bytes and error by kind of matrix, then the three worst tensors."""
    table = Table("experts", "tensors", "before", "after", "relative error", "max error", title="Packed to MXFP4")
    for column in table.columns[1:]:
        column.justify = "right"
    kinds: dict[str, list[PackedTensor]] = {}
    for tensor in report.tensors:
        kinds.setdefault(tensor.name.removesuffix(".weight").rsplit(".", 1)[-1], []).append(tensor)
    for kind, members in kinds.items():
        table.add_row(
            kind,
            str(len(members)),
            format_bytes(sum(t.nbytes_before for t in members)),
            format_bytes(sum(t.nbytes_after for t in members)),
            f"{max(t.relative_error for t in members):.2%} worst",
            f"{max(t.max_error for t in members):.3g}",
        )
    table.add_section()
    table.add_row(
        "all",
        str(len(report.tensors)),
        format_bytes(report.expert_nbytes_before),
        format_bytes(report.expert_nbytes_after),
        f"{report.relative_error:.2%}",
        f"{report.max_error:.3g}",
    )
    worst = sorted(report.tensors, key=lambda tensor: tensor.relative_error, reverse=True)[:3]
    lines = [f"  {tensor.name}: {tensor.relative_error:.2%}, at most {tensor.max_error:.3g}" for tensor in worst]
    sizes = f"{format_bytes(report.nbytes_before)} -> {format_bytes(report.nbytes_after)}"
    whole = f"Checkpoint: {sizes} in {escape(str(report.out))}"
    copied = f"Copied as they are: {escape(', '.join(report.copied_files)) or 'no other files'}"
    return Group(table, "Largest relative errors (Frobenius):", *lines, whole, copied)


@dataclass
class _Error:
    """Squared sums of differences and of values, and the largest absolute difference."""

    difference: float = 0.0
    values: float = 0.0
    largest: float = 0.0

    @property
    def relative(self) -> float:
        return sqrt(self.difference / self.values) if self.values else 0.0

    def include(self, other: "_Error") -> None:
        self.difference += other.difference
        self.values += other.values
        self.largest = max(self.largest, other.largest)


def _check_packable(checkpoint: Checkpoint) -> None:
    config, path = checkpoint.config, checkpoint.folder / "config.json"
    if config.mxfp4_experts:
        raise CheckpointError(f"the experts of {checkpoint.folder} are MXFP4 already; there is nothing to pack")
    for name, size in (("hidden size", config.hidden_size), ("experts' inner size", config.expert_intermediate)):
        if size % mxfp4.BLOCK:
            raise CheckpointError(f"{path}: the {name} is {size}; MXFP4 needs a multiple of {mxfp4.BLOCK}")


def _in_order(checkpoint: Checkpoint) -> list[str]:
    """All tensor names: dense ones, then experts layer by layer, then what a checkpoint may hold besides."""
    known = [*dense_tensors(checkpoint.config), *expert_tensors(checkpoint.config, checkpoint.parts)]
    return [*known, *sorted(checkpoint.shards.names.difference(known))]


def _pack_tensor(checkpoint: Checkpoint, name: str, tensor: Tensor) -> tuple[Tensor, Tensor, _Error]:
    """(blocks, scales, error) of a stored [out, in] or, all experts of a gpt-oss layer, [E, in, out]."""
    matrices = tensor.unsqueeze(0) if tensor.dim() == 2 else tensor.mT
    experts, out, inp = matrices.shape
    blocks = torch.empty(experts, out, inp // mxfp4.BLOCK, mxfp4.BLOCK // 2, dtype=torch.uint8)
    scales = torch.empty(experts, out, inp // mxfp4.BLOCK, dtype=torch.uint8)
    error = _Error()
    rows = max(1, _CHUNK // inp)
    for expert in range(experts):
        for row in range(0, out, rows):
            part = slice(row, row + rows)
            weight = matrices[expert, part].float().contiguous()
            try:
                blocks[expert, part], scales[expert, part] = mxfp4.pack(weight)
            except ValueError as damage:
                raise CheckpointError(
                    f"{checkpoint.shards.path(name)}: tensor '{name}' cannot be packed: {damage}"
                ) from damage
            difference = mxfp4.unpack(blocks[expert, part], scales[expert, part]) - weight
            largest = float(difference.abs().max())
            error.include(_Error(_square_sum(difference), _square_sum(weight), largest))
    if tensor.dim() == 2:
        return blocks[0], scales[0], error
    return blocks, scales, error


def _square_sum(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
