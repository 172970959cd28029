"""Configs of published models by name, for checkpoints and plans without a download.

Each is the published `config.json` less the fields that say nothing about the model (versions, caches, dropout).
"""

from pathlib import Path
from typing import Any

from outrider.checkpoint.draft_config import ARCHITECTURE, parse_draft_config
from outrider.checkpoint.hf_config import parse_config
from outrider.checkpoint.shards import read_json
from outrider.config import DraftConfig, ModelConfig
from outrider.errors import CheckpointError


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


_QWEN3_CODER_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_size": 2048,
    "intermediate_size": 5472,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": False,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}

PRESETS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss(layers=36, experts=128),
    "qwen3-coder-30b-a3b": _QWEN3_CODER_30B_A3B,
    "qwen3-coder-30b-a3b-mxfp4": _QWEN3_CODER_30B_A3B | {"quantization_config": {"quant_method": "mxfp4"}},
}


def _dflash(target: str, layers: int, block_size: int, mask: int, taps: list[int], inner: int) -> dict[str, Any]:
    own = PRESETS[target]
    same = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "vocab_size")
    kept = (*same, "max_position_embeddings", "rope_theta", "rope_scaling", "rms_norm_eps", "hidden_act")
    return {key: own[key] for key in kept} | {
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "intermediate_size": inner,
        "num_target_layers": own["num_hidden_layers"],
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
    }


DRAFT_PRESETS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": _dflash("gpt-oss-20b", 8, 8, 200000, [1, 6, 11, 16, 21], 7680),
    "gpt-oss-120b": _dflash("gpt-oss-120b", 8, 10, 200000, [1, 9, 17, 25, 33], 7680),
    "qwen3-coder-30b-a3b": _dflash("qwen3-coder-30b-a3b", 8, 16, 151669, [1, 12, 23, 34, 45], 6144),
}
DRAFT_PRESETS["qwen3-coder-30b-a3b-mxfp4"] = DRAFT_PRESETS["qwen3-coder-30b-a3b"]
"""Shapes of the published z-lab drafts, by their target's name."""


def load_draft_config(target: str) -> DraftConfig:
    """The config of the published draft of the preset `target`.

    Raises: CheckpointError if there is none.
    """
    if target not in DRAFT_PRESETS:
        raise CheckpointError(f"no draft of '{target}' is known; those of {', '.join(DRAFT_PRESETS)} are")
    return parse_draft_config(DRAFT_PRESETS[target], Path(target))


def raw_config(source: str | Path) -> tuple[dict[str, Any], Path]:
    """(JSON object, origin for errors) of a preset's name, a `config.json`, or a folder that holds one.

    Raises: CheckpointError if `source` is none of them.
    """
    if str(source) in PRESETS:
        return dict(PRESETS[str(source)]), Path(source)
    path = Path(source)
    if not path.exists():
        raise CheckpointError(f"'{source}' is neither {', '.join(PRESETS)}, a config.json, nor a folder that holds one")
    path = path / "config.json" if path.is_dir() else path
    return read_json(path), path


def load_config(source: str | Path) -> ModelConfig:
    """The checked config of what `raw_config` takes.

    Raises: CheckpointError if there is none, or a field is missing or asks for something unknown.
    """
    return parse_config(*raw_config(source))
