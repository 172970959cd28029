"""The Qwen3-MoE family: config fields and the names and shapes of its tensors.

Every expert has three matrices of its own, [out, in]. `outrider pack` writes them as MXFP4 beside the same names, with
`_blocks` and `_scales` appended (there is no published layout of packed Qwen3 experts to follow).
"""

from outrider.checkpoint.common import Shapes, skeleton_fields, skeleton_tensors
from outrider.checkpoint.fields import Fields
from outrider.config import ModelConfig
from outrider.core import ExpertKey, ExpertPart
from outrider.kernels.mxfp4 import BLOCK


def parse(fields: Fields) -> ModelConfig:
    """Raises: CheckpointError naming a field that is missing or asks for something unknown."""
    skeleton = skeleton_fields(fields)
    layers = skeleton["num_layers"]
    theta, yarn = fields.rope(10000.0)
    windowed = fields.flag("use_sliding_window", False) and fields.raw.get("sliding_window", 4096) is not None
    window = fields.integer("sliding_window", 4096) if windowed else None
    return ModelConfig(
        **skeleton,
        family="qwen3_moe",
        head_dim=fields.integer("head_dim", skeleton["hidden_size"] // skeleton["num_heads"]),
        expert_intermediate=fields.integer("moe_intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        yarn=yarn,
        max_positions=fields.integer("max_position_embeddings"),
        windows=(window,) * layers,
        is_moe=_moe_layers(fields, layers),
        attention_bias=fields.flag("attention_bias", False),
        normalize_top_k=fields.flag("norm_topk_prob", False),
    )


def dense_tensors(config: ModelConfig) -> Shapes:
    """Name -> shape of every tensor that is not an expert's."""
    hidden, inner = config.hidden_size, config.dense_intermediate
    shapes = skeleton_tensors(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        if config.is_moe[layer]:
            shapes[f"{prefix}.mlp.gate.weight"] = (config.num_experts, hidden)
        else:
            shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def expert_parts(config: ModelConfig, dtype: str) -> tuple[ExpertPart, ...]:
    """The stored tensors of one expert; `dtype` is that of its float parts."""
    hidden, inner = config.hidden_size, config.expert_intermediate
    matrices = (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner))
    if not config.mxfp4_experts:
        return tuple(ExpertPart(f"{name}.weight", dtype, (out, inp)) for name, out, inp in matrices)
    return tuple(
        part
        for name, out, inp in matrices
        for part in (
            ExpertPart(f"{name}.weight_blocks", "uint8", (out, inp // BLOCK, BLOCK // 2)),
            ExpertPart(f"{name}.weight_scales", "uint8", (out, inp // BLOCK)),
        )
    )


def expert_tensor(key: ExpertKey, part: str) -> tuple[str, int | None]:
    """(tensor name, None: the tensor is this expert's alone) of one part of an expert."""
    return f"model.layers.{key.layer}.mlp.experts.{key.expert}.{part}", None


def _moe_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) and 0 <= layer < layers for layer in dense):
        raise fields.refuse("mlp_only_layers", f"it must list layers from 0 to {layers - 1}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
