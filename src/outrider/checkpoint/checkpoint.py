"""One checked checkpoint: config, dense tensors by name, expert parts by key."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import Tensor

from outrider.checkpoint.hf_config import FAMILIES, read_config
from outrider.checkpoint.inventory import expert_tensors
from outrider.checkpoint.shards import Shards
from outrider.config import ModelConfig
from outrider.core import ExpertKey, ExpertPart
from outrider.errors import CheckpointError

_FLOATS = {"float32", "bfloat16", "float16"}
_HARMLESS = (".rotary_emb.inv_freq",)  # recomputed by everyone, still saved by old exporters


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every tensor has the expected name, shape and dtype."""

    folder: Path
    config: ModelConfig
    shards: Shards
    parts: tuple[ExpertPart, ...]

    def dense(self, name: str) -> Tensor:
        """Tensor `name`, a view of the mapped file in its stored dtype."""
        return self.shards.tensor(name)

    def dense_elements(self) -> int:
        """Elements of all tensors that are not an expert's."""
        return sum(prod(shape) for shape in FAMILIES[self.config.family].dense_tensors(self.config).values())

    def expert_part(self, key: ExpertKey, part: str) -> Tensor:
        """One part of one expert, a view of the mapped file in its stored dtype."""
        name, index = FAMILIES[self.config.family].expert_tensor(key, part)
        tensor = self.shards.tensor(name)
        return tensor if index is None else tensor[index]

    def expert_keys(self) -> Iterator[ExpertKey]:
        """All experts, layer by layer."""
        for layer in self.config.moe_layers:
            for expert in range(self.config.num_experts):
                yield ExpertKey(layer, expert)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open and check the checkpoint in `folder`; no weight is read yet.

    Raises: CheckpointError naming the file, field or tensor that is missing, unexpected, misshapen or of a wrong dtype.
    """
    config = read_config(folder)
    shards = Shards(folder)
    family = FAMILIES[config.family]
    expected = {name: (shape, _FLOATS) for name, shape in family.dense_tensors(config).items()}
    parts = family.expert_parts(config, _expert_dtype(config, shards))
    for name, stored in expert_tensors(config, parts).items():
        expected[name] = (stored.shape, {stored.dtype})
    _check(shards, expected, config)
    return Checkpoint(folder, config, shards, parts)


def _expert_dtype(config: ModelConfig, shards: Shards) -> str:
    """Dtype of the experts' float parts: that of the first one that exists, else the config's."""
    family = FAMILIES[config.family]
    for part in family.expert_parts(config, config.dtype):
        name, _ = family.expert_tensor(ExpertKey(config.moe_layers[0], 0), part.name)
        if part.dtype != "uint8" and name in shards.names and shards.dtype(name) in _FLOATS:
            return shards.dtype(name)
    return config.dtype


def _check(shards: Shards, expected: dict[str, tuple[tuple[int, ...], set[str]]], config: ModelConfig) -> None:
    for name, (shape, dtypes) in expected.items():
        if name not in shards.names:
            raise CheckpointError(
                f"{shards.folder} lacks tensor {name!r}, which its config.json ({config.num_layers} layers, "
                f"{config.num_experts} experts{', MXFP4' if config.mxfp4_experts else ''}) calls for"
            )
        where = f"{shards.path(name)}: tensor {name!r}"
        if shards.shape(name) != shape:
            raise CheckpointError(f"{where} has shape {list(shards.shape(name))}, config.json calls for {list(shape)}")
        if shards.dtype(name) not in dtypes:
            wanted = " or ".join(sorted(dtypes))
            raise CheckpointError(f"{where} is {shards.dtype(name)}, it must be {wanted}")
    tied_head = {"lm_head.weight"} if config.tie_embeddings else set()
    for name in sorted(shards.names - expected.keys() - tied_head):
        if not name.endswith(_HARMLESS):
            raise CheckpointError(
                f"{shards.path(name)}: tensor {name!r} is not part of a {config.family} model with "
                f"{config.num_layers} layers and {config.num_experts} experts"
            )
