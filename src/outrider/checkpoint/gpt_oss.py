"""The gpt-oss family: config fields and the names and shapes of its tensors.

Experts are stored in one tensor per part and layer, experts first: either the published MXFP4 layout (blocks and
scales, [out, in]) or plain weights as transformers saves them ([in, out]). Gate and up rows are interleaved.
"""

from outrider.checkpoint.common import Shapes, skeleton_fields, skeleton_tensors
from outrider.checkpoint.fields import Fields
from outrider.config import ModelConfig
from outrider.core import ExpertKey, ExpertPart
from outrider.kernels.mxfp4 import BLOCK

_DEFAULT_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def parse(fields: Fields) -> ModelConfig:
    """Raises: CheckpointError naming a field that is missing or asks for something unknown."""
    skeleton = skeleton_fields(fields)
    theta, yarn = fields.rope(150000.0, _DEFAULT_YARN)
    return ModelConfig(
        **skeleton,
        family="gpt_oss",
        head_dim=fields.integer("head_dim", 64),
        expert_intermediate=skeleton["dense_intermediate"],
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope_theta=theta,
        yarn=yarn,
        max_positions=fields.integer("max_position_embeddings", 131072),
        windows=_windows(fields, skeleton["num_layers"]),
        is_moe=(True,) * skeleton["num_layers"],
        attention_bias=fields.flag("attention_bias", True),
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
    )


def dense_tensors(config: ModelConfig) -> Shapes:
    """Name -> shape of every tensor that is not an expert's."""
    shapes = skeleton_tensors(config)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.self_attn.sinks"] = (config.num_heads,)
        shapes[f"{prefix}.mlp.router.weight"] = (config.num_experts, config.hidden_size)
        shapes[f"{prefix}.mlp.router.bias"] = (config.num_experts,)
    return shapes


def expert_parts(config: ModelConfig, dtype: str) -> tuple[ExpertPart, ...]:
    """The stored tensors of one expert; `dtype` is that of its float parts."""
    hidden, inner = config.hidden_size, config.expert_intermediate
    if not config.mxfp4_experts:
        return (
            ExpertPart("gate_up_proj", dtype, (hidden, 2 * inner)),
            ExpertPart("gate_up_proj_bias", dtype, (2 * inner,)),
            ExpertPart("down_proj", dtype, (inner, hidden)),
            ExpertPart("down_proj_bias", dtype, (hidden,)),
        )
    return (
        ExpertPart("gate_up_proj_blocks", "uint8", (2 * inner, hidden // BLOCK, BLOCK // 2)),
        ExpertPart("gate_up_proj_scales", "uint8", (2 * inner, hidden // BLOCK)),
        ExpertPart("gate_up_proj_bias", dtype, (2 * inner,)),
        ExpertPart("down_proj_blocks", "uint8", (hidden, inner // BLOCK, BLOCK // 2)),
        ExpertPart("down_proj_scales", "uint8", (hidden, inner // BLOCK)),
        ExpertPart("down_proj_bias", dtype, (hidden,)),
    )


def expert_tensor(key: ExpertKey, part: str) -> tuple[str, int | None]:
    """(tensor name, index into its first axis) of one part of an expert."""
    return f"model.layers.{key.layer}.mlp.experts.{part}", key.expert


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.refuse("layer_types", f"it must list the attention of {layers} layers")
    if unknown := [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]:
        raise fields.refuse("layer_types", f"{unknown[0]!r} is not implemented")
    if "sliding_window" in fields.raw and fields.raw["sliding_window"] is None and "sliding_attention" in kinds:
        raise fields.refuse("sliding_window", "layers with sliding attention need one")
    window = fields.integer("sliding_window", 128)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
