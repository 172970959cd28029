"""`synth`: true shapes and bytes, sane activations, the same files for the same seed; transformers loads them."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.checkpoint import open_checkpoint, read_config
from outrider.checkpoint.inventory import dense_tensors, expert_nbytes, expert_parts, expert_tensors
from outrider.checkpoint.presets import PRESETS, load_config
from outrider.checkpoint.synth import Noise, synthesize
from outrider.errors import CheckpointError
from outrider.kernels import mxfp4
from tiny import load_with_transformers

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "eos_token_id": 255,
    "pad_token_id": 254,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss-mxfp4": ("gpt-oss-20b", SMALL | {"num_local_experts": 8}),
    "gpt_oss-bf16": ("gpt-oss-20b", SMALL | {"num_local_experts": 8, "quantization_config": None}),
    "qwen3_moe-bf16": ("qwen3-coder-30b-a3b", SMALL | {"num_experts": 16, "moe_intermediate_size": 32}),
    "qwen3_moe-tied": (
        "qwen3-coder-30b-a3b",
        SMALL | {"num_experts": 16, "moe_intermediate_size": 32, "tie_word_embeddings": True, "mlp_only_layers": [1]},
    ),
}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 24])
def test_transformers_loads_it_and_activations_stay_sane(kind: str, layers: int, tmp_path: Path) -> None:
    source, overrides = KINDS[kind]
    if layers == 1:
        overrides = overrides | {"mlp_only_layers": []}
    config = synthesize(source, tmp_path / "out", layers=layers, overrides=overrides)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.config == config and config.num_layers == layers
    model = load_with_transformers(tmp_path / "out")
    ids = torch.randint(0, 254, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = model(ids, output_hidden_states=True, output_router_logits=True)
    assert torch.isfinite(seen.logits).all()
    assert 0.3 < float(seen.logits.std()) < 3
    assert all(0.1 < float(hidden.std()) < 10 for hidden in seen.hidden_states)
    for router in seen.router_logits:
        assert len(router.topk(config.experts_per_token, -1).indices.unique()) > config.num_experts // 2


def test_mxfp4_weights_have_the_std_of_plain_ones(tmp_path: Path) -> None:
    source, overrides = KINDS["gpt_oss-mxfp4"]
    synthesize(source, tmp_path / "out", layers=4, overrides=overrides)
    checkpoint = open_checkpoint(tmp_path / "out")
    for name, fan_in in (("gate_up_proj", 64), ("down_proj", 96)):
        prefix = f"model.layers.2.mlp.experts.{name}"
        weight = mxfp4.unpack(checkpoint.dense(f"{prefix}_blocks"), checkpoint.dense(f"{prefix}_scales"))
        assert float(weight.std()) * math.sqrt(fan_in) == pytest.approx(1, abs=0.03)
        assert abs(float(weight.mean())) < 0.02 * float(weight.std()) + 0.001


@pytest.mark.parametrize("fan_in", [32, 64, 768, 1000, 2048, 2880, 4096])
def test_two_powers_of_two_make_any_std(fan_in: int) -> None:
    noise, std = Noise(0), fan_in**-0.5
    scales = noise.scales((2000, 90), std)
    weight = mxfp4.unpack(noise.codes((2000, 90, 16)), scales)
    assert int(scales.max()) - int(scales.min()) <= 1
    assert float(weight.std()) == pytest.approx(std, rel=0.01)


def test_experts_differ_from_one_another(tmp_path: Path) -> None:
    source, overrides = KINDS["qwen3_moe-bf16"]
    synthesize(source, tmp_path / "out", layers=2, overrides=overrides)
    checkpoint = open_checkpoint(tmp_path / "out")
    seen = {checkpoint.expert_part(key, "up_proj.weight").float().sum().item() for key in checkpoint.expert_keys()}
    assert len(seen) == 32


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    source, overrides = KINDS["gpt_oss-mxfp4"]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesize(source, tmp_path / name, seed, layers=2, overrides=overrides, shard_nbytes=50_000)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a").keys() == digests(tmp_path / "c").keys()
    assert len(digests(tmp_path / "a")) > 4
    different = {name for name, digest in digests(tmp_path / "a").items() if digests(tmp_path / "c")[name] != digest}
    assert {name for name in digests(tmp_path / "a") if name.endswith(".safetensors")} == different


def test_a_config_file_or_a_folder_is_a_source_and_layers_fit_its_settings(tmp_path: Path) -> None:
    raw = PRESETS["qwen3-coder-30b-a3b"] | KINDS["qwen3_moe-bf16"][1] | {"mlp_only_layers": [1, 7]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for number, source in enumerate((tmp_path, tmp_path / "config.json", str(tmp_path))):
        config = synthesize(source, tmp_path / str(number), layers=3)
        assert config.is_moe == (True, False, True)
        assert read_config(tmp_path / str(number)) == config
    raw = PRESETS["gpt-oss-20b"] | KINDS["gpt_oss-mxfp4"][1]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert synthesize(tmp_path, tmp_path / "long", layers=27).windows == (128, None) * 13 + (128,)


def test_progress_and_bytes(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    source, overrides = KINDS["gpt_oss-bf16"]
    synthesize(source, tmp_path / "out", 0, lambda *call: calls.append(call), layers=1, overrides=overrides)
    shards = open_checkpoint(tmp_path / "out").shards
    total = sum(shards.tensor(name).nbytes for name in shards.names)
    assert calls[-1] == ("random weights", total, total)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("gpt-oss-7b", {}, ("'gpt-oss-7b'", "gpt-oss-20b")),
        ("gpt-oss-20b", {"layers": 0}, ("gpt-oss-20b", "num_hidden_layers")),
        ("gpt-oss-20b", {"overrides": {"hidden_size": 100}}, ("multiples of 32",)),
        ("gpt-oss-20b", {"overrides": {"model_type": "llama"}}, ("model_type",)),
    ],
)
def test_refusals(source: str, options: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        synthesize(source, tmp_path / "out", **options)
    assert all(word in str(caught.value) for word in words)
    assert not list(tmp_path.iterdir())


def test_an_occupied_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        synthesize("gpt-oss-20b", tmp_path, layers=1, overrides=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- presets: published figures ---------------------------------------------------------------------------------------


def parameters(name: str) -> int:
    """Values of the model, unpacked."""
    config = load_config(name)
    total = sum(math.prod(stored.shape) for stored in dense_tensors(config).values())
    for tensor, stored in expert_tensors(config, expert_parts(config)).items():
        if not tensor.endswith("_scales"):
            total += math.prod(stored.shape) * (2 if tensor.endswith("_blocks") else 1)
    return total


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8), ("qwen3-coder-30b-a3b", 30.5)]
)
def test_presets_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert parameters(name) / 1e9 == pytest.approx(billions, abs=0.05)


def test_presets_have_the_known_bytes() -> None:
    gpt_oss, qwen3 = load_config("gpt-oss-20b"), load_config("qwen3-coder-30b-a3b")
    assert expert_nbytes(expert_parts(gpt_oss)) == 13_219_200 + 17_280
    assert expert_nbytes(expert_parts(qwen3)) == 9_437_184
    assert sum(t.nbytes for t in expert_tensors(gpt_oss, expert_parts(gpt_oss)).values()) == 24 * 32 * 13_236_480
    assert gpt_oss.windows == (128, None) * 12 and gpt_oss.yarn is not None and not gpt_oss.yarn.truncate
    assert (qwen3.rope_theta, qwen3.normalize_top_k, qwen3.max_positions) == (1e7, True, 262144)
