"""Training a drafter: what a block may see, labels and weights, overfitting, interruption, export."""

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
from safetensors.torch import load_file
from torch import Tensor

from outrider import SamplingParams
from outrider.checkpoint.draft import open_draft
from outrider.checkpoint.draft_config import read_draft_config
from outrider.checkpoint.hf_config import read_config
from outrider.checkpoint.locate import DEMO
from outrider.config import DraftConfig, EngineOptions, ModelConfig, Yarn
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.tokenizer import Tokenizer
from outrider.errors import ConfigError
from outrider.train import draft_capture, draft_data, draft_eval, draft_train
from outrider.train.draft_capture import capture
from outrider.train.draft_data import Continuation, Sequences, continuations, read_samples
from outrider.train.draft_data import main as write_samples
from outrider.train.draft_eval import matches, played, simulate
from outrider.train.draft_export import write_draft
from outrider.train.draft_loop import (
    Batch,
    Batches,
    Frozen,
    Trainer,
    TrainingSet,
    block_loss,
    draw_anchors,
    labels_of,
    row_weights,
)
from outrider.train.draft_model import DraftModel, block_mask
from outrider.train.draft_recipe import Recipe, default_taps, draft_config
from outrider.train.draft_text import read_texts
from outrider.train.draft_train import train_draft
from outrider.train.draft_work import WorkFolder
from outrider.train.optim import Optimizer
from pairs import ids
from tiny import MAKERS, VOCAB

BLOCK = 8
RECIPE = Recipe(
    block=BLOCK, layers=2, intermediate=96, batch=2, anchors=6, steps=12, save_every=4, mask_token=VOCAB - 1
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    MAKERS["gpt_oss-mxfp4"](path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return build_engine(str(folder), EngineOptions(max_context=256, dtype="float32"))


@pytest.fixture(scope="module")
def written(engine: Engine) -> Sequences:
    """Greedy texts of different lengths behind random prompts."""
    return Sequences.of(
        continuations(
            engine,
            [(ids(i, 9 + i, VOCAB), SamplingParams(BLOCK * (4 + i) + 1, ignore_eos=True)) for i in range(5)],
        )
    )


@pytest.fixture(scope="module")
def data(engine: Engine, written: Sequences, tmp_path_factory: pytest.TempPathFactory) -> TrainingSet:
    config = draft_config(RECIPE, engine.config, VOCAB - 1)
    file = tmp_path_factory.mktemp("features") / "features.bin"
    return TrainingSet(written, capture(engine, written, config.tap_layers, file))


def frozen_of(engine: Engine) -> Frozen:
    decoder = engine.decoder
    return Frozen(decoder.embedding, decoder.head, decoder.norm.weight)


def trainer_of(engine: Engine, data: TrainingSet, recipe: Recipe = RECIPE) -> Trainer:
    trainer = Trainer(draft_config(recipe, engine.config, VOCAB - 1), recipe, frozen_of(engine))
    trainer.feed(data)
    return trainer


# --- what a block sees --------------------------------------------------------------------------------------------


def test_mask_is_the_rule_spelt_out() -> None:
    anchors, length, size = torch.tensor([[4, 9], [1, 6]]), 12, 3
    mask = block_mask(anchors, length, size)[:, 0]
    for sequence, places in enumerate(anchors.tolist()):
        for row in range(len(places) * size):
            for column in range(length + len(places) * size):
                seen = column < places[row // size] if column < length else (column - length) // size == row // size
                assert bool(mask[sequence, row, column]) == seen, (sequence, row, column)


@pytest.fixture(scope="module")
def model(engine: Engine) -> DraftModel:
    return made_of(draft_config(RECIPE, engine.config, VOCAB - 1), engine, 3)


def made_of(config: DraftConfig, engine: Engine, seed: int) -> DraftModel:
    made = DraftModel(config)
    made.initialise(seed, engine.decoder.norm.weight)
    return made


def stored_in(folder: Path) -> DraftModel:
    """What was exported, in float32."""
    model = DraftModel(read_draft_config(folder))
    model.load_state_dict({name: t.float() for name, t in load_file(folder / "model.safetensors").items()})
    return model


def forward(model: DraftModel, features: Tensor, anchors: Tensor, opening: Tensor) -> Tensor:
    with torch.no_grad():
        return model(features, anchors, opening, torch.linspace(-1, 1, model.config.hidden_size))


def test_a_block_sees_nothing_of_its_anchor_or_later_and_nothing_of_other_blocks(model: DraftModel) -> None:
    random = torch.Generator().manual_seed(0)
    width = model.config.hidden_size
    features = torch.randn(1, 20, len(model.config.tap_layers) * width, generator=random)
    anchors, opening = torch.tensor([[7, 12]]), torch.randn(1, 2, width, generator=random)
    rows = forward(model, features, anchors, opening)
    later, earlier = features.clone(), features.clone()
    later[:, 7:] += 1
    earlier[:, 6] += 1
    assert torch.equal(forward(model, later, anchors, opening)[:, 0], rows[:, 0])
    assert not torch.allclose(forward(model, earlier, anchors, opening)[:, 0], rows[:, 0])
    other = opening.clone()
    other[:, 1] += 1
    assert torch.equal(forward(model, features, anchors, other)[:, 0], rows[:, 0])
    assert not torch.allclose(forward(model, features, anchors, other)[:, 1], rows[:, 1])


@pytest.mark.parametrize(
    "fields",
    [{}, {"rope_theta": 1234.0, "yarn": None}, {"yarn": Yarn(8.0, 16, 16.0, 2.0)}, {"attention_bias": True}],
)
def test_the_trained_forward_is_the_drafters(
    engine: Engine, folder: Path, data: TrainingSet, fields: dict[str, Any], tmp_path: Path
) -> None:
    write_draft(made_of(replace(draft_config(RECIPE, engine.config, VOCAB - 1), **fields), engine, 5), tmp_path, 256)
    stored = stored_in(tmp_path)
    start, length = int(data.sequences.starts[1]), int(data.sequences.lengths[1])
    tokens = data.sequences.tokens[start : start + length].tolist()
    with torch.no_grad():
        anchors = torch.tensor([[5, 11, length - 1]])
        opening = engine.decoder.embedding[torch.tensor(tokens)[anchors]]
        features = data.features[start : start + length].float().unsqueeze(0)
        hidden = stored(features, anchors, opening, engine.decoder.embedding[VOCAB - 1])
        expected = (hidden[0, :, 1:] @ engine.decoder.head.T).log_softmax(-1)
    options = EngineOptions(draft=str(tmp_path), dtype="float32", max_context=256)
    speculating = build_engine(str(folder), options)
    for place, anchor in enumerate(anchors[0].tolist()):
        session = speculating.begin_session(tokens[:anchor], SamplingParams(2, ignore_eos=True))
        assert speculating.rounds.drafter is not None
        (logits,) = speculating.rounds.drafter.propose([tokens[anchor]], [session.table])
        found = logits.log_softmax(-1)
        torch.testing.assert_close(found, expected[place], atol=0.1, rtol=0.01)  # captured features are bfloat16
        speculating.cancel(session)


# --- labels, weights, anchors, batches ------------------------------------------------------------------------------


def test_labels_are_the_tokens_at_the_rows_own_positions() -> None:
    tokens = torch.arange(100, 110).unsqueeze(0)
    batch = Batch(torch.zeros(1, 10, 4), tokens, torch.tensor([9]), torch.tensor([[2, 6]]))
    labels, inside = labels_of(batch, 4)
    assert labels[0, 0].tolist() == [102, 103, 104, 105] and inside[0, 0].all()
    assert labels[0, 1, :3].tolist() == [106, 107, 108] and inside[0, 1].tolist() == [True, True, True, False]


def test_row_weights_fall_by_position_and_leave_the_anchor_out() -> None:
    weights = row_weights(4, 2.0)
    assert weights[0] == 0
    torch.testing.assert_close(weights[1:], torch.tensor([1.0, 0.60653, 0.36788]), atol=1e-5, rtol=0)


def test_loss_is_the_weighted_mean_over_rows_inside_the_text(engine: Engine, data: TrainingSet) -> None:
    trainer = trainer_of(engine, data)
    frozen, model = trainer.frozen, trainer.model
    last = int(data.sequences.lengths[0])
    anchors = torch.tensor([[12, last - 3]])
    tokens = torch.from_numpy(data.sequences.tokens[:last]).long().unsqueeze(0)
    features = data.features[:last].float().unsqueeze(0)
    batch = Batch(features, tokens, torch.tensor([last]), anchors)
    total = weight = 0.0
    with torch.no_grad():
        hidden = model(features, anchors, frozen.embedding[tokens[0][anchors]], frozen.embedding[VOCAB - 1])[0]
        for block, anchor in enumerate([12, last - 3]):
            for k in range(1, BLOCK):
                if anchor + k < last:
                    logits = (hidden[block, k] @ frozen.head.T).log_softmax(-1)
                    share = float(np.exp(-(k - 1) / 3.0))
                    total -= share * float(logits[tokens[0, anchor + k]])
                    weight += share
        assert float(block_loss(model, frozen, batch, 3.0)) == pytest.approx(total / weight, rel=1e-5)


def test_anchors_lie_behind_the_prompt_spread_over_the_text() -> None:
    prompts, lengths = np.array([5, 30, 3]), np.array([45, 32, 203])
    anchors = draw_anchors(prompts, lengths, 10, (1, 2))
    assert torch.equal(anchors, draw_anchors(prompts, lengths, 10, (1, 2)))
    assert not torch.equal(anchors, draw_anchors(prompts, lengths, 10, (1, 3)))
    for row, low, high in zip(anchors.tolist(), prompts.tolist(), lengths.tolist(), strict=True):
        assert all(low <= anchor <= high - 2 for anchor in row) and row == sorted(row)
    assert len(set(anchors[0].tolist())) >= 8 and len(set(anchors[1].tolist())) == 1
    assert all(3 + 20 * i - 1 <= anchor <= 3 + 20 * (i + 1) for i, anchor in enumerate(anchors[2].tolist()))


def test_an_epoch_has_every_sequence_once_and_raw_text_leaves_after_its_share(data: TrainingSet) -> None:
    recipe = replace(RECIPE, batch=1, steps=20, raw_until=0.5)
    batches = Batches(replace(data, raw=2), recipe, torch.device("cpu"))
    which = [int(batches.chosen(step)[0]) for step in range(20)]
    assert sorted(which[:5]) == sorted(which[5:10]) == [0, 1, 2, 3, 4] and which[:5] != which[5:10]
    assert sorted(which[10:13]) == sorted(which[13:16]) == [2, 3, 4] and set(which[10:]) == {2, 3, 4}
    batch = batches.batch(11)
    index = which[11]
    start, length = int(data.sequences.starts[index]), int(data.sequences.lengths[index])
    assert batch.tokens[0, :length].tolist() == data.sequences.tokens[start : start + length].tolist()
    assert torch.equal(batch.features[0, :length], data.features[start : start + length])


# --- learning -----------------------------------------------------------------------------------------------------


def test_overfitting_one_text_ends_with_whole_blocks_accepted(
    engine: Engine, folder: Path, tmp_path: Path, written: Sequences
) -> None:
    """The gate for a correct trainer, exporter, drafter and verification: 7.5 tokens of 8 a round, by the engine."""
    one = Sequences.of([(written.tokens[: written.lengths[0]].tolist(), int(written.prompts[0]))])
    assert len(set(one.tokens.tolist())) > 12, "the text is too simple to prove anything"
    recipe = replace(RECIPE, steps=260, anchors=24, batch=1, rate=4e-3, warmup=0.1)
    config = draft_config(recipe, engine.config, VOCAB - 1)
    data = TrainingSet(one, capture(engine, one, config.tap_layers, tmp_path / "features.bin"))
    trainer = trainer_of(engine, data, recipe)
    before = simulate(trainer.model, trainer.frozen, data).mean_acceptance_length
    for _ in range(recipe.steps):
        trainer.advance()
    write_draft(trainer.model, tmp_path / "draft", 256)
    options = EngineOptions(draft=str(tmp_path / "draft"), dtype="float32", max_context=256)
    tokens = int(one.lengths[0] - one.prompts[0])
    found = played(build_engine(str(folder), options), one, tokens)
    assert before < 1.5
    assert found.identical == 1
    assert found.mean_acceptance_length >= 7.5, found
    assert simulate(trainer.model, trainer.frozen, data).mean_acceptance_length >= 7.5


def test_a_step_takes_the_recipes_weights_and_rate(
    engine: Engine, data: TrainingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, steps=10, warmup=0.2, decay=0.5, rate=1.0e-3, gamma=2.0)
    trainer = trainer_of(engine, data, recipe)
    assert trainer.batches is not None
    with torch.no_grad():
        batch = trainer.batches.batch(0)
        batch = replace(batch, features=batch.features.float())
        expected = float(block_loss(trainer.model, trainer.frozen, batch, 2.0))
        other = float(block_loss(trainer.model, trainer.frozen, batch, 3.0))
    rates: list[float] = []
    step = trainer.optimizer.step
    monkeypatch.setattr(trainer.optimizer, "step", lambda rate: (rates.append(rate), step(rate)))
    for _ in range(10):
        trainer.advance()
    trainer.settle()
    assert trainer.losses[0] == pytest.approx(expected, rel=1e-5) and abs(expected - other) > 1e-3
    assert rates == pytest.approx([5e-4, *[1e-3] * 5, 8e-4, 6e-4, 4e-4, 2e-4])
    assert Recipe(block=16).position_gamma == pytest.approx(7.2)


def test_a_loss_that_is_no_number_ends_training(engine: Engine, data: TrainingSet) -> None:
    trainer = trainer_of(engine, data)
    with torch.no_grad():
        trainer.model.fc.weight.fill_(float("nan"))
    trainer.advance()
    with pytest.raises(ConfigError, match="the loss is nan at step 1; begin anew with a lower --rate"):
        trainer.settle()


def test_seeds_give_other_weights(engine: Engine, model: DraftModel) -> None:
    other, same = (made_of(model.config, engine, seed) for seed in (4, 3))
    assert torch.equal(same.fc.weight, model.fc.weight) and not torch.equal(other.fc.weight, model.fc.weight)


def test_simulated_rounds_are_those_that_the_matches_give(
    engine: Engine, data: TrainingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of 37 tokens behind its prompt, block 8: rounds begin while a whole block is left, 29 places."""
    trainer = trainer_of(engine, data)
    matched = [3, 0, 0, 0, 7, *[0] * 7, 2, 0, 0, 5, *[0] * 14]
    monkeypatch.setattr(draft_eval, "matches", lambda *args: matched)
    one = Sequences.of([(data.sequences.tokens[:46].tolist(), 9)])
    found = simulate(trainer.model, trainer.frozen, TrainingSet(one, data.features[:46]))
    rounds = [3, 7, 2, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0]  # from places 0, 4, 12, 15, 21, 22, ... 29
    assert found.rounds == len(range(21, 30)) + 4 == len(rounds)
    assert found.mean_acceptance_length == pytest.approx(1 + sum(rounds) / len(rounds))
    assert found.by_position == pytest.approx([n / 13 for n in (4, 4, 3, 2, 2, 1, 1)])


def test_matches_do_not_depend_on_how_many_anchors_run_together(
    engine: Engine, data: TrainingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(engine, data, replace(RECIPE, steps=60, rate=4e-3))
    for _ in range(60):
        trainer.advance()
    start, length = int(data.sequences.starts[4]), int(data.sequences.lengths[4])
    tokens = torch.from_numpy(data.sequences.tokens[start : start + length]).long()
    arguments = (trainer.model, trainer.frozen, data.features[start : start + length], tokens, 13)
    together = matches(*arguments)
    monkeypatch.setattr(draft_eval, "_ANCHORS", 5)
    assert matches(*arguments) == together and len(together) == length - BLOCK + 1 - 13
    assert len(set(together)) > 2, "too simple to prove anything"


def test_a_resumed_trainer_goes_on_with_the_same_losses(engine: Engine, data: TrainingSet, tmp_path: Path) -> None:
    straight = trainer_of(engine, data)
    for _ in range(12):
        straight.advance()
    straight.settle()
    first = trainer_of(engine, data)
    for _ in range(5):
        first.advance()
    first.save(tmp_path / "checkpoint.pt")
    second = trainer_of(engine, data)
    second.resume(tmp_path / "checkpoint.pt")
    assert second.step == 5
    for _ in range(7):
        second.advance()
    second.settle()
    assert second.losses == straight.losses and len(set(straight.losses)) == 12


def test_an_interrupted_save_keeps_the_checkpoint_before(
    engine: Engine, data: TrainingSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, file = trainer_of(engine, data), tmp_path / "checkpoint.pt"
    trainer.save(file)
    before = file.read_bytes()

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("file write failed\nmore")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ConfigError, match=r"checkpoint.pt cannot be written \(file write failed\)"):
        trainer.save(file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
    for damaged in (b"", before[: len(before) // 2], b"text"):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged; remove it to train again"):
            trainer.resume(file)


# --- export -------------------------------------------------------------------------------------------------------


def test_export_has_the_published_layout_and_passes_the_loader(folder: Path, model: DraftModel, tmp_path: Path) -> None:
    write_draft(model, tmp_path, 256)
    target = read_config(folder)
    draft = open_draft(tmp_path, target)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert draft.config == replace(model.config, dtype="bfloat16")
    assert raw["architectures"] == ["DFlashDraftModel"] and "auto_map" not in raw
    assert raw["block_size"] == BLOCK and raw["num_target_layers"] == target.num_layers
    assert raw["dflash_config"]["target_layer_ids"] == list(model.config.tap_layers)
    for name, parameter in model.state_dict().items():
        assert torch.equal(draft.tensor(name), parameter.to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [(24, 5, (1, 6, 11, 16, 21)), (48, 5, (1, 12, 23, 34, 45)), (36, 5, (1, 9, 17, 25, 33)), (24, 1, (12,))],
)
def test_default_taps_are_the_published_ones(layers: int, count: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers, count) == taps


def test_a_small_target_is_tapped_everywhere_it_can_be() -> None:
    assert default_taps(6, 5) == (1, 2, 3, 4, 5) and default_taps(3, 3) == (0, 1, 2)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"taps": (0, 3)}, "tap 3 is no layer of the target, which has 3, counted from 0"),
        ({"heads": 6, "kv_heads": 4}, "6 attention heads do not divide among 4 key/value heads"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(folder: Path, fields: dict[str, Any], sentence: str) -> None:
    target: ModelConfig = read_config(folder)
    with pytest.raises(ConfigError, match=sentence):
        draft_config(replace(RECIPE, **fields), target, VOCAB - 1)
    with pytest.raises(ConfigError, match="mask token 999 is none of the target's 256"):
        draft_config(RECIPE, target, 999)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"block": 1}, "block is 1; it must be at least 2"),
        ({"block": 200}, "block is 200, which does not fit into held-out texts of 128 tokens"),
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"anchors": 0}, "anchors is 0"),
        ({"save_every": 0}, "save_every is 0"),
        ({"sequences": -1}, "sequences is -1"),
        ({"raw_tokens": -5}, "raw_tokens is -5"),
        ({"seed": -1}, "seed is -1"),
        ({"rate": float("nan")}, "rate is nan; it must be a positive number"),
        ({"rate": 0.0}, "rate is 0.0"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"gamma": -1.0}, "gamma is -1.0"),
        ({"gamma": float("nan")}, "gamma is nan"),
        ({"taps": (1, 1)}, "taps are 1, 1; a layer can be tapped once"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Recipe(**fields)


def test_the_longest_sequence_is_of_any_kind() -> None:
    recipe = Recipe(continuation=Continuation((4, 10), 20), heldout_tokens=30, raw_tokens=50)
    assert recipe.longest == 40
    assert replace(recipe, raw_sequences=1).longest == 50 and replace(recipe, heldout_tokens=17).longest == 30


# --- the whole command ----------------------------------------------------------------------------------------------


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
