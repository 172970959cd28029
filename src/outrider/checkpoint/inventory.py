"""What a checkpoint of a given config holds, from the config alone: names, shapes, dtypes, bytes.

The names are those of the family's published layout, which `open_checkpoint` checks and the writers follow.
"""

from collections.abc import Iterable
from math import prod
from typing import Literal, NamedTuple

from outrider.checkpoint.hf_config import FAMILIES
from outrider.config import ModelConfig
from outrider.core import ExpertKey, ExpertPart

Group = Literal["embedding", "head", "attention", "router", "norms", "dense MLP"]
GROUPS: tuple[Group, ...] = ("embedding", "head", "attention", "router", "norms", "dense MLP")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
"""Bytes of one element by dtype name, for the dtypes that a checkpoint may use."""


class Stored(NamedTuple):
    """A tensor as it is stored."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


def dense_tensors(config: ModelConfig, dtype: str | None = None) -> dict[str, Stored]:
    """Every tensor that is not an expert's, in `dtype` (None: the config's)."""
    shapes = FAMILIES[config.family].dense_tensors(config)
    return {name: Stored(dtype or config.dtype, shape) for name, shape in shapes.items()}


def expert_parts(config: ModelConfig) -> tuple[ExpertPart, ...]:
    """The parts of one expert, float ones in the config's dtype."""
    return FAMILIES[config.family].expert_parts(config, config.dtype)


def expert_tensors(config: ModelConfig, parts: Iterable[ExpertPart]) -> dict[str, Stored]:
    """Every stored tensor that holds experts, layer by layer."""
    family = FAMILIES[config.family]
    stored = {}
    parts = tuple(parts)
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            for part in parts:
                name, index = family.expert_tensor(ExpertKey(layer, expert), part.name)
                shape = part.shape if index is None else (config.num_experts, *part.shape)
                stored[name] = Stored(part.dtype, shape)
    return stored


def expert_nbytes(parts: Iterable[ExpertPart]) -> int:
    """Bytes of one expert as it is stored, without padding."""
    return sum(Stored(part.dtype, part.shape).nbytes for part in parts)


def group_of(name: str) -> Group:
    """The group that the dense tensor `name` is counted in."""
    if name.startswith("model.embed_tokens."):
        return "embedding"
    if name.startswith("lm_head."):
        return "head"
    if "norm" in name.rsplit(".", 2)[-2]:
        return "norms"
    if ".self_attn." in name:
        return "attention"
    if ".mlp.router." in name or ".mlp.gate." in name:
        return "router"
    return "dense MLP"


def group_nbytes(tensors: dict[str, Stored]) -> dict[Group, int]:
    """Bytes of dense `tensors` by group; a group without tensors is 0."""
    nbytes: dict[Group, int] = dict.fromkeys(GROUPS, 0)
    for name, stored in tensors.items():
        nbytes[group_of(name)] += stored.nbytes
    return nbytes
