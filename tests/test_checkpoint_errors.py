"""A damaged or unknown checkpoint is refused with one sentence that names the file or the field, never otherwise."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.checkpoint import locate, open_checkpoint, read_config
from outrider.checkpoint.shards import INDEX, SINGLE, Shards
from outrider.errors import CheckpointError
from tiny import edit_config, tiny_gpt_oss, tiny_qwen3_moe

MAKERS: dict[str, Callable[[Path], Any]] = {
    "gpt_oss": lambda folder: tiny_gpt_oss(folder, mxfp4=False, layers=2),
    "gpt_oss_mxfp4": lambda folder: tiny_gpt_oss(folder, mxfp4=True, layers=2),
    "gpt_oss_sharded": lambda folder: tiny_gpt_oss(folder, mxfp4=True, layers=2, sharded=True),
    "qwen3_moe": lambda folder: tiny_qwen3_moe(folder, layers=2),
}
FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, make in MAKERS.items():
        folders[name] = tmp_path_factory.mktemp("originals") / name
        make(folders[name])
    return folders


@pytest.fixture
def fresh(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(originals[name], tmp_path / name))

    return copy


def is_one_sentence(text: str) -> bool:
    return bool(text) and text.isprintable() and not re.search(r"[.!?]\s+[A-Z]", text) and not text.endswith(".")


def refusal(action: Callable[[], Any]) -> str:
    """The sentence of the CheckpointError that `action` must raise."""
    with pytest.raises(CheckpointError) as caught:
        action()
    assert type(caught.value) is CheckpointError
    assert is_one_sentence(str(caught.value))
    return str(caught.value)


def refused(folder: Path, *words: str) -> None:
    text = refusal(lambda: open_checkpoint(folder))
    for word in words:
        assert word in text


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", MAKERS)
def test_the_originals_open(originals: dict[str, Path], name: str) -> None:
    assert open_checkpoint(originals[name]).config.num_layers == 2


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_none(tmp_path: Path, fresh: Callable[[str], Path]) -> None:
    refused(tmp_path / "absent", "absent", "missing")
    refused(tmp_path, "config.json", "missing")
    refused(fresh("gpt_oss") / "config.json", "neither model.safetensors nor")


@pytest.mark.parametrize("model", ["", "no/such/folder", "x" * 300, "~nobody-of-that-name/x", "spaced name/x"])
def test_locate_refuses_what_is_no_folder_and_no_hub_id(model: str) -> None:
    assert f"'{model}'" in refusal(lambda: locate(model))


def test_locate_says_when_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    response = type("Response", (), {"headers": {}, "request": None, "status_code": 404})()
    failures = (
        LocalEntryNotFoundError("no cache"),
        HFValidationError("a bad name"),
        OSError("no route"),
        HfHubHTTPError("404 not found\nmore about it", response=response),
    )
    for failure in failures:

        def fail(*args: Any, error: Exception = failure, **kwargs: Any) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        assert "'some/model'" in refusal(lambda: locate("some/model"))


def test_no_weights_at_all(fresh: Callable[[str], Path]) -> None:
    folder = fresh("gpt_oss")
    (folder / SINGLE).unlink()
    refused(folder, str(folder), "neither model.safetensors nor")


def test_missing_shard(fresh: Callable[[str], Path]) -> None:
    folder = fresh("gpt_oss_sharded")
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors", "missing")


def test_a_shard_that_is_a_folder(fresh: Callable[[str], Path]) -> None:
    folder = fresh("gpt_oss_sharded")
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00002-of-00003.safetensors").mkdir()
    refused(folder, "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("size", [0, 4, 8, 100, 5000, -1])
def test_truncated_file(fresh: Callable[[str], Path], size: int) -> None:
    folder = fresh("gpt_oss_mxfp4")
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:size])
    refused(folder, str(folder / SINGLE), "truncated or corrupt")


@pytest.mark.parametrize(
    "start", [b"\xff" * 8, b"\x00" * 8, b"\x10\0\0\0\0\0\0\0", b"<html>\n"], ids=["huge", "zero", "short", "a page"]
)
def test_corrupt_header(fresh: Callable[[str], Path], start: bytes) -> None:
    folder = fresh("gpt_oss")
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(start + content[len(start) :])
    refused(folder, str(folder / SINGLE), "truncated or corrupt")


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"null", b"[" * 100_000])
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_garbage_json(fresh: Callable[[str], Path], file: str, text: bytes) -> None:
    folder = fresh("gpt_oss_sharded")
    (folder / file).write_bytes(text)
    refused(folder, str(folder / file))


# --- the index --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "", ".", "..", "x\0y", 7, None, ["a"]], ids=repr
)
def test_an_index_entry_that_leaves_the_folder(fresh: Callable[[str], Path], target: Any) -> None:
    folder = fresh("gpt_oss_sharded")
    edit_index(folder, lambda index: index.update({"model.norm.weight": target}))
    refused(folder, INDEX, "'model.norm.weight'", repr(target), "not a file of the folder")


@pytest.mark.parametrize("target", ["x" * 300, "absent.safetensors"])
def test_an_index_entry_without_a_file(fresh: Callable[[str], Path], target: str) -> None:
    folder = fresh("gpt_oss_sharded")
    edit_index(folder, lambda index: index.update({"model.norm.weight": target}))
    refused(folder, str(folder / target))


def test_an_index_that_names_a_tensor_its_shard_lacks(fresh: Callable[[str], Path]) -> None:
    folder = fresh("gpt_oss_sharded")
    edit_index(folder, lambda index: index.update({"model.ghost.weight": index["model.norm.weight"]}))
    refused(folder, INDEX, "'model.ghost.weight'")


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_a_map(fresh: Callable[[str], Path], content: dict[str, Any]) -> None:
    folder = fresh("gpt_oss_sharded")
    (folder / INDEX).write_text(json.dumps(content))
    refused(folder, INDEX, "weight_map")


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_missing_and_unexpected_tensors(fresh: Callable[[str], Path]) -> None:
    folder = fresh("gpt_oss")
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.sinks"))
    refused(folder, "lacks", "'model.layers.1.self_attn.sinks'", "config.json")
    both = {"model.layers.1.self_attn.sinks": torch.zeros(4), "extra\nline": torch.zeros(1)}
    edit_tensors(folder, lambda tensors: tensors.update(both))
    refused(folder, SINGLE, r"'extra\nline'", "not part of")


def test_harmless_leftovers_are_accepted(fresh: Callable[[str], Path]) -> None:
    folder = fresh("gpt_oss")
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    open_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.experts.down_proj"])
def test_wrong_shape(fresh: Callable[[str], Path], name: str) -> None:
    folder = fresh("gpt_oss")
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][..., 1:]}))
    refused(folder, str(folder / SINGLE), f"'{name}'", "shape", "config.json calls for")


@pytest.mark.parametrize(
    ("name", "dtype"), [("model.norm.weight", torch.int64), ("model.layers.0.mlp.experts.down_proj_blocks", torch.int8)]
)
def test_wrong_dtype(fresh: Callable[[str], Path], name: str, dtype: torch.dtype) -> None:
    folder = fresh("gpt_oss_mxfp4")
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused(folder, str(folder / SINGLE), f"'{name}'", "it must be")


def test_experts_of_mixed_dtypes(fresh: Callable[[str], Path]) -> None:
    folder, name = fresh("qwen3_moe"), "model.layers.1.mlp.experts.5.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].float()}))
    refused(folder, f"'{name}'", "float32", "it must be bfloat16")


@pytest.mark.parametrize("count", [7, 9])
@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4", "qwen3_moe"])
def test_another_number_of_experts_than_the_config_says(fresh: Callable[[str], Path], name: str, count: int) -> None:
    folder = fresh(name)
    edit_config(folder, num_local_experts=count)
    refused(folder, str(folder / SINGLE), ".mlp.", "has shape [8, 64]", f"[{count}, 64]")  # the router


def test_more_or_fewer_expert_tensors_than_the_config_says(fresh: Callable[[str], Path]) -> None:
    """The router agrees with the config, the experts do not."""
    folder = fresh("qwen3_moe")
    router = torch.zeros(9, 64, dtype=torch.bfloat16)
    edit_config(folder, num_local_experts=9)
    edit_tensors(folder, lambda t: t.update({n: router.clone() for n in t if n.endswith("mlp.gate.weight")}))
    refused(folder, str(folder), "lacks", "experts.8.", "9 experts")
    edit_config(folder, num_local_experts=7)
    edit_tensors(folder, lambda t: t.update({n: router[:7].clone() for n in t if n.endswith("mlp.gate.weight")}))
    refused(folder, str(folder / SINGLE), "experts.7.", "not part of", "7 experts")
    folder = fresh("gpt_oss")
    names = [f"model.layers.{layer}.mlp.router.{part}" for layer in (0, 1) for part in ("weight", "bias")]
    edit_config(folder, num_local_experts=7)
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:7] for name in names}))
    refused(folder, str(folder / SINGLE), "mlp.experts.", "has shape [8,", "[7,")


@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_layers(fresh: Callable[[str], Path], layers: int) -> None:
    folder = fresh("qwen3_moe")
    edit_config(folder, num_hidden_layers=layers)
    refused(folder, "layers.2" if layers == 3 else "layers.1", f"{layers} layers")


# --- the config -------------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {"model_type": "llama"}, "model_type"),
    ("gpt_oss", {"model_type": ["gpt_oss"]}, "model_type"),
    ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
    ("gpt_oss", {"quantization_config": "mxfp4"}, "quantization_config"),
    ("gpt_oss", {"rope_parameters": YARN | {"rope_type": "llama3"}}, "rope_parameters.rope_type"),
    ("gpt_oss", {"rope_parameters": YARN | {"mscale": 2.0}}, "rope_parameters.mscale"),
    ("gpt_oss", {"rope_parameters": YARN | {"factor": -1}}, "factor"),
    ("qwen3_moe", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("gpt_oss", {"rope_parameters": YARN | {"rope_theta": "big"}}, "rope_theta"),
    ("gpt_oss", {"rope_parameters": {"full_attention": YARN}}, "rope_parameters"),
    ("gpt_oss", {"rope_parameters": [1]}, "rope_parameters"),
    (
        "gpt_oss",
        {"rope_parameters": None, "rope_scaling": YARN | {"rope_theta": None}, "rope_theta": "1"},
        "rope_theta",
    ),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gpt_oss", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ("gpt_oss", {"layer_types": ["full_attention", ["list"]]}, "layer_types"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ("gpt_oss", {"dtype": "float8_e4m3fn"}, "dtype"),
    ("gpt_oss", {"eos_token_id": "end"}, "eos_token_id"),
    ("gpt_oss", {"hidden_size": 64.0}, "hidden_size"),
    ("gpt_oss", {"hidden_size": True}, "hidden_size"),
    ("gpt_oss", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("gpt_oss", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("gpt_oss", {"num_local_experts": 10**30}, "num_local_experts"),
    ("gpt_oss", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ("gpt_oss", {"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ("gpt_oss", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("gpt_oss", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ("gpt_oss", {"num_attention_heads": 5}, "attention heads"),
    ("gpt_oss", {"head_dim": 33}, "head_dim"),
    ("gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("gpt_oss_mxfp4", {"intermediate_size": 80}, "multiples of 32"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "no layer has experts"),
    ("qwen3_moe", {"mlp_only_layers": [5]}, "mlp_only_layers"),
    ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": -4}, "sliding_window"),
]


@pytest.mark.parametrize(("name", "fields", "word"), FIELDS, ids=lambda value: str(value)[:60])
def test_a_field_that_is_wrong_or_unknown(
    fresh: Callable[[str], Path], name: str, fields: dict[str, Any], word: str
) -> None:
    folder = fresh(name)
    edit_config(folder, **fields)
    refused(folder, str(folder / "config.json"), word)


@pytest.mark.parametrize(
    "field",
    ["model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_local_experts"],
)
def test_a_missing_field(fresh: Callable[[str], Path], field: str) -> None:
    folder = fresh("gpt_oss")
    edit_config(folder, drop=(field,))
    path = folder / "config.json"
    text = refusal(lambda: read_config(path))
    assert str(path) in text
    assert {"num_local_experts": "num_experts"}.get(field, field) in text


# --- fuzz: whatever happens to the bytes, either it opens or CheckpointError says why ---------------------------------


def opens_or_is_refused(action: Callable[[], Any]) -> None:
    try:
        action()
    except CheckpointError as error:
        assert is_one_sentence(str(error).replace(". ", " "))  # the damaged text may be quoted


def damage(content: bytes, position: float, byte: int, cut: float | None) -> bytes:
    damaged = bytearray(content)
    damaged[int(position * (len(content) - 1))] ^= byte
    return bytes(damaged if cut is None else damaged[: int(cut * len(content))])


SPOT = st.floats(0, 1)
CUT = st.one_of(st.none(), SPOT)


@FUZZ
@given(position=SPOT, byte=st.integers(0, 255), cut=CUT)
def test_fuzz_config_bytes(originals: dict[str, Path], position: float, byte: int, cut: float | None) -> None:
    folder = originals["qwen3_moe"].with_name("fuzz_config")
    shutil.copytree(originals["qwen3_moe"], folder, dirs_exist_ok=True)
    content = (originals["qwen3_moe"] / "config.json").read_bytes()
    (folder / "config.json").write_bytes(damage(content, position, byte, cut))
    opens_or_is_refused(lambda: open_checkpoint(folder))


@FUZZ
@given(position=SPOT, byte=st.integers(0, 255), cut=CUT)
def test_fuzz_header_bytes(originals: dict[str, Path], position: float, byte: int, cut: float | None) -> None:
    folder = originals["gpt_oss_mxfp4"].with_name("fuzz_header")
    shutil.copytree(originals["gpt_oss_mxfp4"], folder, dirs_exist_ok=True)
    content = (originals["gpt_oss_mxfp4"] / SINGLE).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    damaged = damage(content[:header], position, byte, cut)
    (folder / SINGLE).write_bytes(damaged + content[header:] if cut is None else damaged)
    opens_or_is_refused(lambda: open_checkpoint(folder))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**18, 10**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@FUZZ
@given(data=st.data(), name=st.sampled_from(["gpt_oss", "qwen3_moe"]), value=VALUES)
def test_fuzz_config_values(originals: dict[str, Path], data: st.DataObject, name: str, value: Any) -> None:
    config = json.loads((originals[name] / "config.json").read_text())
    fields = [*sorted(config), "rope_scaling", "quantization_config", "use_sliding_window"]
    path = originals[name].with_name("fuzz_values.json")
    path.write_text(json.dumps(config | {data.draw(st.sampled_from(fields)): value}))
    opens_or_is_refused(lambda: read_config(path))


@FUZZ
@given(weight_map=st.dictionaries(st.text(max_size=8), st.text(max_size=12) | VALUES, min_size=1, max_size=3))
def test_fuzz_index(originals: dict[str, Path], weight_map: dict[str, Any]) -> None:
    folder = originals["gpt_oss"].with_name("fuzz_index")
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    opens_or_is_refused(lambda: Shards(folder))
