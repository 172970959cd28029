"""A trained drafter on disk, in the layout of the published z-lab drafts.

Contract: `write_draft` writes model.safetensors (bfloat16, names without a prefix) and config.json; what it wrote
passes `checkpoint.draft.open_draft` for the target.
"""

from pathlib import Path
from typing import Any

import torch

from outrider.checkpoint.draft_config import ARCHITECTURE
from outrider.config import DraftConfig, Yarn
from outrider.console import write_json
from outrider.train.draft_model import DraftModel
from outrider.train.export import save_tensors


def write_draft(model: DraftModel, folder: Path, positions: int) -> None:
    """Round `model` to bfloat16 and write it; `positions` is how long its target's context may be."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in model.state_dict().items()}
    save_tensors(stored, folder)
    write_json(folder / "config.json", published_config(model.config, positions))


def published_config(config: DraftConfig, positions: int) -> dict[str, Any]:
    """config.json as the z-lab drafts have it, all layers full, without the code that they name in `auto_map`."""
    return {
        "architectures": [ARCHITECTURE],
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.tap_layers)},
        "dtype": config.dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": positions,
        "max_window_layers": config.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None if config.yarn is None else _scaling(config.yarn),
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def _scaling(yarn: Yarn) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    }
    return scaling if yarn.attention_factor is None else scaling | {"attention_factor": yarn.attention_factor}
