"""`train-draft` as a whole: what it writes, what it refuses, and that it can be stopped at any moment."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.checkpoint.locate import DEMO
from outrider.engine.tokenizer import Tokenizer
from outrider.errors import ConfigError
from outrider.train import draft_capture, draft_data, draft_train
from outrider.train.draft_data import Continuation, read_samples
from outrider.train.draft_data import main as write_samples
from outrider.train.draft_loop import (
    Trainer,
)
from outrider.train.draft_recipe import Recipe
from outrider.train.draft_text import read_texts
from outrider.train.draft_train import train_draft
from outrider.train.draft_work import WorkFolder
from outrider.train.optim import Optimizer


def text_folder(path: Path) -> Path:
    """Small modules, some of them held out."""
    path.mkdir()
    for i in range(40):
        body = "\n".join(f"    value_{j} = compute(argument_{i}, {j})" for j in range(8))
        (path / f"module_{i}.py").write_text(f'def function_{i}(argument_{i}):\n    """Number {i}."""\n{body}\n')
    return path


SMALL = Recipe(
    block=4,
    layers=1,
    heads=2,
    kv_heads=1,
    intermediate=64,
    continuation=Continuation(prompt=(4, 12), tokens=12, batch=4),
    sequences=4,
    raw_sequences=2,
    raw_tokens=24,
    heldout=4,
    heldout_tokens=8,
    steps=6,
    batch=2,
    anchors=3,
    save_every=3,
)


def test_train_draft_writes_a_draft_with_its_evidence_and_runs_once_more_for_free(tmp_path: Path) -> None:
    data, out = text_folder(tmp_path / "text"), tmp_path / "out"
    said: list[tuple[str, int, int]] = []
    found = train_draft("demo", [data], out, SMALL, progress=lambda *args: said.append(args), command="the command")
    report = json.loads((out / "acceptance.json").read_text())
    assert report["mean_acceptance_length"] == found.mean_acceptance_length >= 1
    assert report["identical"] == report["sequences"] == 4
    assert len(report["by_position"]) <= 3 and [step for step, _ in report["curve"]] == [3, 6]
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    assert "the command" in (out / "README.md").read_text()
    assert {"regenerating text", "writing held-out text", "training"} <= {what.partition(":")[0] for what, _, _ in said}
    training = json.loads((out / "training.json").read_text())
    assert training["data"] == {"written_sequences": 4, "raw_sequences": 2} | {
        name: training["data"][name] for name in ("written_tokens", "raw_tokens")
    }
    assert training["data"]["raw_tokens"] == 48
    weights = (out / "model.safetensors").read_bytes()
    (out / "work" / "features.bin").unlink()
    again = train_draft("demo", [data], out, SMALL)
    assert again == found and (out / "model.safetensors").read_bytes() == weights
    assert not (out / "work" / "features.bin").exists()
    with pytest.raises(ConfigError, match=r"holds a run with steps 6, now it is 7; name another folder"):
        train_draft("demo", [data], out, replace(SMALL, steps=7))
    (data / "module_1.py").write_text("changed = 1\n" * 9)
    with pytest.raises(ConfigError, match=r"holds a run with text \w{16}, now it is"):
        train_draft("demo", [data], out, SMALL)


def test_held_out_prompts_come_from_held_out_documents(tmp_path: Path) -> None:
    data, out = text_folder(tmp_path / "text"), tmp_path / "out"
    train_draft("demo", [data], out, SMALL)
    tokenizer, held = Tokenizer(DEMO), [text.content for text in read_texts([data]).heldout]
    sequences = read_samples(out / "work" / "heldout")
    parts = np.split(sequences.tokens, sequences.lengths.cumsum()[:-1])
    for part, prompt in zip(parts, sequences.prompts.tolist(), strict=True):
        text = tokenizer.decode(part[:prompt].tolist())
        assert any(text in content for content in held), text


def test_samples_are_trained_on_and_the_card_says_how_they_were_made(tmp_path: Path) -> None:
    data, written = text_folder(tmp_path / "text"), tmp_path / "samples"
    made = ["demo", "--data", str(data), "--out", str(written), "--sequences", "3", "--shortest", "4", "--longest", "9"]
    assert write_samples([*made, "--tokens", "40"]) == 0
    arguments: dict[str, Any] = {"samples": [written], "recipe": replace(SMALL, sequences=0, raw_sequences=0)}
    train_draft("demo", [data], tmp_path / "out", **arguments)
    training = json.loads((tmp_path / "out" / "training.json").read_text())
    assert training["data"]["written_sequences"] == 3
    assert training["data"]["written_tokens"] == int(read_samples(written).lengths.sum())
    assert "--tokens 40" in (tmp_path / "out" / "README.md").read_text()
    train_draft("demo", [data], tmp_path / "both", SMALL, samples=[written])
    assert json.loads((tmp_path / "both" / "training.json").read_text())["data"]["written_sequences"] == 4 + 3
    assert write_samples([*made[:6], "4", *made[7:], "--tokens", "40"]) == 0
    with pytest.raises(ConfigError, match="holds a run with samples"):
        train_draft("demo", [data], tmp_path / "out", **arguments)
    assert write_samples([*made, "--tokens", "41"]) == 2
    run = json.loads((written / "run.json").read_text())
    (written / "run.json").write_text(json.dumps(run | {"target": "another"}))
    with pytest.raises(ConfigError, match="were written by another target than 'demo'"):
        train_draft("demo", [data], tmp_path / "other", **arguments)


def test_a_changed_target_is_another_run(tmp_path: Path) -> None:
    data, target = text_folder(tmp_path / "text"), tmp_path / "target"
    shutil.copytree(DEMO, target)
    train_draft(str(target), [data], tmp_path / "out", SMALL)
    stored = bytearray((target / "model.safetensors").read_bytes())
    stored[-1000] ^= 1
    (target / "model.safetensors").write_bytes(stored)
    with pytest.raises(ConfigError, match="holds a run with target"):
        train_draft(str(target), [data], tmp_path / "out", SMALL)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    data = text_folder(tmp_path / "text")
    with WorkFolder(tmp_path / "out" / "work").locked(), pytest.raises(ConfigError, match="another run is at work in"):
        train_draft("demo", [data], tmp_path / "out", SMALL)
    train_draft("demo", [data], tmp_path / "out", SMALL)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"samples": [Path("nowhere")]}, "nowhere holds no samples"),
        ({"recipe": replace(SMALL, sequences=0)}, "there is no text of the target to train on"),
        ({"recipe": replace(SMALL, taps=(9,))}, "tap 9 is no layer of the target"),
        ({"recipe": replace(SMALL, heldout_tokens=5000)}, "max_context is 50"),
    ],
)
def test_a_refused_run_does_not_claim_the_folder(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    arguments: dict[str, Any] = {"recipe": SMALL} | change
    with pytest.raises(ConfigError, match=sentence):
        train_draft("demo", [text_folder(tmp_path / "text")], tmp_path / "out", **arguments)
    assert not (tmp_path / "out" / "work" / "run.json").exists()


def test_an_out_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="out/work cannot be written: Not a directory"):
        train_draft("demo", [text_folder(tmp_path / "text")], tmp_path / "out", SMALL)


def test_text_without_a_held_out_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("some words\n" * 40)
    with pytest.raises(ConfigError, match=r"none of the 1 documents falls into the 7\.5%"):
        train_draft("demo", [tmp_path / "one.txt"], tmp_path / "out", SMALL)


def test_without_matplotlib_training_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        train_draft("demo", [text_folder(tmp_path / "text")], tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()


class Stop:
    """Sends this process SIGTERM when it has been asked `after` times, as a supervisor would at any moment."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def sigterm_interrupts():  # type: ignore[no-untyped-def]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("inside", "after", "kept"),
    [
        ((Trainer, "advance"), 2, 2),  # between two checkpoints: the step is finished, then saved
        ((Trainer, "advance"), 4, 4),
        ((draft_train, "simulate"), 1, 3),  # measuring
        ((draft_train, "write_draft"), 1, 6),  # exporting
        ((draft_train, "played"), 1, 6),
        ((draft_data, "continuations"), 2, None),  # writing text
        ((draft_capture, "_run"), 2, None),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_a_sigterm_at_any_moment_loses_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sigterm_interrupts: None,
    inside: tuple[Any, str],
    after: int,
    kept: int | None,
) -> None:
    data, out = text_folder(tmp_path / "text"), tmp_path / "out"
    expected = train_draft("demo", [data], tmp_path / "straight", SMALL)
    stop, original = Stop(after), getattr(*inside)

    def interrupted(*args: Any, **keywords: Any) -> Any:
        stop()
        return original(*args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(*inside, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_draft("demo", [data], out, SMALL)
    checkpoint = out / "work" / "checkpoint.pt"
    assert checkpoint.exists() == (kept is not None)
    if kept is not None:
        state = torch.load(checkpoint, weights_only=True)
        assert state["step"] == len(state["losses"]) == kept
    assert train_draft("demo", [data], out, SMALL) == expected
    whole, joined = (torch.load(p / "work" / "checkpoint.pt", weights_only=True) for p in (tmp_path / "straight", out))
    assert joined["losses"] == whole["losses"] and joined["curve"] == whole["curve"]
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "straight" / "model.safetensors").read_bytes()


def test_weights_that_are_half_updated_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, stop = Optimizer.step, iter([False] * 4 + [True])

    def broken(self: Optimizer, rate: float) -> None:
        step(self, rate)
        if next(stop):
            raise KeyboardInterrupt

    data, out = text_folder(tmp_path / "text"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", broken)
        with pytest.raises(KeyboardInterrupt):
            train_draft("demo", [data], out, SMALL)
    assert torch.load(out / "work" / "checkpoint.pt", weights_only=True)["step"] == 3


def test_the_command_answers_sigterm_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = "--block 4 --layers 1 --sequences 4 --shortest 4 --longest 12 --tokens 12 --heldout 2 --batch 2"
    options += " --anchors 4 --steps 400 --save-every 1000 --rate 1e-3 --json"
    command = [sys.executable, "-m", "outrider", "train-draft", "demo", "--data", str(text_folder(tmp_path / "text"))]
    command += ["--out", str(out), *options.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    broken = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (out / "work" / "features.json").exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(1.5)
    broken.send_signal(signal.SIGTERM)
    _, said = broken.communicate(timeout=60)
    assert broken.returncode == 130 and "the same command goes on from there" in " ".join(said.split())
    kept = torch.load(out / "work" / "checkpoint.pt", weights_only=True)
    assert 0 < kept["step"] < 400 and not (out / "model.safetensors").exists()
    resumed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    joined = torch.load(out / "work" / "checkpoint.pt", weights_only=True)
    assert joined["losses"][: kept["step"]] == kept["losses"] and len(joined["losses"]) == 400
    assert json.loads(resumed.stdout)["mean_acceptance_length"] >= 1
