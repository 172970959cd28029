"""Train a DFlash drafter: from a target and text to a folder that any reader of z-lab drafts takes.

Contract: `train_draft` lets the target write its own training text, captures its tapped layers, trains, exports, and
lets the engine speculate with the exported draft on held-out prompts. Everything lies in `out/work`, so the same call
goes on where it was stopped, by a signal too; another recipe, target or text in the same folder is refused.
"""

import json
import platform
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoint import locate
from outrider.config import EngineOptions
from outrider.core import Progress, no_progress
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.interrupts import interrupts_deferred
from outrider.engine.tokenizer import Tokenizer
from outrider.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.train.draft_capture import capture
from outrider.train.draft_data import (
    COMMAND,
    Continuation,
    Samples,
    Sequences,
    engine_options,
    read_samples,
    regenerate,
)
from outrider.train.draft_eval import Acceptance, played, simulate
from outrider.train.draft_export import write_draft
from outrider.train.draft_loop import Frozen, Trainer, TrainingSet
from outrider.train.draft_recipe import Recipe, draft_config
from outrider.train.draft_report import check_plotting, write_report
from outrider.train.draft_text import Prompts, Texts, read_texts
from outrider.train.draft_work import WorkFolder, fingerprint

_HELDOUT_SEED, _RAW_SEED = 1_000_003, 2_000_003  # apart from the seeds of training prompts
_CHECKPOINT = "checkpoint.pt"


def train_draft(
    target: str,
    data: Sequence[Path],
    out: Path,
    recipe: Recipe,
    *,
    samples: Sequence[Path] = (),
    options: EngineOptions | None = None,
    progress: Progress = no_progress,
    command: str = "",
) -> Acceptance:
    """Everything from text to the exported, measured draft in `out`; returns its acceptance on held-out prompts.

    Args:
        data: what `read_texts` reads; prompts are drawn from it.
        samples: folders that `draft_data` filled, trained on beside what is regenerated here.
        options: how the target runs (slots, device, dtype); its context and batch are set here.
        command: quoted in the draft's card.

    Raises: ConfigError in one sentence; KeyboardInterrupt after saving, if a signal handler raised it.
    """
    check_plotting()
    options = options or EngineOptions()
    written = [read_samples(folder) for folder in samples]
    if recipe.sequences + sum(map(len, written)) == 0:
        raise ConfigError("sequences is 0 and there are no samples; there is no text of the target to train on")
    texts = read_texts(data)
    if not texts.heldout:
        raise ConfigError(
            f"none of the {len(texts.train)} documents falls into the 7.5% that are held out to measure acceptance; "
            "give more documents"
        )
    work, identity = WorkFolder(out / "work"), _identity(target, texts, samples, written, recipe)
    work.check(identity)
    with work.locked():
        trainer, heldout, positions = _prepare(target, texts, written, work, identity, recipe, options, progress)
        _train(trainer, heldout, work, progress)
        write_draft(trainer.model, out, positions)
        acceptance = _measure(target, out, heldout.sequences, recipe, options, progress)
        write_report(out, _report(target, trainer, texts, samples, command), acceptance)
    return acceptance


def _identity(
    target: str, texts: Texts, samples: Sequence[Path], written: Sequence[Sequences], recipe: Recipe
) -> dict[str, Any]:
    """What the trained weights depend on. Raises: ConfigError if samples were written by another target."""
    model = fingerprint(locate(target))
    for folder in samples:
        writer = WorkFolder(folder).identity().get("target", model)
        if writer != model:
            raise ConfigError(f"the samples in {folder} were written by another target than '{target}'")
    return {"target": model, "text": texts.digest(), "samples": [w.digest() for w in written], **asdict(recipe)}


def _prepare(
    target: str,
    texts: Texts,
    written: Sequence[Sequences],
    work: WorkFolder,
    identity: dict[str, Any],
    recipe: Recipe,
    options: EngineOptions,
    progress: Progress,
) -> tuple[Trainer, TrainingSet, int]:
    """A trainer with all that it needs of the target, held-out text, and the target's longest context."""
    longest = max([recipe.longest, *(int(sequences.lengths.max(initial=0)) for sequences in written)])
    with closing(build_engine(target, engine_options(options, recipe.continuation.batch, longest), progress)) as engine:
        source = _Source(engine, recipe, work.folder, progress)
        decoder = engine.decoder
        assert isinstance(decoder, Decoder)  # engine_options asks for it
        work.claim(identity)
        heldout = source.heldout(texts)
        trainer = Trainer(source.config, recipe, Frozen(decoder.embedding, decoder.head, decoder.norm.weight))
        if (work.folder / _CHECKPOINT).exists():
            trainer.resume(work.folder / _CHECKPOINT)
        if trainer.step < recipe.steps:
            trainer.feed(source.training(texts, written))
        return trainer, heldout, engine.config.max_positions


class _Source:
    """The target's engine as a source of text and features, all of it kept in the work folder."""

    def __init__(self, engine: Engine, recipe: Recipe, folder: Path, progress: Progress) -> None:
        self.engine, self.recipe, self.folder, self.progress = engine, recipe, folder, progress
        self.tokenizer = Tokenizer(engine.checkpoint.folder)
        mask = recipe.mask_token
        if mask is None:
            mask = self.tokenizer.mask_token_id()
        self.config = draft_config(recipe, engine.config, engine.config.vocab_size - 1 if mask is None else mask)

    def heldout(self, texts: Texts) -> TrainingSet:
        """Greedy continuations of held-out prompts."""
        r = self.recipe
        prompts = Prompts(texts.heldout, self.tokenizer, r.continuation.prompt, r.seed + _HELDOUT_SEED)
        written = self._written("heldout", prompts, r.heldout, r.heldout_continuation, "writing held-out text")
        return self._captured(written, "heldout.bin")

    def training(self, texts: Texts, before: Sequence[Sequences]) -> TrainingSet:
        """Text as it is, text that the target writes here, and text that it wrote `before`."""
        r = self.recipe
        prompts = Prompts(texts.train, self.tokenizer, r.continuation.prompt, r.continuation.seed)
        whole = Prompts(texts.train, self.tokenizer, (r.raw_tokens, r.raw_tokens), r.seed + _RAW_SEED)
        raw = [(ids, 1) for ids in map(whole.prompt, range(r.raw_sequences)) if len(ids) > 2]
        parts = [Sequences.of(raw)] if raw else []
        if r.sequences:
            parts.append(self._written("samples", prompts, r.sequences, r.continuation, "regenerating text"))
        joined, vocabulary = Sequences.join([*parts, *before]), self.engine.config.vocab_size
        if joined.tokens.max() >= vocabulary:
            raise ConfigError(f"a sample has token {joined.tokens.max()}, the target {vocabulary}; it is another one's")
        return self._captured(joined, "features.bin", len(raw))

    def _written(self, name: str, prompts: Prompts, count: int, settings: Continuation, what: str) -> Sequences:
        stored = Samples(self.folder / name)
        regenerate(self.engine, prompts, stored, count, settings, self.progress, what)
        return stored.sequences(count)

    def _captured(self, sequences: Sequences, name: str, raw: int = 0) -> TrainingSet:
        features = capture(self.engine, sequences, self.config.tap_layers, self.folder / name, self.progress)
        return TrainingSet(sequences, features, raw)


def _train(trainer: Trainer, heldout: TrainingSet, work: WorkFolder, progress: Progress) -> None:
    """All steps that are left, measuring and saving on the way, and saving when interrupted."""
    r, checkpoint = trainer.recipe, work.folder / _CHECKPOINT
    try:
        while True:
            due = trainer.step and (trainer.step % r.save_every == 0 or trainer.step == r.steps)
            if due and trainer.step not in dict(trainer.curve):
                trainer.save(checkpoint)
                found = simulate(trainer.model, trainer.frozen, heldout)
                trainer.curve.append((trainer.step, found.mean_acceptance_length))
                trainer.save(checkpoint)
            loss = f": loss {trainer.losses[-1]:.3f}" if trainer.losses else ""
            length = f", {trainer.curve[-1][1]:.2f} accepted" if trainer.curve else ""
            progress(f"training{loss}{length}", trainer.step, r.steps)
            if trainer.step == r.steps:
                return
            with interrupts_deferred():
                trainer.advance()
    except KeyboardInterrupt:
        if trainer.whole:
            trainer.save(checkpoint)
        raise


def _measure(
    target: str, draft: Path, heldout: Sequences, recipe: Recipe, options: EngineOptions, progress: Progress
) -> Acceptance:
    """The engine with the exported draft on the held-out prompts."""
    longest, batch = recipe.heldout_continuation.longest, recipe.continuation.batch
    speculating = replace(engine_options(options, batch, longest), draft=str(draft))
    with closing(build_engine(target, speculating, progress)) as engine:
        return played(engine, heldout, recipe.heldout_tokens)


def _report(target: str, trainer: Trainer, texts: Texts, samples: Sequence[Path], command: str) -> dict[str, Any]:
    config = trainer.model.config
    losses, every = trainer.losses, max(1, trainer.recipe.save_every)
    origins = [folder / COMMAND for folder in samples]
    spans = [range(start, min(start + every, len(losses))) for start in range(0, len(losses), every)]
    return {
        "target": target,
        "draft": asdict(config),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "recipe": asdict(trainer.recipe),
        "sources": texts.sources,
        "documents": {"train": len(texts.train), "heldout": len(texts.heldout)},
        "data": trainer.data,
        "loss": [(span.stop, round(sum(losses[i] for i in span) / len(span), 4)) for span in spans],
        "curve": [(step, round(length, 4)) for step, length in trainer.curve],
        "training_seconds": round(trainer.seconds, 1),
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else platform.machine(),
        "dtype": str(trainer.dtype).removeprefix("torch."),
        "torch": str(torch.__version__),
        "commands": [*(json.loads(file.read_text())["command"] for file in origins if file.is_file()), command],
    }
