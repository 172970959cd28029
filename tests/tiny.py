"""Tiny random checkpoints of both families, as transformers saves them, with the model that they must equal.

Contract: each function writes a complete checkpoint (no tokenizer) to `folder` and returns transformers' model of it
in float32 eval mode, whose weights equal the stored ones exactly (rounded to `dtype`; MXFP4 experts decoded by
transformers' own `convert_moe_packed_tensors`, so nothing of Outrider takes part). The same arguments give the same
weights. They are drawn wide enough that routing varies from token to token and the greedy choice is well separated.
Sizes are chosen so that no two axes of a matrix are equal: a wrong transposition cannot pass.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Mxfp4Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging

VOCAB = 256
HIDDEN = 64
EXPERT_INTERMEDIATE = 96
DENSE_INTERMEDIATE = 160
EXPERTS = 8
TOP_K = 2
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_SHARD = "100KB"


def tiny_gpt_oss(
    folder: Path,
    *,
    mxfp4: bool,
    sliding_window: int = 8,
    layers: int = 3,
    dtype: str = "bfloat16",
    sharded: bool = False,
    tied: bool = False,
    experts: int = EXPERTS,
    top_k: int = TOP_K,
    seed: int = 0,
    **fields: Any,
) -> GptOssForCausalLM:
    """A gpt-oss model: windows alternate (sliding first), sinks, attention biases, YaRN; `fields` go to the config."""
    config = GptOssConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": EXPERT_INTERMEDIATE,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_local_experts": experts,
            "num_experts_per_tok": top_k,
            "sliding_window": sliding_window,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 4096,
            "eos_token_id": VOCAB - 1,
        }
        | fields
    )
    model = _spread(GptOssForCausalLM(config), dtype, seed)
    if not mxfp4:
        _save(model, folder, sharded)
        return model.float().eval()
    packed = _draw_packed(model, seed)
    _save(model, folder, sharded, packed)
    model = model.float().eval()
    for prefix in sorted({name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")}):
        weight = convert_moe_packed_tensors(packed[f"{prefix}_blocks"], packed[f"{prefix}_scales"], dtype=torch.float32)
        model.get_parameter(prefix).data.copy_(weight)
    return model


def tiny_qwen3_moe(
    folder: Path,
    *,
    layers: int = 3,
    dtype: str = "bfloat16",
    decoder_sparse_step: int = 1,
    mlp_only_layers: tuple[int, ...] = (),
    norm_topk_prob: bool = True,
    sliding_window: int | None = None,
    sharded: bool = False,
    tied: bool = False,
    experts: int = EXPERTS,
    top_k: int = TOP_K,
    seed: int = 0,
    **fields: Any,
) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE model with q/k norms; `fields` go to the config."""
    config = Qwen3MoeConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": DENSE_INTERMEDIATE,
            "moe_intermediate_size": EXPERT_INTERMEDIATE,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "decoder_sparse_step": decoder_sparse_step,
            "mlp_only_layers": list(mlp_only_layers),
            "norm_topk_prob": norm_topk_prob,
            "use_sliding_window": sliding_window is not None,
            "sliding_window": sliding_window,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 4096,
            "eos_token_id": VOCAB - 1,
        }
        | fields
    )
    model = _spread(Qwen3MoeForCausalLM(config), dtype, seed)
    _save(model, folder, sharded)
    return model.float().eval()


def load_with_transformers(folder: Path) -> Any:
    """What transformers makes of the checkpoint in `folder`, float32, eval mode; MXFP4 experts are decoded."""
    packed = "quantization_config" in json.loads((folder / "config.json").read_text())
    config = {"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}
    with _quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **config).eval()


def prompt(length: int = 24, seed: int = 0) -> Tensor:
    """Random token ids, int64 [1, length], without the end-of-sequence id."""
    return torch.randint(0, VOCAB - 1, (1, length), generator=torch.Generator().manual_seed(seed))


def edit_config(folder: Path, drop: tuple[str, ...] = (), **fields: Any) -> None:
    """Set `fields` of the checkpoint's config.json and remove those named in `drop`."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in drop}))


@torch.no_grad()
def _spread(model: Any, dtype: str, seed: int) -> Any:
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.1 * noise)
        elif name.endswith(("embed_tokens.weight", "sinks")):
            parameter.copy_(noise)
        elif name.endswith(("router.weight", "gate.weight", "lm_head.weight")):
            parameter.copy_(0.4 * noise)
        else:
            parameter.copy_(0.2 * noise)
        parameter.data = parameter.data.to(getattr(torch, dtype))  # model.to() would round the rotary buffers too
    return model


def _draw_packed(model: Any, seed: int) -> dict[str, Tensor]:
    """Random blocks uint8 [E, out, in/32, 16] and scales uint8 [E, out, in/32] for every expert matrix."""
    random = torch.Generator().manual_seed(seed + 1)
    packed = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inp, out = parameter.shape
            shape = (experts, out, inp // 32)
            packed[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
            # codes have a root mean square of 2.9: scales 2^-5 .. 2^-3 give 0.09 .. 0.36
            packed[f"{name}_scales"] = torch.randint(122, 125, shape, generator=random, dtype=torch.uint8)
    return packed


def _save(model: Any, folder: Path, sharded: bool, packed: dict[str, Tensor] | None = None) -> None:
    """`save_pretrained`; with `packed`, the matrices that it replaces are left out and the config says MXFP4."""
    if packed is None:
        with _quiet():
            model.save_pretrained(folder, max_shard_size=_SHARD if sharded else "5GB")
        return
    model.config.save_pretrained(folder)
    replaced = {name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")}
    if model.config.tie_word_embeddings:
        replaced.add("lm_head.weight")
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name not in replaced} | packed
    _write(tensors, folder, sharded)
    edit_config(folder, quantization_config=_MXFP4)


def _write(tensors: dict[str, Tensor], folder: Path, sharded: bool) -> None:
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    files = {}
    for part in range(3):
        file = f"model-{part + 1:05d}-of-00003.safetensors"
        mine = names[part::3]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(mine, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@contextmanager
def _quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


MAKERS = {
    "gpt_oss-mxfp4": lambda folder: tiny_gpt_oss(folder, mxfp4=True),
    "gpt_oss-bf16-tied-sharded": lambda folder: tiny_gpt_oss(folder, mxfp4=False, tied=True, sharded=True),
    "qwen3_moe": lambda folder: tiny_qwen3_moe(folder, norm_topk_prob=True),
    "qwen3_moe-dense-layers-f32": lambda folder: tiny_qwen3_moe(
        folder, dtype="float32", decoder_sparse_step=2, norm_topk_prob=False
    ),
    "qwen3_moe-window": lambda folder: tiny_qwen3_moe(
        folder, mlp_only_layers=[0], use_sliding_window=True, sliding_window=8
    ),
}
"""What the engine is compared on: folder -> transformers' model."""
