"""The trained target on disk: the published gpt-oss layout with MXFP4 experts, and back.

Contract: `write_target` packs the experts, rounds everything else to bfloat16 and writes model.safetensors,
config.json and generation_config.json; `read_target` gives a module whose float32 weights are the stored values.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from outrider.errors import ConfigError
from outrider.kernels.mxfp4 import pack, unpack
from outrider.train.target_model import LIMIT, TargetConfig, TargetModel
from outrider.train.tokenizer import load_tokenizer

_PACKED = ("gate_up_proj", "down_proj")


def write_target(model: TargetModel, folder: Path, end_of_text: int, stops: list[int]) -> None:
    """Write weights and configs; `end_of_text` begins and ends documents, `stops` end a generation."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(published_tensors(model), folder)
    _write_json(folder / "config.json", published_config(model.config, end_of_text))
    generation = {"bos_token_id": end_of_text, "eos_token_id": stops, "pad_token_id": end_of_text}
    _write_json(folder / "generation_config.json", generation)


def save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Replace model.safetensors in one step. Raises: ConfigError if it cannot be written."""
    temporary = folder / "model.safetensors.part"
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)  # the writer's own default keeps others out
        temporary.replace(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{folder / 'model.safetensors'} cannot be written ({error})") from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def published_tensors(model: TargetModel) -> dict[str, Tensor]:
    """Names, shapes and dtypes of the published checkpoints; the tied head is not stored."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        value = parameter.detach().float().cpu()
        if name.endswith(_PACKED):
            blocks, scales = pack(value)
            tensors[f"model.{name}_blocks"] = blocks.contiguous()
            tensors[f"model.{name}_scales"] = scales.contiguous()
        else:
            tensors[f"model.{name}"] = value.to(torch.bfloat16).contiguous()
    return tensors


def read_target(folder: Path) -> TargetModel:
    """The exported target in float32, on the CPU."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = TargetModel(
        TargetConfig(
            vocab=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            experts=raw["num_local_experts"],
            top_k=raw["num_experts_per_tok"],
            intermediate=raw["intermediate_size"],
            window=raw["sliding_window"],
            context=raw["max_position_embeddings"],
            rope_theta=raw["rope_parameters"]["rope_theta"],
            eps=raw["rms_norm_eps"],
        )
    )
    stored = load_file(folder / "model.safetensors")
    state = {}
    for name in model.state_dict():
        if name.endswith(_PACKED):
            state[name] = unpack(stored[f"model.{name}_blocks"], stored[f"model.{name}_scales"])
        else:
            state[name] = stored[f"model.{name}"].float()
    model.load_state_dict(state)
    return model


def start_from(model: TargetModel, folder: Path, tokenizer: Tokenizer) -> None:
    """Load the exported weights of `folder`; embeddings follow the tokens' spelling into `tokenizer`'s ids.

    A token that the old vocabulary lacks begins as the mean of its pieces there.
    """
    state = read_target(folder).state_dict()
    old = load_tokenizer(folder)
    table = state["embed_tokens.weight"]
    rows = torch.empty_like(table)
    for token, index in tokenizer.get_vocab().items():
        known = old.token_to_id(token)
        pieces = [known] if known is not None else [piece.id for piece in old.model.tokenize(token)]
        rows[index] = table[pieces].mean(0)
    state["embed_tokens.weight"] = rows
    model.load_state_dict(state)


def published_config(config: TargetConfig, end_of_text: int) -> dict[str, Any]:
    """config.json as the published gpt-oss checkpoints have it, with plain RoPE."""
    kinds = ["sliding_attention" if config.is_sliding(i) else "full_attention" for i in range(config.layers)]
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "dtype": "bfloat16",
        "eos_token_id": end_of_text,
        "experts_per_token": config.top_k,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initial_context_length": config.context,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate,
        "layer_types": kinds,
        "max_position_embeddings": config.context,
        "model_type": "gpt_oss",
        "num_attention_heads": config.heads,
        "num_experts_per_tok": config.top_k,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "num_local_experts": config.experts,
        "output_router_logits": False,
        "pad_token_id": end_of_text,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": config.eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "router_aux_loss_coef": 0.0,
        "sliding_window": config.window,
        "swiglu_limit": LIMIT,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": config.vocab,
    }
