"""`pack`: only experts change, transformers reads the same weights back, and a failure leaves nothing behind."""

import errno
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from outrider.checkpoint import open_checkpoint, writer
from outrider.checkpoint.pack import pack, packed_nbytes, render
from outrider.checkpoint.shards import INDEX, SINGLE
from outrider.errors import CheckpointError
from outrider.kernels import mxfp4
from tiny import edit_config, load_with_transformers, prompt, tiny_gpt_oss, tiny_qwen3_moe

EXTRAS = {
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}\n",
    "README.md": b"\xff not text",
}
MAKERS: dict[str, Callable[[Path], Any]] = {
    "gpt_oss-bfloat16": lambda folder: tiny_gpt_oss(folder, mxfp4=False, layers=2),
    "gpt_oss-float32-tied-sharded": lambda folder: tiny_gpt_oss(
        folder, mxfp4=False, layers=2, dtype="float32", tied=True, sharded=True
    ),
    "qwen3_moe-bfloat16": lambda folder: tiny_qwen3_moe(folder, layers=2),
    "qwen3_moe-float16-dense-layer": lambda folder: tiny_qwen3_moe(
        folder, layers=3, dtype="float16", mlp_only_layers=(1,)
    ),
}


class Packed(NamedTuple):
    model: Any
    source: Path
    out: Path
    report: Any
    progress: list[tuple[str, int, int]]


@pytest.fixture(scope="module", params=MAKERS)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    folder = tmp_path_factory.mktemp("pack")
    source, out = folder / "source", folder / "out"
    model = MAKERS[request.param](source)
    for name, content in EXTRAS.items():
        (source / name).write_bytes(content)
    (source / "other.bin").write_bytes(b"weights of another format")
    (source / "original").mkdir()
    progress: list[tuple[str, int, int]] = []
    report = pack(source, out, lambda *call: progress.append(call), shard_nbytes=60_000)
    return Packed(model, source, out, report, progress)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_gpt_oss(tmp_path / "source", mxfp4=False, layers=1)
    return tmp_path / "source"


def leaves_nothing(source: Path, action: Callable[[], Any], *words: str) -> None:
    """`action` is refused with `words`, and the folder beside `source` is as it was."""
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        action()
    text = str(caught.value)
    assert text.isprintable() and not text.endswith(".")
    for word in words:
        assert word in text
    assert sorted(source.parent.rglob("*")) == before


# --- what is written --------------------------------------------------------------------------------------------------


def test_it_opens_and_every_expert_is_the_packed_one(packed: Packed) -> None:
    before, after = open_checkpoint(packed.source), open_checkpoint(packed.out)
    assert after.config.mxfp4_experts and not before.config.mxfp4_experts
    transposed = before.config.family == "gpt_oss"
    for key in before.expert_keys():
        for part in before.parts:
            stored = before.expert_part(key, part.name)
            if len(part.shape) == 1:
                assert torch.equal(after.expert_part(key, part.name), stored)
                continue
            blocks, scales = mxfp4.pack(stored.T.contiguous() if transposed else stored)
            assert torch.equal(after.expert_part(key, f"{part.name}_blocks"), blocks)
            assert torch.equal(after.expert_part(key, f"{part.name}_scales"), scales)


def test_everything_else_is_bit_for_bit_the_same(packed: Packed) -> None:
    before, after = open_checkpoint(packed.source).shards, open_checkpoint(packed.out).shards
    kept = before.names & after.names
    assert {name for name in before.names - kept if "mlp.experts" not in name} == set()
    for name in kept:
        old, new = before.tensor(name), after.tensor(name)
        assert new.dtype == old.dtype and torch.equal(new.view(torch.uint8), old.view(torch.uint8))
    files = {path.name: path.read_bytes() for path in packed.out.iterdir()}
    for name, content in EXTRAS.items():
        assert files.pop(name) == content
    assert files.pop("generation_config.json") == (packed.source / "generation_config.json").read_bytes()
    config = json.loads(files.pop("config.json"))
    assert config.pop("quantization_config") == {"quant_method": "mxfp4"}
    assert config == json.loads((packed.source / "config.json").read_text())
    assert all(name == INDEX or name.endswith(".safetensors") for name in files)
    assert set(packed.report.copied_files) == {*EXTRAS, "generation_config.json"}


def test_shards_keep_their_limit_and_the_index_names_all(packed: Packed) -> None:
    index = json.loads((packed.out / INDEX).read_text())
    files = sorted(packed.out.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    for path in files:
        tensors = load_file(path)
        assert {name for name, file in index["weight_map"].items() if file == path.name} == tensors.keys()
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 60_000
    assert index["metadata"]["total_size"] == packed.report.nbytes_after


def test_the_report_is_true(packed: Packed) -> None:
    before, after = open_checkpoint(packed.source).shards, open_checkpoint(packed.out).shards
    report = packed.report
    difference, norm = 0.0, 0.0
    assert report.tensors
    for row in report.tensors:
        old = before.tensor(row.name).float()
        new = mxfp4.unpack(after.tensor(f"{row.name}_blocks"), after.tensor(f"{row.name}_scales"))
        new = new if old.dim() == 2 else new.mT
        assert row.relative_error == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-4)
        assert row.max_error == pytest.approx(float((new - old).abs().max()), rel=1e-6)
        assert row.nbytes_before == before.tensor(row.name).nbytes
        assert row.nbytes_after == old.numel() * 17 // 32 == packed_nbytes(tuple(old.shape))
        difference, norm = difference + float((new - old).square().sum()), norm + float(old.square().sum())
    assert 0.08 < report.relative_error < 0.14
    assert report.relative_error == pytest.approx((difference / norm) ** 0.5, rel=1e-4)
    assert report.max_error == max(row.max_error for row in report.tensors)
    assert report.nbytes_before == sum(before.tensor(name).nbytes for name in before.names)
    assert report.nbytes_after == sum(after.tensor(name).nbytes for name in after.names)
    assert report.expert_nbytes_after == sum(row.nbytes_after for row in report.tensors)
    assert report.experts == len(list(open_checkpoint(packed.source).expert_keys()))
    assert json.loads(json.dumps(report.to_dict()))["tensors"][0]["name"] == report.tensors[0].name


def test_progress_counts_bytes_up_to_the_total(packed: Packed) -> None:
    done = [done for _, done, _ in packed.progress]
    assert done == sorted(done)
    assert {(what, total) for what, _, total in packed.progress} == {("packing", packed.report.nbytes_after)}
    assert done[-1] == packed.report.nbytes_after


def test_the_report_reads_well(packed: Packed) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(packed.report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "down_proj" in text and "relative error" in text and "%" in text and "tokenizer.json" in text


def test_transformers_reads_the_same_expert_weights(tmp_path: Path) -> None:
    model = tiny_gpt_oss(tmp_path / "source", mxfp4=False, layers=2)
    pack(tmp_path / "source", tmp_path / "out")
    theirs, ours = load_with_transformers(tmp_path / "out"), open_checkpoint(tmp_path / "out")
    for key in ours.expert_keys():
        experts = theirs.model.layers[key.layer].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (ours.expert_part(key, f"{name}_{part}") for part in ("blocks", "scales"))
            assert torch.equal(getattr(experts, name)[key.expert], mxfp4.unpack(blocks, scales).T)
    with torch.no_grad():
        packed_logits, logits = theirs(prompt()).logits, model(prompt()).logits
    assert 0 < float((packed_logits - logits).norm() / logits.norm()) < 0.5


# --- what is refused --------------------------------------------------------------------------------------------------


def test_packed_already(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_gpt_oss(source, mxfp4=True, layers=1)
    leaves_nothing(source, lambda: pack(source, tmp_path / "out"), str(source), "MXFP4 already")


@pytest.mark.parametrize(
    ("maker", "fields", "word"),
    [
        (tiny_gpt_oss, {"mxfp4": False, "intermediate_size": 80}, "inner size is 80"),
        (tiny_gpt_oss, {"mxfp4": False, "hidden_size": 48}, "hidden size is 48"),
        (tiny_qwen3_moe, {"moe_intermediate_size": 40}, "inner size is 40"),
    ],
)
def test_sizes_that_are_no_multiple_of_32(
    tmp_path: Path, maker: Callable[..., Any], fields: dict[str, Any], word: str
) -> None:
    source = tmp_path / "source"
    maker(source, layers=1, **fields)
    leaves_nothing(source, lambda: pack(source, tmp_path / "out"), "config.json", word, "multiple of 32")


def test_weights_that_are_not_finite(source: Path) -> None:
    tensors = load_file(source / SINGLE)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name][3, 4, 5] = float("nan")
    save_file(tensors, source / SINGLE)
    leaves_nothing(source, lambda: pack(source, source.parent / "out"), SINGLE, f"'{name}'", "NaN")


def test_a_damaged_source(source: Path) -> None:
    edit_config(source, num_local_experts=9)
    leaves_nothing(source, lambda: pack(source, source.parent / "out"), "shape")


def test_an_occupied_out(source: Path) -> None:
    for out in (source, source / "config.json"):
        leaves_nothing(source, lambda out=out: pack(source, out), str(out), "already exists")  # type: ignore[misc]
    leaves_nothing(source, lambda: pack(source, source.parent / "no" / "out"), "is not a folder")
    (source.parent / "empty").mkdir()
    pack(source, source.parent / "empty")
    assert open_checkpoint(source.parent / "empty").config.mxfp4_experts


# --- failures on the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("after", [0, 2])
def test_the_disk_fills_up(source: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, after: int) -> None:
    saved = []

    def save(tensors: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"half a file")
        saved.append(path)
        if len(saved) > after:
            raise failure

    monkeypatch.setattr(writer, "save_file", save)
    out = source.parent / "out"
    leaves_nothing(source, lambda: pack(source, out, shard_nbytes=20_000), "disk filled up", str(out), "KB", "are free")
    assert len(saved) == after + 1


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    monkeypatch.setattr(writer, "save_file", None)
    leaves_nothing(source, lambda: pack(source, source.parent / "out"), "needs", "1.00 KB are free")


def test_any_other_write_error_and_ctrl_c(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = source.parent / "out"
    failures: list[tuple[BaseException, str]] = [(KeyboardInterrupt(), "interrupted")]
    failures += [(PermissionError(errno.EACCES, "Permission denied"), "Permission denied")]
    for failure, word in failures:

        def fail(*args: Any, error: BaseException = failure) -> None:
            raise error

        leaves_nothing(source, lambda fail=fail: pack(source, out, fail), str(out), word)  # type: ignore[misc]
        with monkeypatch.context() as patch:
            patch.setattr(writer, "save_file", lambda *args, fail=fail, **options: fail())
            leaves_nothing(source, lambda: pack(source, out), str(out), word, "nothing of it was kept")


def test_a_bug_passes_through_and_leaves_nothing(source: Path) -> None:
    before = sorted(source.parent.rglob("*"))

    def progress(what: str, done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pack(source, source.parent / "out", progress)
    assert sorted(source.parent.rglob("*")) == before


def test_a_name_is_added_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice"), writer.CheckpointWriter(tmp_path / "out", 8) as out:
        out.add("a", torch.zeros(1))
        out.add("a", torch.zeros(1))
    assert not list(tmp_path.iterdir())
