"""A draft's config.json: every published spelling is read, every other meaning is refused by the field's name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.checkpoint.draft import check_pairing
from outrider.checkpoint.draft_config import read_draft_config
from outrider.checkpoint.presets import load_config
from outrider.config import Yarn
from test_checkpoint_errors import FUZZ, VALUES, opens_or_is_refused, refusal
from tiny_draft import STYLES, tiny_draft

GPT_OSS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 8,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    "dtype": "bfloat16",
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initializer_range": 0.02,
    "intermediate_size": 7680,
    "layer_types": ["full_attention"] * 8,
    "max_position_embeddings": 131072,
    "max_window_layers": 8,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "num_target_layers": 24,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 201088,
}
CODER: dict[str, Any] = GPT_OSS | {
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 12, 23, 34, 45]},
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_target_layers": 48,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "vocab_size": 151936,
}


def config_file(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_the_real_gpt_oss_config(tmp_path: Path) -> None:
    draft = read_draft_config(config_file(tmp_path, GPT_OSS))
    assert (draft.block_size, draft.num_drafts, draft.first_draft_row) == (8, 7, 1)
    assert (draft.mask_token_id, draft.vocab_size, draft.draft_vocab_size) == (200000, 201088, 201088)
    assert (draft.tap_layers, draft.target_layers) == ((1, 6, 11, 16, 21), 24)
    assert (draft.hidden_size, draft.num_heads, draft.num_kv_heads, draft.head_dim) == (2880, 64, 8, 64)
    assert (draft.num_layers, draft.intermediate, draft.attention_bias) == (8, 7680, True)
    assert (draft.rope_theta, draft.rms_norm_eps, draft.dtype) == (150000.0, 1e-5, "bfloat16")
    assert draft.yarn == Yarn(32.0, 4096, truncate=False)
    assert (draft.windows, draft.causal) == ((None,) * 8, (False,) * 8)
    check_pairing(draft, load_config("gpt-oss-20b"), tmp_path)
    text = refusal(lambda: check_pairing(draft, load_config("gpt-oss-120b"), tmp_path))
    assert "num_target_layers is 24" in text and "36" in text


def test_the_real_coder_config(tmp_path: Path) -> None:
    draft = read_draft_config(config_file(tmp_path, CODER))
    assert (draft.block_size, draft.mask_token_id, draft.tap_layers) == (16, 151669, (1, 12, 23, 34, 45))
    assert (draft.rope_theta, draft.yarn, draft.attention_bias) == (1e7, None, False)
    check_pairing(draft, load_config("qwen3-coder-30b-a3b"), tmp_path)
    text = refusal(lambda: check_pairing(draft, load_config("gpt-oss-20b"), tmp_path))
    assert "hidden_size is 2048" in text and "2880" in text


# --- the config, field by field ---------------------------------------------------------------------------------------

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
HALF = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


def nested(**fields: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": 254, "target_layer_ids": [0, 1, 2]} | fields}


def base(**fields: Any) -> dict[str, Any]:
    small = {
        "hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "num_target_layers": 3, "vocab_size": 256, "layer_types": ["full_attention"] * 2,
        "use_sliding_window": None,
    }  # fmt: skip
    return CODER | small | nested() | fields


@pytest.mark.parametrize(
    ("fields", "windows", "causal"),
    [
        ({}, (None, None), (False, False)),
        ({"layer_types": None}, (None, None), (False, False)),
        ({"sliding_window": 2048}, (None, None), (False, False)),
        (HALF, (8, None), (True, False)),
        (HALF | {"use_sliding_window": True}, (8, None), (True, False)),
        (HALF | {"sliding_window": None} | nested(use_swa=True, swa_window_size=8), (8, None), (True, False)),
        (HALF | nested(causal=False), (8, None), (False, False)),
        (HALF | {"is_causal": False} | nested(causal=True), (8, None), (False, False)),
        (SLIDING, (8, 8), (True, True)),
        (SLIDING | {"is_causal": True} | nested(causal=False), (8, 8), (True, True)),
        (SLIDING | nested(causal=True, swa_window_size=8), (8, 8), (True, True)),
        ({"is_causal": False}, (None, None), (False, False)),
        (nested(use_swa=False, swa_window_size=8), (None, None), (False, False)),
        # every layer slides, as Model Optimizer writes it
        (
            {"sliding_window": 8, "use_sliding_window": False} | nested(use_swa=True, causal=False),
            (8, 8),
            (False, False),
        ),
        ({"layer_types": None} | nested(use_swa=True, swa_window_size=8, causal=True), (8, 8), (True, True)),
    ],
)
def test_windows_and_causality(
    tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, ...], causal: tuple[bool, ...]
) -> None:
    draft = read_draft_config(config_file(tmp_path, base(**fields)))
    assert (draft.windows, draft.causal) == (windows, causal)


def test_speculators_windows(tmp_path: Path) -> None:
    both_ways = tiny_draft(tmp_path, style="speculators", windows=(8, None), causal=False)
    assert (both_ways.windows, both_ways.causal) == ((8, None), (False, False))
    assert tiny_draft(tmp_path, style="speculators", windows=(8, None), causal=True).causal == (True, False)


NEUTRAL = {
    "add_swa_attention_sink_bias": (False, True),
    "attention_sink_bias": (False, True),
    "attention_value_scale": (1.0, 0.5),
    "final_logit_softcapping": (None, 30.0),
    "fc_layernorm": (False, True),
    "input_embedding_scale": (1, 8.0),
    "is_neox_style": (True, False),
    "logit_scale": (1.0, 0.25),
    "output_multiplier": (1.0, 2.0),
    "partial_rotary_factor": (1.0, 0.25),
    "projector_type": ("dflash", "domino"),
    "quantization_config": (None, {"quant_method": "fp8"}),
    "hidden_act": ("silu", "gelu"),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values(tmp_path: Path, name: str) -> None:
    """Accepted with the value that does nothing, refused by name with any other, wherever they stand."""
    neutral, other = NEUTRAL[name]
    plain = read_draft_config(config_file(tmp_path, base()))
    for place in (lambda value: {name: value}, lambda value: nested(**{name: value})):
        for value in (neutral, None):
            assert read_draft_config(config_file(tmp_path, base(**place(value)))) == plain
        path = config_file(tmp_path, base(**place(other)))
        assert f"{name} is {other!r}; only " in refusal(lambda path=path: read_draft_config(path))  # type: ignore[misc]


YARN = GPT_OSS["rope_scaling"]
CONFIGS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"architectures": ["Qwen3ForCausalLM"]}, ("architectures", "DFlashDraftModel")),
    ({"architectures": ["DFlash2DraftModel"]}, ("architectures", "DFlashDraftModel")),
    ({"architectures": None}, ("architectures", "DFlashDraftModel")),
    ({"speculators_model_type": "eagle3"}, ("speculators_model_type", "'dflash'")),
    ({"markov_rank": 256}, ("'markov_rank'", "unknown")),
    ({"kv_lora_rank": 512}, ("'kv_lora_rank'", "unknown")),
    (nested(selector_rank=256), ("dflash_config", "'selector_rank'", "unknown")),
    (nested(sliding_window=8), ("dflash_config", "'sliding_window'", "unknown")),
    ({"dflash_config": [1]}, ("dflash_config", "object")),
    ({"dflash_config": None, "num_target_layers": 5}, ("no field 'mask_token_id'",)),
    (nested(mask_token_id=None), ("no field 'mask_token_id'",)),
    (nested(mask_token_id=-1), ("mask_token_id is -1",)),
    (nested(mask_token_id="<mask>"), ("mask_token_id",)),
    ({"mask_token_id": 253}, ("mask_token_id is 254", "253")),
    (nested(block_size=8), ("block_size is 8", "16")),
    ({"block_size": None}, ("no field 'block_size'",)),
    ({"block_size": 1}, ("block_size is 1", "at least 2")),
    ({"rope_scaling": {"factor": 32, "original_max_position_embeddings": 4096}}, ("factor is 32", "rope_type")),
    ({"rope_scaling": {"rope_type": "default", "attention_factor": 2.0}}, ("attention_factor is 2.0", "rope_type")),
    ({"block_size": 10**9}, ("block_size",)),
    ({"sample_from_anchor": False} | nested(sample_from_anchor=True), ("sample_from_anchor is True", "False")),
    (nested(sample_from_anchor="yes"), ("sample_from_anchor",)),
    (nested(query_zero_predicts_next=True), ("query_zero_predicts_next",)),
    (nested(target_layer_ids=[]), ("target_layer_ids",)),
    (nested(target_layer_ids=[0, 0]), ("target_layer_ids", "twice")),
    (nested(target_layer_ids=[-1, 0]), ("target_layer_ids", "at least 0")),
    (nested(target_layer_ids=[0.0, 1]), ("target_layer_ids",)),
    (nested(target_layer_ids=[True, 0]), ("target_layer_ids",)),
    (nested(target_layer_ids=3), ("target_layer_ids",)),
    ({"num_target_layers": None} | nested(target_layer_ids=None), ("target_layer_ids", "num_target_layers")),
    ({"num_target_layers": 3} | nested(target_layer_ids=None), ("num_target_layers is 3", "too few")),
    ({"num_target_layers": 0}, ("num_target_layers",)),
    ({"is_causal": True}, ("is_causal is True", "layer_types")),
    (HALF | {"is_causal": True}, ("is_causal is True", "layer_types")),
    (HALF | nested(causal=True), ("causal is True", "layer_types")),
    (SLIDING | nested(causal="no"), ("causal",)),
    (SLIDING | {"sliding_window": None}, ("sliding_window", "need one")),
    (SLIDING | {"sliding_window": 0}, ("sliding_window is 0",)),
    (SLIDING | {"use_sliding_window": False}, ("use_sliding_window", "layer_types")),
    (SLIDING | nested(swa_window_size=16), ("swa_window_size is 16", "8")),
    (SLIDING | nested(use_swa=False), ("use_swa is False", "layer_types")),
    ({"sliding_window": 8} | nested(use_swa=True), ("use_swa is True", "causal")),
    ({"layer_types": None, "use_sliding_window": True}, ("use_sliding_window", "layer_types")),
    ({"layer_types": ["full_attention"]}, ("layer_types", "2 layers")),
    ({"layer_types": ["full_attention", "linear_attention"]}, ("layer_types", "'linear_attention'")),
    ({"target_hidden_size": 128}, ("target_hidden_size is 128", "64")),
    ({"draft_vocab_size": 257}, ("draft_vocab_size is 257", "256")),
    ({"rope_theta": None}, ("no field 'rope_theta'",)),
    ({"rope_theta": 0}, ("rope_theta",)),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, ("rope_theta", "10000.0")),
    ({"rope_parameters": YARN, "rope_scaling": {"rope_type": "default"}}, ("rope_scaling", "rope_parameters")),
    ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}, ("partial_rotary_factor is 0.25",)),
    ({"rope_scaling": YARN | {"rope_type": "llama3"}}, ("rope_scaling.rope_type", "'llama3'")),
    ({"rope_scaling": YARN | {"type": "linear"}}, ("rope_scaling: type is 'linear'", "'yarn'")),
    ({"rope_scaling": YARN | {"mscale": 1.5}}, ("rope_scaling.mscale",)),
    ({"rope_scaling": YARN | {"mrope_section": [1]}}, ("rope_scaling", "'mrope_section'")),
    ({"rope_scaling": [1]}, ("rope_scaling", "object")),
    ({"num_attention_heads": 5}, ("num_key_value_heads is 2", "5 attention heads")),
    ({"head_dim": 15}, ("head_dim is 15", "even")),
    ({"head_dim": None, "num_attention_heads": 128}, ("head_dim",)),
    ({"hidden_size": 64.0}, ("hidden_size",)),
    ({"intermediate_size": None}, ("'intermediate_size'",)),
    ({"rms_norm_eps": None}, ("'rms_norm_eps'",)),
    ({"attention_bias": "qkv"}, ("attention_bias",)),
    ({"dtype": "float8_e4m3fn"}, ("dtype",)),
    ({"vocab_size": True}, ("vocab_size",)),
]


@pytest.mark.parametrize(("fields", "words"), CONFIGS, ids=range(len(CONFIGS)))
def test_a_field_that_is_wrong_or_unknown(tmp_path: Path, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    path = config_file(tmp_path, base(**fields))
    text = refusal(lambda: read_draft_config(tmp_path))
    for word in (str(path), *words):
        assert word in text


def test_accepted_spellings(tmp_path: Path) -> None:
    plain = read_draft_config(config_file(tmp_path, base()))
    for fields in (
        nested(block_size=16),
        {"block_size": None} | nested(block_size=16),
        {"mask_token_id": 254} | nested(mask_token_id=None),
        nested(mask_token="<|mask|>"),
        {"target_hidden_size": 64, "draft_vocab_size": 256},
        {
            "rope_theta": None,
            "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 1},
        },
        {"markov_rank": None},
        {"torch_dtype": "bfloat16", "dtype": "bfloat16", "tie_word_embeddings": True},
        {"model_type": "llama", "mlp_bias": False, "pretraining_tp": 1},
    ):
        assert read_draft_config(config_file(tmp_path, base(**fields))) == plain, fields
    unsorted = read_draft_config(config_file(tmp_path, base(**nested(target_layer_ids=[2, 0]))))
    assert unsorted.tap_layers == (2, 0), "in listed order: fc's columns follow it"
    assert read_draft_config(config_file(tmp_path, base(num_target_layers=None))).target_layers == 0
    assert read_draft_config(config_file(tmp_path, base(head_dim=None, num_attention_heads=4))).head_dim == 16


@pytest.mark.parametrize(
    ("target_layers", "layers", "taps"),
    [
        (24, 5, (1, 6, 11, 16, 21)),
        (48, 5, (1, 12, 23, 34, 45)),
        (36, 5, (1, 9, 17, 25, 33)),
        (24, 1, (12,)),
        (5, 2, (1, 2)),
    ],
)
def test_default_taps(tmp_path: Path, target_layers: int, layers: int, taps: tuple[int, ...]) -> None:
    kinds = {"num_hidden_layers": layers, "layer_types": None, "num_target_layers": target_layers}
    raw = base(**kinds, **nested(target_layer_ids=None))
    assert read_draft_config(config_file(tmp_path, raw)).tap_layers == taps


SPECULATORS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"projector_type": "domino"}, {}, ("projector_type", '"dflash"')),
    ({"shift_label": True}, {}, ("shift_label",)),
    ({"dflash_config": {}, "markov_rank": 2}, {}, ("unknown",)),
    ({"aux_hidden_state_layer_ids": [0, 2]}, {}, ("aux_hidden_state_layer_ids", "at least 1")),
    ({"aux_hidden_state_layer_ids": [2, 2]}, {}, ("aux_hidden_state_layer_ids", "twice")),
    ({"aux_hidden_state_layer_ids": None}, {}, ("no field 'aux_hidden_state_layer_ids'",)),
    ({"transformer_layer_config": None}, {}, ("no field 'transformer_layer_config'",)),
    ({"transformer_layer_config": 3}, {}, ("transformer_layer_config", "object")),
    ({"mask_token_id": None}, {}, ("no field 'mask_token_id'",)),
    ({"target_hidden_size": 65}, {}, ("target_hidden_size", "64")),
    ({"draft_vocab_size": 300}, {}, ("draft_vocab_size", "256")),
    ({}, {"block_size": 4}, ("transformer_layer_config", "'block_size'")),
    ({}, {"rope_theta": None}, ("transformer_layer_config", "'rope_theta'")),
    ({}, {"hidden_act": "gelu"}, ("transformer_layer_config", "hidden_act")),
    ({}, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, ("partial_rotary_factor",)),
]


@pytest.mark.parametrize(("top", "inner", "words"), SPECULATORS, ids=range(len(SPECULATORS)))
def test_a_speculators_field_that_is_wrong_or_unknown(
    tmp_path: Path, top: dict[str, Any], inner: dict[str, Any], words: tuple[str, ...]
) -> None:
    tiny_draft(tmp_path, style="speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"] |= inner
    path = config_file(tmp_path, config | top)
    text = refusal(lambda: read_draft_config(tmp_path))
    for word in (str(path), *words):
        assert word in text


# --- fuzz -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    for style in STYLES:
        tiny_draft(folder / style, style=style, windows=(8, None), reduced_vocab=100, dflash={"use_swa": True})
    return folder


@FUZZ
@given(data=st.data(), style=st.sampled_from(STYLES), value=VALUES)
def test_fuzz_values(originals: Path, data: st.DataObject, style: str, value: Any) -> None:
    config = json.loads((originals / style / "config.json").read_text())
    places = [config, *(part for part in config.values() if isinstance(part, dict))]
    place = data.draw(st.sampled_from(places))
    extra = ["rope_scaling", "rope_parameters", "is_causal", "causal", "swa_window_size", "sample_from_anchor"]
    place[data.draw(st.sampled_from([*sorted(place), *extra]) | st.text(max_size=8))] = value
    if data.draw(st.booleans()):
        place.pop(data.draw(st.sampled_from(sorted(place))))
    path = originals / "fuzz.json"
    path.write_text(json.dumps(config))
    opens_or_is_refused(lambda: read_draft_config(path))
