"""`train-draft`: a DFlash draft for any target that the engine runs."""

import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.commands.options import Device, Json, Model, Slots
from outrider.config import EngineOptions, parse_slots
from outrider.console import console, errors, print_json, progress_bars
from outrider.errors import ConfigError


def train_draft(
    model: Model,
    data: Annotated[
        list[Path], typer.Option(help="Text: folders, .txt, .md, .jsonl, wheels or zips of Python; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the draft; a rerun goes on with the work that it finds there.")],
    block: Annotated[int, typer.Option(help="Rows of a block, the anchor included.")] = 16,
    layers: Annotated[int, typer.Option(help="Layers of the draft.")] = 5,
    taps: Annotated[str, typer.Option(help="Target layers to read, as 1,2,3; by default evenly spread.")] = "",
    sequences: Annotated[int, typer.Option(help="Texts that the target writes to learn from.")] = 8000,
    shortest: Annotated[int, typer.Option(help="Fewest tokens of their prompts.")] = 32,
    longest: Annotated[int, typer.Option(help="Most tokens of their prompts.")] = 256,
    tokens: Annotated[int, typer.Option(help="Most tokens that it writes behind a prompt.")] = 192,
    samples: Annotated[list[Path] | None, typer.Option(help="Folders of outrider.train.draft_data.")] = None,
    raw_sequences: Annotated[int, typer.Option(help="Pieces of the text as it is, for 80% of the steps.")] = 0,
    raw_tokens: Annotated[int, typer.Option(help="Tokens of such a piece.")] = 384,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 4000,
    batch: Annotated[int, typer.Option(help="Texts in a step.")] = 16,
    anchors: Annotated[int, typer.Option(help="Blocks in a text.")] = 32,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-4,
    gamma: Annotated[float, typer.Option(help="Row k weighs exp(-(k-1)/gamma); 0: 0.45 of the block.")] = 0.0,
    heldout: Annotated[int, typer.Option(help="Held-out prompts that acceptance is measured on.")] = 64,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    seed: Annotated[int, typer.Option(help="Of all choices.")] = 0,
    expert_slots: Slots = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a DFlash draft for MODEL on text that MODEL itself writes; stopped, it goes on when run again."""
    from outrider.train.draft_data import Continuation
    from outrider.train.draft_recipe import Recipe
    from outrider.train.draft_train import train_draft as train

    recipe = Recipe(
        block=block,
        layers=layers,
        taps=_layers(taps),
        continuation=Continuation((shortest, longest), tokens, seed=seed),
        sequences=sequences,
        raw_sequences=raw_sequences,
        raw_tokens=raw_tokens,
        heldout=heldout,
        steps=steps,
        batch=batch,
        anchors=anchors,
        rate=rate,
        gamma=gamma,
        seed=seed,
        save_every=save_every,
    )
    options = EngineOptions(parse_slots(expert_slots) if expert_slots else None, device=device)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with progress_bars("") as progress:
            command = "outrider " + shlex.join(sys.argv[1:])
            found = train(
                model, data, out, recipe, samples=samples or (), options=options, progress=progress, command=command
            )
    except KeyboardInterrupt:
        errors.print(f"stopped; what was done is in {out / 'work'}, and the same command goes on from there")
        raise
    if as_json:
        print_json({"out": str(out), **found.to_dict()})
        return
    shares = " ".join(f"{share:.0%}" for share in found.by_position)
    console.print(
        f"{out}: {found.mean_acceptance_length:.2f} tokens a round on {found.sequences} held-out prompts, the bonus "
        f"token included; by position {shares}"
    )


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"--taps is '{text}'; write target layers as 1,2,3") from error
