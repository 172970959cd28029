"""What the families share: the decoder skeleton's config fields and tensors."""

from typing import Any

from outrider.checkpoint.fields import Fields
from outrider.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def skeleton_fields(fields: Fields) -> dict[str, Any]:
    """The arguments of `ModelConfig` that every family spells alike."""
    fields.only("hidden_act", "silu")
    fields.only("partial_rotary_factor", 1.0)
    experts = "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "num_layers": fields.integer("num_hidden_layers", maximum=1000),
        "num_heads": fields.integer("num_attention_heads"),
        "num_kv_heads": fields.integer("num_key_value_heads"),
        "num_experts": fields.integer(experts, maximum=4096),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "dense_intermediate": fields.integer("intermediate_size"),
        "dtype": fields.dtype(),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "mxfp4_experts": fields.mxfp4(),
        "eos_token_ids": fields.eos(),
    }


def skeleton_tensors(config: ModelConfig) -> Shapes:
    """Name -> shape of embedding, head, norms and attention projections."""
    hidden = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, out, inp in (
            ("q", queries, hidden),
            ("k", keys, hidden),
            ("v", keys, hidden),
            ("o", hidden, queries),
        ):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (out, inp)
            if config.attention_bias:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (out,)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return shapes
