"""`inspect`: exact bytes from headers alone."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from outrider.checkpoint.inspect import Inspection, inspect, render
from outrider.checkpoint.pack import pack
from outrider.checkpoint.shards import Shards
from outrider.errors import CheckpointError
from tiny import edit_config, tiny_gpt_oss, tiny_qwen3_moe


def stored_nbytes(folder: Path, *words: str) -> int:
    """Bytes of all stored tensors whose names hold one of `words`."""
    return sum(
        tensor.nbytes
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if any(word in name for word in words)
    )


def text_of(inspection: Inspection) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(inspection))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensor(self: Shards, name: str) -> Any:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Shards, "tensor", tensor)


def test_gpt_oss(tmp_path: Path, no_reading: None) -> None:
    tiny_gpt_oss(tmp_path, mxfp4=True, layers=3, sharded=True)
    found = inspect(tmp_path)
    assert (found.family, found.format, found.dtypes) == ("gpt_oss", "mxfp4", ("bfloat16",))
    assert (found.layers, found.moe_layers, found.experts, found.experts_per_token) == (3, 3, 8, 2)
    assert (found.context, found.windows, found.sinks) == (4096, {8: 2}, True)
    assert (found.shards, found.vocab_size, found.hidden_size) == (3, 256, 64)
    expert = 192 * 64 * 17 // 32 + 192 * 2 + 64 * 96 * 17 // 32 + 64 * 2
    assert (found.expert_nbytes, found.layer_experts_nbytes, found.experts_nbytes) == (expert, 8 * expert, 24 * expert)
    assert found.experts_nbytes == stored_nbytes(tmp_path, ".experts.")
    assert found.dense_nbytes == {
        "embedding": stored_nbytes(tmp_path, "embed_tokens"),
        "head": stored_nbytes(tmp_path, "lm_head"),
        "attention": stored_nbytes(tmp_path, ".self_attn."),
        "router": stored_nbytes(tmp_path, ".router."),
        "norms": stored_nbytes(tmp_path, "norm.weight"),
        "dense MLP": 0,
    }
    assert found.nbytes == stored_nbytes(tmp_path, "")
    assert found.other_nbytes == 0


def test_qwen3_moe_with_dense_layers_and_a_tied_head(tmp_path: Path, no_reading: None) -> None:
    tiny_qwen3_moe(tmp_path, layers=4, decoder_sparse_step=2, tied=True, dtype="float32")
    found = inspect(tmp_path)
    assert (found.family, found.format, found.dtypes) == ("qwen3_moe", "float32", ("float32",))
    assert (found.layers, found.moe_layers, found.tied_embeddings) == (4, 2, True)
    assert (found.windows, found.sinks) == ({}, False)
    assert found.dense_nbytes["head"] == 0
    assert found.dense_nbytes["router"] == stored_nbytes(tmp_path, "mlp.gate.weight")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert found.dense_nbytes["dense MLP"] == stored_nbytes(tmp_path, *mlp) == 2 * 3 * 64 * 160 * 4
    assert found.dense_nbytes["norms"] == stored_nbytes(tmp_path, "norm")
    assert found.nbytes == stored_nbytes(tmp_path, "")


def test_a_packed_checkpoint_is_mxfp4_and_smaller(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path / "plain", layers=2)
    pack(tmp_path / "plain", tmp_path / "packed")
    plain, packed = inspect(tmp_path / "plain"), inspect(tmp_path / "packed")
    assert (plain.format, packed.format) == ("bfloat16", "mxfp4")
    assert packed.experts_nbytes * 64 == plain.experts_nbytes * 17
    assert packed.dense_nbytes == plain.dense_nbytes


def test_an_unused_head_is_counted_apart(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, layers=1)
    edit_config(tmp_path, tie_word_embeddings=True)
    found = inspect(tmp_path)
    assert found.other_nbytes == 256 * 64 * 2
    assert found.nbytes == stored_nbytes(tmp_path, "")


@pytest.mark.parametrize(
    ("files", "tokenizer", "template"),
    [
        ({}, False, False),
        ({"tokenizer.json": "{}"}, True, False),
        ({"tokenizer.json": "{}", "chat_template.jinja": "x"}, True, True),
        ({"tokenizer_config.json": '{"chat_template": "x"}'}, False, True),
        ({"tokenizer.model": "x", "tokenizer_config.json": '{"chat_template": null}'}, True, False),
    ],
)
def test_tokenizer_and_chat_template(tmp_path: Path, files: dict[str, str], tokenizer: bool, template: bool) -> None:
    tiny_qwen3_moe(tmp_path, layers=1)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = inspect(tmp_path)
    assert (found.tokenizer, found.chat_template) == (tokenizer, template)
    assert len(found.problems) == 2 - tokenizer - template
    assert ("problems       none" in text_of(found)) == (tokenizer and template)


@pytest.mark.parametrize("make", [lambda f: tiny_gpt_oss(f, mxfp4=False), lambda f: tiny_qwen3_moe(f)])
def test_it_reads_well_and_is_json(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path)
    found = inspect(tmp_path)
    text = text_of(found)
    for number in (found.nbytes, found.experts_nbytes, found.expert_nbytes, *found.dense_nbytes.values()):
        assert not number or f"{number:,}" in text
    assert "100.0%" in text and str(found.context) in text
    again = json.loads(json.dumps(found.to_dict()))
    assert again["nbytes"] == found.nbytes and again["windows"] == {str(w): n for w, n in found.windows.items()}


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path, layers=1)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        inspect(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        inspect(tmp_path)
