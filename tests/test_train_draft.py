"""Training a drafter: what a block may see, labels and weights, overfitting, resuming, export."""

import json
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
from outrider.config import DraftConfig, EngineOptions, ModelConfig, Yarn
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.train import draft_eval
from outrider.train.draft_capture import capture
from outrider.train.draft_data import Continuation, Sequences, continuations
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
from pairs import ids
from tiny import MAKERS, VOCAB

BLOCK = 8
RECIPE = Recipe(
    block=BLOCK, layers=2, intermediate=96, batch=2, anchors=6, steps=12, save_every=4, mask_token=VOCAB - 1
)


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
