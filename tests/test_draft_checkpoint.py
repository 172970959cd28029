"""Draft checkpoints: the published shapes load, every other one is refused with a sentence that names what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from outrider.checkpoint import locate, read_config
from outrider.checkpoint.draft import check_pairing, open_draft
from outrider.checkpoint.draft_config import read_draft_config
from outrider.checkpoint.locate import DEMO, DEMO_DRAFT, locate_draft
from outrider.checkpoint.presets import load_config
from outrider.checkpoint.shards import SINGLE
from outrider.config import ModelConfig
from test_checkpoint_errors import CUT, FUZZ, SPOT, damage, edit_tensors, opens_or_is_refused, refusal
from test_draft_config import CODER, GPT_OSS, config_file
from tiny import HIDDEN, VOCAB, edit_config, tiny_qwen3_moe
from tiny_draft import STYLES, Sizes, tiny_draft

WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
NORMS = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}
MATRICES = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("target")
    tiny_qwen3_moe(folder)
    return read_config(folder)


def refused(folder: Path, target: ModelConfig, *words: str) -> None:
    text = refusal(lambda: open_draft(folder, target))
    for word in words:
        assert word in text


# --- the published shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "raw", "tensors", "heads", "kv_heads"),
    [("gpt-oss-20b", GPT_OSS, 123, 64, 8), ("qwen3-coder-30b-a3b", CODER, 91, 32, 4)],
)
def test_the_published_shapes_load(
    tmp_path: Path, preset: str, raw: dict[str, Any], tensors: int, heads: int, kv_heads: int
) -> None:
    """All tensors, the real heads, vocabulary, taps and block; narrower hidden, head and feed-forward sizes."""
    target = replace(load_config(preset), hidden_size=HIDDEN)
    inner = raw["dflash_config"]
    bias = raw["attention_bias"]
    tiny_draft(
        tmp_path,
        target,
        layers=8,
        taps=inner["target_layer_ids"],
        mask=inner["mask_token_id"],
        bias=bias,
        heads=heads,
        kv_heads=kv_heads,
    )
    config_file(tmp_path, raw | WIDTHS | {"intermediate_size": 160})
    draft = open_draft(tmp_path, target)
    stored = load_file(tmp_path / SINGLE)
    assert len(draft.names) == len(stored) == tensors
    body = {f"layers.{n}.{part}.weight" for n in range(8) for part in NORMS | MATRICES}
    body |= {f"layers.{n}.self_attn.{p}_proj.bias" for n in range(8) for p in "qkvo" if bias}
    assert stored.keys() == body | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for name, tensor in stored.items():
        assert torch.equal(draft.tensor(name), tensor)
    assert draft.elements() == sum(tensor.numel() for tensor in stored.values())
    assert draft.tensor("fc.weight").shape == (HIDDEN, 5 * HIDDEN)
    assert draft.tensor("layers.7.self_attn.q_proj.weight").shape == (heads * 16, HIDDEN)
    assert draft.ids is None


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("style", STYLES)
def test_styles_and_prefixes_mean_the_same(tmp_path: Path, target: ModelConfig, style: str, prefix: str) -> None:
    written = tiny_draft(tmp_path / "a", target, style=style, prefix=prefix, windows=(8, None), taps=(2, 0), bias=True)
    draft = open_draft(tmp_path / "a", target)
    assert draft.config == written == tiny_draft(tmp_path / "b", target, windows=(8, None), taps=(2, 0), bias=True)
    assert (written.tap_layers, written.windows, written.causal) == ((2, 0), (8, None), (True, False))
    assert (written.block_size, written.mask_token_id, written.target_layers) == (4, VOCAB - 2, 3)
    assert torch.equal(
        draft.tensor("layers.1.mlp.up_proj.weight"),
        open_draft(tmp_path / "b", target).tensor("layers.1.mlp.up_proj.weight"),
    )


@pytest.mark.parametrize("style", STYLES)
def test_sample_from_anchor(tmp_path: Path, style: str) -> None:
    draft = tiny_draft(tmp_path, style=style, sample_from_anchor=True)
    assert (draft.sample_from_anchor, draft.num_drafts, draft.first_draft_row) == (True, 4, 0)


def test_the_files_are_well_conditioned(tmp_path: Path) -> None:
    tiny_draft(tmp_path)
    for name, tensor in load_file(tmp_path / SINGLE).items():
        assert tensor.float().std() < 0.3 and tensor.isfinite().all(), name


# --- a vocabulary of its own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_a_reduced_vocabulary(tmp_path: Path, target: ModelConfig, style: str) -> None:
    config = tiny_draft(tmp_path, target, style=style, reduced_vocab=100)
    draft = open_draft(tmp_path, target)
    stored = load_file(tmp_path / SINGLE)
    assert (config.vocab_size, config.draft_vocab_size) == (VOCAB, 100)
    assert draft.tensor("lm_head.weight").shape == (100, HIDDEN)
    ids = draft.ids
    assert ids is not None and ids.dtype == torch.int64
    assert ids.tolist() == [i + d for i, d in enumerate(stored["d2t"].tolist())]
    assert ids.tolist() == stored["t2d"].nonzero().flatten().tolist()
    assert draft.elements() == sum(t.numel() for name, t in stored.items() if name not in ("d2t", "t2d"))
    edit_tensors(tmp_path, lambda t: t.pop("t2d"))
    assert open_draft(tmp_path, target).ids is not None
    edit_tensors(tmp_path, lambda t: t.update(d2t=t["d2t"].int()))
    assert torch.equal(open_draft(tmp_path, target).ids, ids)
    edit_tensors(tmp_path, lambda t: t.update(d2t=torch.randperm(VOCAB)[:100] - torch.arange(100)))
    open_draft(tmp_path, target)  # any order will do


def set_entry(name: str, index: int, value: int) -> Callable[[dict[str, Tensor]], Any]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name][index] = value

    return edit


BAD_MAPS: list[tuple[Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = [
    (lambda t: t.pop("d2t"), ("lacks", "'d2t'")),
    (lambda t: t.pop("lm_head.weight"), ("lacks", "'lm_head.weight'")),
    (
        lambda t: t.update({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}),
        ("'lm_head.weight'", "[256, 64]", "[100, 64]"),
    ),
    (lambda t: t.update(d2t=t["d2t"][:-1]), ("'d2t'", "[99]", "[100]")),
    (lambda t: t.update(d2t=t["d2t"].float()), ("'d2t'", "float32", "I64")),
    (lambda t: t.update(t2d=t["t2d"][1:]), ("'t2d'", "[255]", "[256]")),
    (lambda t: t.update(t2d=t["t2d"].float()), ("'t2d'", "float32", "BOOL")),
    (lambda t: t.update(t2d=~t["t2d"]), ("'t2d'", "'d2t'", "disagree")),
    (set_entry("d2t", 99, VOCAB - 99), ("'d2t'", "token 256", "256")),
    (set_entry("d2t", 0, -1), ("'d2t'", "token -1", "256")),
    (set_entry("d2t", 0, -(2**63)), ("'d2t'", "leads to token", "256")),
    (set_entry("d2t", 99, 2**63 - 1), ("'d2t'", "leads to token", "256")),
    (lambda t: t["d2t"].copy_(-torch.arange(100)), ("'d2t'", "two draft tokens")),
]


@pytest.mark.parametrize(("edit", "words"), BAD_MAPS, ids=range(len(BAD_MAPS)))
def test_bad_vocabulary_maps(
    tmp_path: Path, target: ModelConfig, edit: Callable[[dict[str, Tensor]], Any], words: tuple[str, ...]
) -> None:
    tiny_draft(tmp_path, target, style="speculators", reduced_vocab=100)
    edit_tensors(tmp_path, edit)
    refused(tmp_path, target, *words)


def test_a_map_without_a_reduced_vocabulary(tmp_path: Path, target: ModelConfig) -> None:
    tiny_draft(tmp_path, target, style="speculators")
    edit_tensors(tmp_path, lambda t: t.update(d2t=torch.zeros(VOCAB, dtype=torch.int64)))
    refused(tmp_path, target, "'d2t'", "not part of")


@pytest.mark.parametrize("name", ["fc.scale", "layers.0.self_attn.q_proj.weight_scale", "fc.bias", "other"])
def test_no_extra_tensor_passes(tmp_path: Path, target: ModelConfig, name: str) -> None:
    tiny_draft(tmp_path, target)
    edit_tensors(tmp_path, lambda t: t.update({name: torch.ones(1)}))
    refused(tmp_path, target, f"'{name}'", "not part of")


def test_a_block_of_one_row_that_drafts_from_the_anchor(tmp_path: Path, target: ModelConfig) -> None:
    draft = tiny_draft(tmp_path, target, block=1, sample_from_anchor=True)
    assert (draft.block_size, draft.num_drafts) == (1, 1) and open_draft(tmp_path, target).config == draft


def test_copies_of_the_target(tmp_path: Path, target: ModelConfig) -> None:
    embedding, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    config = tiny_draft(tmp_path, target, style="speculators")
    copies = {"embed_tokens.weight": embedding.bfloat16(), "lm_head.weight": head.bfloat16()}
    leftovers = {"verifier_norm.weight": torch.ones(HIDDEN), "verifier_lm_head.weight": head.clone()}
    edit_tensors(tmp_path, lambda t: t.update(copies | leftovers))
    draft = open_draft(tmp_path, target)
    draft.check_copies(embedding, head)
    for factor in (1.02, 0.98):  # in one row of 64 that are looked at
        one = embedding.clone()
        one[int(torch.linspace(0, VOCAB - 1, 64)[37])] *= factor
        assert "'embed_tokens.weight'" in refusal(lambda one=one: draft.check_copies(one, head))  # type: ignore[misc]
    for name, changed in (("embed_tokens", (embedding + 1, head)), ("lm_head", (embedding, -head))):
        text = refusal(lambda changed=changed: draft.check_copies(*changed))  # type: ignore[misc]
        assert f"'{name}.weight'" in text
    retrained = embedding.clone()
    retrained[config.mask_token_id] += 1
    assert "'embed_tokens.weight'" in refusal(lambda: draft.check_copies(retrained, head))
    edit_tensors(tmp_path, lambda t: t.update({"verifier_norm.weight": torch.ones(HIDDEN + 1)}))
    refused(tmp_path, target, "'verifier_norm.weight'", "[65]", "[64]")


# --- pairing and tensors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        (Sizes(hidden_size=72), {}, ("hidden_size is 72", "64")),
        (Sizes(vocab_size=300), {}, ("vocab_size is 300", "256")),
        (Sizes(num_layers=4), {}, ("num_target_layers is 4", "3")),
        (Sizes(), {"taps": (0, 3)}, ("layer 3", "3, counted from 0")),
        (Sizes(), {"taps": (0, 3), "style": "speculators"}, ("layer 3", "3, counted from 0")),
        (Sizes(), {"mask": VOCAB}, ("mask_token_id is 256", "256 tokens")),
    ],
)
def test_pairing(
    tmp_path: Path, target: ModelConfig, sizes: Sizes, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    tiny_draft(tmp_path, sizes, **options)
    refused(tmp_path, target, str(tmp_path / "config.json"), *words)


def test_pairing_of_a_config_made_by_hand(tmp_path: Path, target: ModelConfig) -> None:
    draft = tiny_draft(tmp_path, target)
    check_pairing(draft, target, tmp_path)
    for changed in (replace(draft, tap_layers=(-1,)), replace(draft, mask_token_id=-1)):
        assert "-1" in refusal(lambda changed=changed: check_pairing(changed, target, tmp_path))  # type: ignore[misc]


Q = "layers.1.self_attn.q_proj"
TENSORS: list[tuple[bool, Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = [
    (True, lambda t: t.pop(f"{Q}.bias"), ("lacks", f"'{Q}.bias'", "attention_bias")),
    (True, lambda t: t.pop("layers.0.self_attn.o_proj.bias"), ("lacks", "'layers.0.self_attn.o_proj.bias'")),
    (False, lambda t: t.update({f"{Q}.bias": torch.zeros(96)}), (f"'{Q}.bias'", "not part of", "no attention_bias")),
    (
        False,
        lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.zeros(160, 64)}),
        ("'layers.2.mlp.up", "2 layers"),
    ),
    (False, lambda t: t.update({"mask_embedding": torch.zeros(64)}), ("'mask_embedding'", "not part of")),
    (False, lambda t: t.update({"fc.bias": torch.zeros(64)}), ("'fc.bias'", "not part of")),
    (
        False,
        lambda t: t.update({"fc.weight": torch.zeros(64, 128)}),
        ("'fc.weight'", "[64, 128]", "[64, 192]", "3 tapped"),
    ),
    (False, lambda t: t.update({"fc.weight": torch.zeros(192, 64)}), ("'fc.weight'", "[192, 64]", "[64, 192]")),
    (False, lambda t: t.update({"norm.weight": torch.ones(64).int()}), ("'norm.weight'", "I32", "it must be bfloat16")),
    (False, lambda t: t.update({f"{Q}.weight": torch.zeros(96, 64).char()}), (f"'{Q}.weight'", "I8", "it must be")),
    (False, lambda t: t.update({"model.norm.weight": torch.ones(64)}), ("'norm.weight'", "with and without 'model.'")),
    (False, lambda t: t.update({"x\ny": torch.ones(64)}), (r"'x\ny'", "not part of")),
    (False, lambda t: t.pop("hidden_norm.weight"), ("lacks", "'hidden_norm.weight'")),
]


@pytest.mark.parametrize(("bias", "edit", "words"), TENSORS, ids=range(len(TENSORS)))
def test_tensors(
    tmp_path: Path, target: ModelConfig, bias: bool, edit: Callable[[dict[str, Tensor]], Any], words: tuple[str, ...]
) -> None:
    tiny_draft(tmp_path, target, bias=bias)
    edit_tensors(tmp_path, edit)
    refused(tmp_path, target, str(tmp_path), *words)


def test_no_weight_is_read_before_all_are_checked(
    tmp_path: Path, target: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_draft(tmp_path, target)
    monkeypatch.setattr("outrider.checkpoint.shards.Shards.tensor", lambda self, name: pytest.fail(name))
    open_draft(tmp_path, target)
    edit_tensors(tmp_path, lambda t: t.update({"rotary_emb.inv_freq": torch.ones(8)}))
    open_draft(tmp_path, target)  # what old exporters leave behind
    with safe_open(str(tmp_path / SINGLE), framework="pt") as file:
        assert "rotary_emb.inv_freq" in file.keys()  # noqa: SIM118


def test_missing_files(tmp_path: Path, target: ModelConfig) -> None:
    refused(tmp_path, target, "config.json", "missing")
    tiny_draft(tmp_path, target)
    (tmp_path / SINGLE).unlink()
    refused(tmp_path, target, str(tmp_path), "neither model.safetensors nor")


# --- where drafts are looked for --------------------------------------------------------------------------------------


def test_locate_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_draft("demo", "demo") == DEMO_DRAFT == locate_draft("demo")
    assert locate_draft(str(tmp_path), "some/model") == tmp_path
    assert "'no/such/draft'" in refusal(lambda: locate_draft("no/such/draft", "demo"))
    assert "both as the model and as its draft" in refusal(lambda: locate_draft("some/model", "some/model"))
    tiny_draft(tmp_path)
    asked: list[list[str]] = []

    def snapshot(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert locate_draft("some/draft", "some/model") == tmp_path
    assert ["*.safetensors" in patterns for patterns in asked] == [False, True], "the config first"
    assert not any(pattern.endswith(".py") for patterns in asked for pattern in patterns)
    edit_config(tmp_path, markov_rank=4)
    assert "markov_rank" in refusal(lambda: locate_draft("some/draft", "some/model"))
    assert len(asked) == 3, "no weight is fetched for a draft that cannot be used"


@pytest.mark.parametrize("style", STYLES)
def test_a_draft_where_a_target_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: str) -> None:
    tiny_draft(tmp_path, style=style)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(tmp_path))
    for name in (str(tmp_path), "some/draft"):
        assert "is a draft" in refusal(lambda name=name: locate(name))  # type: ignore[misc]


def test_a_target_where_a_draft_belongs() -> None:
    assert "no DFlash draft" in refusal(lambda: read_draft_config(DEMO))


# --- fuzz: whatever happens to the file, either it opens or CheckpointError says why ----------------------------------


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    for style in STYLES:
        tiny_draft(folder / style, style=style, windows=(8, None), reduced_vocab=100, dflash={"use_swa": True})
    return folder


@FUZZ
@given(
    style=st.sampled_from(STYLES),
    file=st.sampled_from(["config.json", SINGLE]),
    position=SPOT,
    byte=st.integers(0, 255),
    cut=CUT,
)
def test_fuzz_bytes(
    originals: Path, target: ModelConfig, style: str, file: str, position: float, byte: int, cut: float | None
) -> None:
    folder = originals / "fuzz"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", SINGLE):
        content = (originals / style / name).read_bytes()
        (folder / name).write_bytes(damage(content, position, byte, cut) if name == file else content)
    opens_or_is_refused(lambda: open_draft(folder, target))
