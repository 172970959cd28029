"""Tiny random DFlash drafts in every published shape, for the targets of `tiny.py`.

Contract: `tiny_draft` writes a complete draft checkpoint to `folder` and returns its config. The same arguments give
the same weights; they keep activations near 1 and are rounded to `dtype`. No two axes of a matrix are equal, so a wrong
transposition cannot pass. Names and shapes are spelt out here again, so that nothing of the loader takes part.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.checkpoint.draft_config import read_draft_config
from outrider.config import DraftConfig, ModelConfig
from tiny import HIDDEN, VOCAB

STYLES = ("z-lab", "z-lab-nested", "speculators")


class Sizes(NamedTuple):
    """What a draft must know of its target; the defaults are those of `tiny.py`."""

    hidden_size: int = HIDDEN
    vocab_size: int = VOCAB
    num_layers: int = 3


def tiny_draft(
    folder: Path,
    target: ModelConfig | Sizes | None = None,
    *,
    style: str = "z-lab",
    block: int = 4,
    layers: int = 2,
    taps: Sequence[int] | None = None,
    windows: Sequence[int | None] | None = None,
    causal: bool | None = None,
    bias: bool = False,
    mask: int | None = None,
    reduced_vocab: int | None = None,
    sample_from_anchor: bool = False,
    prefix: str = "",
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 160,
    dtype: str = "bfloat16",
    seed: int = 0,
    dflash: dict[str, Any] | None = None,
    **fields: Any,
) -> DraftConfig:
    """Write a draft for `target` (None: `Sizes()`).

    Args:
        style: `z-lab` (block size at the top), `z-lab-nested` (inside `dflash_config`) or `speculators`.
        block: rows of a block; layers: of the draft.
        taps: tapped layers of the target; None: the first, the middle and the last.
        windows: one a layer, None for full attention (None for all: full); all windows are of one size.
        causal: whether sliding layers are causal inside a block; None leaves the file's default (yes).
        mask: mask id; None: the last but one of the vocabulary.
        reduced_vocab: the draft's own vocabulary, a random choice of the target's, with an own head.
        prefix: put before the names of the body, such as `model.`.
        dflash: further fields of `dflash_config`; fields: of the config's layers (top level for z-lab).
    """
    target = target or Sizes()
    if taps is None:
        taps = sorted({0, target.num_layers // 2, target.num_layers - 1})
    windows = tuple(windows or (None,) * layers)
    sizes = {window for window in windows if window is not None}
    if len(windows) != layers or len(sizes) > 1:
        raise ValueError(f"windows {windows} do not give {layers} layers one size")
    body: dict[str, Any] = {
        "model_type": "qwen3",
        "attention_bias": bias,
        "attention_dropout": 0.0,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "max_position_embeddings": 4096,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": next(iter(sizes), None),
        "use_sliding_window": bool(sizes),
        "vocab_size": target.vocab_size,
    } | fields
    options = {"block_size": block, "mask_token_id": target.vocab_size - 2 if mask is None else mask}
    if sample_from_anchor:
        options["sample_from_anchor"] = True
    vocabulary = {} if reduced_vocab is None else {"draft_vocab_size": reduced_vocab}
    if style == "speculators":
        config = _speculators(body, options, taps, causal) | vocabulary
    else:
        config = _zlab(body, options, taps, causal, target.num_layers, style == "z-lab-nested", dflash) | vocabulary
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))
    shapes = dict(_shapes(target.hidden_size, len(taps), layers, heads, kv_heads, head_dim, intermediate, bias))
    random = torch.Generator().manual_seed(seed)
    tensors = {prefix + name: _draw(name, shape, random).to(getattr(torch, dtype)) for name, shape in shapes.items()}
    if reduced_vocab is not None:
        head = _draw("lm_head.weight", (reduced_vocab, target.hidden_size), random).to(getattr(torch, dtype))
        tensors |= {"lm_head.weight": head} | _maps(reduced_vocab, target.vocab_size, random)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return replace(read_draft_config(folder), target_layers=target.num_layers)


def _zlab(
    body: dict[str, Any],
    options: dict[str, int],
    taps: Sequence[int],
    causal: bool | None,
    target_layers: int,
    nested: bool,
    dflash: dict[str, Any] | None,
) -> dict[str, Any]:
    inner = {"target_layer_ids": list(taps)} | options
    top = {} if nested else {"block_size": inner.pop("block_size")}
    if causal is not None:
        inner["causal"] = causal
    return {
        **body,
        **top,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "num_target_layers": target_layers,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "dflash_config": inner | (dflash or {}),
    }


def _speculators(
    body: dict[str, Any], options: dict[str, int], taps: Sequence[int], causal: bool | None
) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "draft_vocab_size": body["vocab_size"],
        "max_anchors": 256,
        "sliding_window_non_causal": causal is False,
        "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy"},
        "speculators_model_type": "dflash",
        "speculators_version": "0.7.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": body,
        "transformers_version": "5.10.2",
        **options,
    }


def _shapes(
    hidden: int, taps: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = heads * head_dim, kv_heads * head_dim
    yield "fc.weight", (hidden, taps * hidden)
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    for layer in range(layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{attention}.{name}_proj.weight", (width, hidden)
            if bias:
                yield f"{attention}.{name}_proj.bias", (width,)
        yield f"{attention}.o_proj.weight", (hidden, queries)
        if bias:
            yield f"{attention}.o_proj.bias", (hidden,)
        yield f"{attention}.q_norm.weight", (head_dim,)
        yield f"{attention}.k_norm.weight", (head_dim,)
        yield f"layers.{layer}.input_layernorm.weight", (hidden,)
        yield f"layers.{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{mlp}.gate_proj.weight", (intermediate, hidden)
        yield f"{mlp}.up_proj.weight", (intermediate, hidden)
        yield f"{mlp}.down_proj.weight", (hidden, intermediate)


def _draw(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=random)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.2 * noise
    return noise * (0.4 if name == "lm_head.weight" else shape[1] ** -0.5)


def _maps(drafted: int, vocabulary: int, random: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randperm(vocabulary, generator=random)[:drafted].sort().values
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(drafted), "t2d": known}
