"""A draft's `config.json` -> `DraftConfig`, in the z-lab shapes and in the `speculators` shape.

Contract: a field that changes what a draft computes is read and checked, or refused by name; none is skipped silently.
So every key of the file must be on a list here: implemented, accepted with its neutral value only, or bookkeeping that
no forward pass reads. Null counts as absent everywhere. The architecture is known by name and the checkpoint's own
code (`auto_map`) is never looked at; `model_type` is bookkeeping, since every DFlash draft has Qwen3's layers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.checkpoint.fields import Fields
from outrider.checkpoint.shards import read_json
from outrider.config import DraftConfig, Yarn
from outrider.errors import CheckpointError

ARCHITECTURE = "DFlashDraftModel"

_BOOKKEEPING = {
    *("_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout"),
    *("auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "max_window_layers", "model_type"),
    *("pad_token_id", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache"),
}
"""What transformers writes and a draft's forward pass does not read. `tie_word_embeddings` is the target's: a draft has
no embedding. `max_window_layers` only tells transformers which `layer_types` to make up."""

_NEUTRAL: dict[str, Any] = {
    "add_swa_attention_sink_bias": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1,
    "fc_layernorm": False,
    "final_logit_softcapping": None,
    "hidden_act": "silu",
    "input_embedding_scale": 1,
    "is_neox_style": True,
    "logit_scale": 1,
    "mlp_bias": False,
    "output_multiplier": 1,
    "partial_rotary_factor": 1,
    "pretraining_tp": 1,
    "projector_type": "dflash",
    "quantization_config": None,
    "query_zero_predicts_next": False,
    "shift_label": False,
    "use_aux_hidden_state": True,
}
"""Accepted anywhere, with this value only."""

_LAYERS = {
    *("attention_bias", "head_dim", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters"),
    *("rope_scaling", "rope_theta", "sliding_window", "use_sliding_window", "vocab_size"),
}
_EITHER = {"block_size", "mask_token_id", "sample_from_anchor", "target_layer_ids"}
_ZLAB = (
    _LAYERS | _EITHER | {"dflash_config", "draft_vocab_size", "is_causal", "num_target_layers", "target_hidden_size"}
)
_ZLAB_NESTED = _EITHER | {"causal", "mask_token", "swa_window_size", "use_swa"}

_SPECULATORS = {
    *("aux_hidden_state_layer_ids", "block_size", "draft_vocab_size", "mask_token_id", "sample_from_anchor"),
    *("sliding_window_non_causal", "speculators_model_type", "target_hidden_size", "transformer_layer_config"),
}
_SPECULATORS_BOOKKEEPING = {
    *("has_no_defaults_at_init", "max_anchors", "speculators_config", "speculators_version"),
    # how it was trained, or the width of a head that `projector_type: dflash` does not have
    *("auf", "emb_dim", "gru_hidden_dim", "lambda_base_decay_ratio", "lambda_base_start", "pure_draft_prefix_len"),
}
_ROPE = {
    *("attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"),
    *("original_max_position_embeddings", "rope_theta", "rope_type", "truncate", "type"),
}
_KINDS = ("sliding_attention", "full_attention")


def read_draft_config(folder: Path) -> DraftConfig:
    """The drafter that `folder`, a checkpoint folder or a `config.json`, describes.

    `target_layers` is 0 if the file does not say how many layers the target has; a speculators file never does.

    Raises: CheckpointError naming the field that is missing, ill-typed, contradictory or asks for something unknown.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    return parse_draft_config(read_json(path), path)


def parse_draft_config(raw: Mapping[str, Any], path: Path) -> DraftConfig:
    """As `read_draft_config`, of a JSON object; `path` is its origin for errors."""
    fields = Fields(dict(raw), path)
    if fields.raw.get("speculators_model_type") is not None:
        return _speculators(fields)
    architectures = fields.raw.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise fields.refuse("architectures", f"this is no DFlash draft (those are {ARCHITECTURE!r}), name one instead")
    return _zlab(fields)


def is_draft(raw: Mapping[str, Any]) -> bool:
    """Whether the `config.json` object `raw` is meant to describe a draft of any kind, not a model to serve."""
    architectures = raw.get("architectures")
    named = isinstance(architectures, list) and ARCHITECTURE in architectures
    return named or "dflash_config" in raw or "speculators_model_type" in raw


def _zlab(top: Fields) -> DraftConfig:
    nested = _inner(top, "dflash_config", required=False)
    _only_known(top, _ZLAB | _BOOKKEEPING)
    _only_known(nested, _ZLAB_NESTED)
    target_layers = 0
    if top.raw.get("num_target_layers") is not None:
        target_layers = top.integer("num_target_layers", maximum=1000)
    layers = top.integer("num_hidden_layers", maximum=1000)
    taps_in = _either("target_layer_ids", nested, top)
    if taps_in.raw.get("target_layer_ids") is not None:
        taps = _taps(taps_in, "target_layer_ids", lowest=0)
    else:
        taps = _default_taps(top, target_layers, layers)
    windows, forced = _windows(top, nested, layers)
    causal = _causal(top, nested, windows, forced)
    options = {name: _either(name, nested, top) for name in ("block_size", "mask_token_id", "sample_from_anchor")}
    return _draft(top, top, options, windows, causal, tap_layers=taps, target_layers=target_layers)


def _speculators(top: Fields) -> DraftConfig:
    if top.raw["speculators_model_type"] != "dflash":
        raise top.refuse("speculators_model_type", "only 'dflash' is implemented")
    inner = _inner(top, "transformer_layer_config", required=True)
    _only_known(top, _SPECULATORS | _SPECULATORS_BOOKKEEPING | _BOOKKEEPING)
    _only_known(inner, _LAYERS | _BOOKKEEPING)
    layers = inner.integer("num_hidden_layers", maximum=1000)
    # They count hidden states, of which the first is the embedding's output: entry i is what layer i - 1 put out.
    taps = tuple(entry - 1 for entry in _taps(top, "aux_hidden_state_layer_ids", lowest=1))
    windows, _ = _windows(inner, Fields({}, top.path), layers)
    both_ways = top.flag("sliding_window_non_causal", False)
    causal = tuple(window is not None and not both_ways for window in windows)
    options = dict.fromkeys(("block_size", "mask_token_id", "sample_from_anchor"), top)
    return _draft(top, inner, options, windows, causal, tap_layers=taps, target_layers=0)


def _draft(
    top: Fields,
    layers: Fields,
    options: Mapping[str, Fields],
    windows: tuple[int | None, ...],
    causal: tuple[bool, ...],
    **rest: Any,
) -> DraftConfig:
    """What both formats spell alike; `options` says where the fields that may be in two places are."""
    hidden, heads = layers.integer("hidden_size"), layers.integer("num_attention_heads")
    vocabulary = layers.integer("vocab_size")
    from_anchor = options["sample_from_anchor"].flag("sample_from_anchor", False)
    theta, yarn = _rope(layers)
    config = DraftConfig(
        **rest,
        block_size=options["block_size"].integer("block_size", minimum=1 if from_anchor else 2, maximum=1024),
        mask_token_id=options["mask_token_id"].integer("mask_token_id", minimum=0),
        vocab_size=vocabulary,
        draft_vocab_size=top.integer("draft_vocab_size", vocabulary),
        hidden_size=hidden,
        num_layers=len(windows),
        num_heads=heads,
        num_kv_heads=layers.integer("num_key_value_heads"),
        head_dim=layers.integer("head_dim", hidden // heads),
        intermediate=layers.integer("intermediate_size"),
        rms_norm_eps=layers.number("rms_norm_eps"),
        rope_theta=theta,
        dtype=top.dtype(),
        windows=windows,
        causal=causal,
        attention_bias=layers.flag("attention_bias", False),
        sample_from_anchor=from_anchor,
        yarn=yarn,
    )
    if config.num_heads % config.num_kv_heads:
        raise layers.refuse("num_key_value_heads", f"{config.num_heads} attention heads do not divide among them")
    if config.head_dim % 2:
        raise CheckpointError(f"{layers.path}: head_dim is {config.head_dim}; rotary embedding needs an even one")
    if config.draft_vocab_size > vocabulary:
        raise top.refuse("draft_vocab_size", f"the whole vocabulary has {vocabulary} tokens")
    if top.raw.get("target_hidden_size") not in (None, hidden):
        raise top.refuse("target_hidden_size", f"it must be hidden_size, {hidden}, since the embedding is shared")
    return config


def _windows(layers: Fields, options: Fields, count: int) -> tuple[tuple[int | None, ...], bool]:
    """(each layer's window or None, whether `use_swa` alone asks for them) of `count` layers."""
    use_swa = _optional_flag(options, "use_swa")
    use_sliding = _optional_flag(layers, "use_sliding_window")
    kinds = layers.raw.get("layer_types")
    if kinds is None:
        if use_sliding and not use_swa:
            raise layers.refuse("use_sliding_window", "layer_types must say which layers slide")
        kinds = ["full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        raise layers.refuse("layer_types", f"it must list the attention of {count} layers")
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise layers.refuse("layer_types", f"{unknown[0]!r} is not implemented")
    forced = use_swa is True and "sliding_attention" not in kinds
    if forced:  # exported so by NVIDIA Model Optimizer and read so by vLLM: every layer slides
        kinds = ["sliding_attention"] * count
    if "sliding_attention" not in kinds:
        return (None,) * count, False
    if use_swa is False:
        raise options.refuse("use_swa", "layer_types has sliding layers, so one of them is wrong")
    if use_sliding is False and not forced:
        raise layers.refuse("use_sliding_window", "layer_types has sliding layers, so one of them is wrong")
    window = _window(layers, options)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds), forced


def _window(layers: Fields, options: Fields) -> int:
    sizes = {
        name: place.integer(name)
        for name, place in (("swa_window_size", options), ("sliding_window", layers))
        if place.raw.get(name) is not None
    }
    if not sizes:
        raise layers.refuse("sliding_window", "layers with sliding attention need one")
    if len(set(sizes.values())) > 1:
        raise options.refuse("swa_window_size", f"sliding_window is {sizes['sliding_window']}, so one is wrong")
    return next(iter(sizes.values()))


def _causal(top: Fields, nested: Fields, windows: tuple[int | None, ...], forced: bool) -> tuple[bool, ...]:
    """Top-level `is_causal`, else `dflash_config.causal`, else sliding layers only."""
    place, name = (top, "is_causal") if top.raw.get("is_causal") is not None else (nested, "causal")
    value = _optional_flag(place, name)
    if value is None and forced:
        # Readers disagree on the default (vLLM: both ways), and a wrong one only shows as poor acceptance.
        raise nested.refuse("use_swa", "dflash_config.causal must then say whether a block row sees later ones")
    if value and None in windows:
        raise place.refuse(name, "causal blocks are implemented for sliding layers only, and layer_types has full ones")
    return tuple(window is not None and value is not False for window in windows)


def _rope(layers: Fields) -> tuple[float, Yarn | None]:
    """As `Fields.rope`, but nothing is assumed or skipped: a wrong angle only shows as poor acceptance."""
    result = layers.rope(1.0)  # the default is never returned: without a theta the file is refused below
    theta = layers.raw.get("rope_theta")
    shapes = [layers.raw[name] for name in ("rope_parameters", "rope_scaling") if layers.raw.get(name)]
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        raise layers.refuse("rope_scaling", "rope_parameters says otherwise, so one of them is wrong")
    if shapes:
        name = "rope_parameters" if layers.raw.get("rope_parameters") else "rope_scaling"
        inner = Fields(shapes[0], Path(f"{layers.path}: {name}"))
        _only_known(inner, _ROPE)
        kind, old = inner.raw.get("rope_type"), inner.raw.get("type")
        if kind is not None and old is not None and kind != old:
            raise inner.refuse("type", f"rope_type is {kind!r}, so one of them is wrong")
        if (kind or old or "default") == "default":
            for setting in sorted(_ROPE - {"rope_type", "type", "rope_theta"}):
                if inner.raw.get(setting) is not None:
                    raise inner.refuse(setting, "a rope_type must say what it is for")
        own = inner.raw.get("rope_theta")
        if own is not None and theta is not None and own != theta:
            raise inner.refuse("rope_theta", f"outside {name} it is {theta!r}, so one of them is wrong")
        theta = theta if own is None else own
    if theta is None:
        raise CheckpointError(f"{layers.path} has no field 'rope_theta'")
    return result


def _taps(fields: Fields, name: str, lowest: int) -> tuple[int, ...]:
    """The list of different whole numbers from `lowest` in field `name`, in its order."""
    ids = fields.raw.get(name)
    if ids is None:
        raise CheckpointError(f"{fields.path} has no field '{name}'")
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not whole or not ids or min(ids) < lowest:
        raise fields.refuse(name, f"it must list the target's layers, each a whole number of at least {lowest}")
    if len(set(ids)) != len(ids):
        raise fields.refuse(name, "it must not name a layer twice")
    return tuple(ids)


def _default_taps(top: Fields, target_layers: int, layers: int) -> tuple[int, ...]:
    """Where the published drafts tap if they do not say: evenly, without the first and the last two layers."""
    if not target_layers:
        raise CheckpointError(f"{top.path} has neither 'target_layer_ids' nor 'num_target_layers'")
    if layers == 1:
        return (target_layers // 2,)
    taps = tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))
    if target_layers < 4 or len(set(taps)) != layers:
        raise top.refuse("num_target_layers", f"too few for {layers} default taps; name them in target_layer_ids")
    return taps


def _inner(fields: Fields, name: str, required: bool) -> Fields:
    value = fields.raw.get(name)
    if value is None and required:
        raise CheckpointError(f"{fields.path} has no field '{name}'")
    if value is not None and not isinstance(value, Mapping):
        raise fields.refuse(name, "it must be an object")
    return Fields(value or {}, Path(f"{fields.path}: {name}"))


def _either(name: str, nested: Fields, top: Fields) -> Fields:
    """The one of the two that holds `name`: newer files nest it, older ones do not.

    Raises: CheckpointError if both hold it and disagree.
    """
    inside, outside = nested.raw.get(name), top.raw.get(name)
    if inside is not None and outside is not None and inside != outside:
        raise nested.refuse(name, f"outside dflash_config it is {outside!r}, so one of them is wrong")
    return top if inside is None else nested


def _only_known(fields: Fields, known: set[str]) -> None:
    for name, value in fields.raw.items():
        if value is None or name in known:
            continue
        if name not in _NEUTRAL:
            raise CheckpointError(
                f"{fields.path}: field {name!r} is unknown to Outrider and could change what the draft computes; "
                "use a draft without it"
            )
        if value != _NEUTRAL[name]:
            raise fields.refuse(name, f"only {json.dumps(_NEUTRAL[name])} is implemented")


def _optional_flag(fields: Fields, name: str) -> bool | None:
    return None if fields.raw.get(name) is None else fields.flag(name, False)
