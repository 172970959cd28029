"""`config.json` -> `ModelConfig`: every field that changes the arithmetic is read and checked, or refused by name."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from outrider.checkpoint import gpt_oss, qwen3_moe
from outrider.checkpoint.common import Shapes
from outrider.checkpoint.fields import Fields
from outrider.checkpoint.shards import read_json
from outrider.config import ModelConfig
from outrider.core import ExpertKey, ExpertPart
from outrider.errors import CheckpointError


class Family(Protocol):
    """What a family's module provides."""

    def parse(self, fields: Fields) -> ModelConfig:
        """The checked config."""

    def dense_tensors(self, config: ModelConfig) -> Shapes:
        """Name -> shape of every tensor that is not an expert's."""

    def expert_parts(self, config: ModelConfig, dtype: str) -> tuple[ExpertPart, ...]:
        """The stored tensors of one expert."""

    def expert_tensor(self, key: ExpertKey, part: str) -> tuple[str, int | None]:
        """(tensor name, index into its first axis or None) of one part of an expert."""


FAMILIES: dict[str, Family] = {"gpt_oss": gpt_oss, "qwen3_moe": qwen3_moe}


def read_config(source: Path) -> ModelConfig:
    """The model that `source`, a checkpoint folder or a `config.json`, describes.

    Of a folder's `generation_config.json`, further end-of-sequence ids are taken (a chat model often ends its turn
    with another one than its config names); its sampling defaults are not, since they are not the user's.

    Raises: CheckpointError naming the field that is missing, ill-typed or asks for something unknown.
    """
    path = source / "config.json" if source.is_dir() else source
    config = parse_config(read_json(path), path)
    extra = path.parent / "generation_config.json"
    if not extra.is_file():
        return config
    ids = Fields(read_json(extra), extra).eos()
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ids))))


def parse_config(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """The model that the JSON object `raw` describes; errors name `path` as its origin.

    Raises: CheckpointError naming the field that is missing, ill-typed or asks for something unknown.
    """
    fields = Fields(raw, path)
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise CheckpointError(
            f"{path}: model_type is {family!r}; Outrider serves {' and '.join(sorted(FAMILIES))} models"
        )
    config = FAMILIES[family].parse(fields)
    _check(config, path)
    return config


def _check(config: ModelConfig, path: Path) -> None:
    def refuse(problem: str) -> None:
        raise CheckpointError(f"{path}: {problem}")

    if config.num_heads % config.num_kv_heads:
        refuse(f"{config.num_heads} attention heads do not divide among {config.num_kv_heads} key/value heads")
    if config.head_dim % 2:
        refuse(f"head_dim is {config.head_dim}; rotary embedding needs an even one")
    if config.experts_per_token > config.num_experts:
        refuse(f"num_experts_per_tok is {config.experts_per_token}, more than the {config.num_experts} experts")
    if not config.moe_layers:
        refuse("no layer has experts; Outrider serves Mixture-of-Experts models")
    if config.mxfp4_experts and (config.hidden_size % 32 or config.expert_intermediate % 32):
        refuse("MXFP4 experts need hidden and intermediate sizes that are multiples of 32")
