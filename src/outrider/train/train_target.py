"""Train the demo target: from folders of Python source to a folder that any gpt-oss loader reads.

Contract: `train_target` prepares the corpus, trains, exports, measures the quality gates on what it exported and
writes the model card. The batch of a step depends on the seed and the step alone; a run that is stopped continues from
its last checkpoint in `out/work`. Progress goes to stderr.

    python -m outrider.train.train_target --data STDLIB WHEEL... --out FOLDER --minutes 8
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ConfigError, OutriderError
from outrider.train.export import start_from, write_target
from outrider.train.gates import finish, training_report
from outrider.train.optim import Optimizer, learning_rate
from outrider.train.prepare import Prepared, prepare
from outrider.train.target_model import Routing, TargetConfig, TargetModel
from outrider.train.tokenizer import Vocabulary, save_tokenizer

_CALIBRATION_STEPS = 60  # by then everything is compiled
_SPARE = 0.95  # share of `minutes` that steps may fill
_LOG_EVERY = 50


@dataclass(frozen=True)
class Recipe:
    """How to train. Give `steps`, or `minutes` from which steps are set once the speed is known."""

    steps: int = 0
    minutes: float = 0.0
    batch: int = 64  # windows of `config.context` tokens
    rate: float = 7e-3
    weight_decay: float = 0.1
    balance: float = 5e-3  # weight of the load-balancing loss
    floor: float = 0.45  # after training, experts are raised to this part of a uniform share of the probe
    quantize_from: float = 0.7  # share of the steps before MXFP4 rounding sets in
    seed: int = 0
    checkpoint_minutes: float = 2.0
    max_tokens: int = 0  # use only this many tokens of the stream (0: all)
    config: TargetConfig = field(default_factory=TargetConfig)


class Batches:
    """Windows of the token stream in a new random order each epoch; `batch(step)` is a pure function."""

    def __init__(self, tokens: Tensor, context: int, size: int, seed: int) -> None:
        """`tokens` int16 [N] holding uint16 bits, on the training device."""
        self.tokens, self.context, self.size, self.seed = tokens, context, size, seed
        self.per_epoch = (tokens.numel() - 1 - context) // context // size
        if self.per_epoch < 1:
            raise ConfigError(f"{tokens.numel()} training tokens do not fill one batch of {size} x {context}")
        self._epoch = -1

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets int64 [size, context]."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            shift = torch.randint(self.context, (1,), generator=generator)
            order = torch.randperm(self.per_epoch * self.size, generator=generator)
            self._starts = (order * self.context + shift).to(self.tokens.device)
            self._epoch = epoch
        starts = self._starts[index * self.size : (index + 1) * self.size]
        place = starts[:, None] + torch.arange(self.context + 1, device=starts.device)
        rows = self.tokens[place].long() & 0xFFFF
        return rows[:, :-1], rows[:, 1:]


def language_loss(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """Mean nats a token; `hidden` [B, S, H], `table` [V, H], `targets` int64 [B, S]."""
    logits = F.linear(hidden, table.to(hidden.dtype)).flatten(0, 1)
    return F.cross_entropy(logits.float(), targets.flatten())


def balance_loss(routings: Sequence[Routing]) -> Tensor:
    """Switch Transformer's auxiliary loss, mean over layers: 1 where all experts are chosen equally."""
    losses = []
    for routing in routings:
        experts = routing.logits.shape[1]
        hits = (routing.chosen.unsqueeze(-1) == torch.arange(experts, device=routing.chosen.device)).sum((0, 1))
        share = hits.float() / routing.chosen.numel()
        losses.append(experts * (share * routing.logits.softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()


class Trainer:
    """The loop's state: model, optimiser, step and, once known, the number of steps."""

    def __init__(self, recipe: Recipe, ready: Prepared, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        tokens = torch.from_numpy(ready.tokens[: recipe.max_tokens or None].view("int16"))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = TargetModel(recipe.config, dtype)
        self.model.initialise(recipe.seed)
        self.model.to(device)
        self.optimizer = Optimizer(self.model, recipe.weight_decay)
        self.batches = Batches(tokens.to(device), recipe.config.context, recipe.batch, recipe.seed)
        self.step = 0
        self.steps = recipe.steps
        self.seconds = 0.0
        self._loss: Callable[[Tensor, Tensor, Tensor], Tensor] = language_loss
        self._balance: Callable[[Sequence[Routing]], Tensor] = balance_loss
        self.history: list[tuple[int, float]] = []
        if device.type == "cuda":
            self._compile()

    def _compile(self) -> None:
        torch.set_float32_matmul_precision("high")
        self.model.compile_blocks()
        self._loss = torch.compile(language_loss, dynamic=False)
        self._balance = torch.compile(balance_loss, dynamic=False)

    def quantized(self) -> bool:
        return self.steps > 0 and self.step >= self.recipe.quantize_from * self.steps

    def advance(self) -> tuple[Tensor, Tensor]:
        """One step; returns the losses (language, balance) without waiting for them."""
        inputs, targets = self.batches.batch(self.step)
        hidden, routings = self.model(inputs, quantized=self.quantized())
        loss = self._loss(hidden, self.model.embed_tokens.weight, targets)
        balance = self._balance(routings)
        (loss + self.recipe.balance * balance).backward()
        total = self.steps or 10**9
        rate = learning_rate(self.step, total, self.recipe.rate)
        self.optimizer.step(rate)
        self.step += 1
        return loss.detach(), balance.detach()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state(),
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(self.state(), part)
        part.replace(path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state(state["optimizer"])
        self.step, self.steps, self.seconds = int(state["step"]), int(state["steps"]), float(state["seconds"])

    def run(self, stop_after: int | None = None, on_checkpoint: Callable[[], None] = lambda: None) -> None:
        """Train to the end, or until `stop_after` steps in total; calls back at each checkpoint interval."""
        began = saved = time.monotonic() - self.seconds
        saved = time.monotonic()
        marks = [(self.step, time.monotonic())]
        while not self.steps or self.step < min(self.steps, stop_after or self.steps):
            loss, balance = self.advance()
            if self.step == _CALIBRATION_STEPS // 2 or self.step % _LOG_EVERY == 0 or self.step == self.steps:
                self._report(float(loss), float(balance), marks)
            self.seconds = time.monotonic() - began
            if not self.steps and self.step == _CALIBRATION_STEPS:
                self._calibrate(marks)
            if time.monotonic() - saved > 60 * self.recipe.checkpoint_minutes:
                on_checkpoint()
                saved = time.monotonic()

    def _report(self, loss: float, balance: float, marks: list[tuple[int, float]]) -> None:
        marks.append((self.step, time.monotonic()))
        (before, since), (now, at) = marks[-2:]
        speed = (now - before) * self.recipe.batch * self.recipe.config.context / max(at - since, 1e-9)
        self.history.append((self.step, round(loss, 4)))
        phase = " mxfp4" if self.quantized() else ""
        print(
            f"step {self.step}/{self.steps or '?'} loss {loss:.4f} balance {balance:.3f} "
            f"{speed / 1e6:.3f} Mtok/s {self.seconds:.0f}s{phase}",
            file=sys.stderr,
            flush=True,
        )

    def _calibrate(self, marks: list[tuple[int, float]]) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        step, at = marks[-1]
        each = (time.monotonic() - at) / (self.step - step)
        left = 60 * self.recipe.minutes * _SPARE - self.seconds
        self.steps = self.step + max(1, int(left / each))


def train_target(
    data: Sequence[Path],
    out: Path,
    recipe: Recipe,
    *,
    device: str = "auto",
    prepared: Path | None = None,
    work: Path | None = None,
    start: Path | None = None,
    primary: tuple[str, str] = ("Python standard library", "PSF-2.0"),
    command: str = "",
) -> None:
    """Everything from source folders to the exported, measured model in `out`.

    Args: `prepared` is a folder that an earlier `prepare` filled (then `data` is not read); `work` holds the
    checkpoint; `start` is an exported model to begin from; `primary` names `data[0]` and its licence for the card, and
    `command` is quoted there.
    """
    if (recipe.steps > 0) == (recipe.minutes > 0):
        raise ConfigError("give either a number of steps or a number of minutes to train for")
    where = _device(device)
    ready = Prepared.load(prepared) if prepared else prepare(data, recipe.seed, primary=primary, command=command)
    words = Vocabulary(ready.tokenizer)
    trainer = Trainer(recipe, ready, where)
    checkpoint = (work or out / "work") / "checkpoint.pt"
    if checkpoint.exists():
        trainer.resume(checkpoint)
    elif start:
        start_from(trainer.model, start, ready.tokenizer)

    def save() -> None:
        trainer.save(checkpoint)
        write_target(trainer.model, out, words.end_of_text, [words.end_of_text, words.end])

    save_tokenizer(ready.tokenizer, out, recipe.config.context)
    trainer.run(on_checkpoint=save)
    save()
    report = training_report(trainer, ready, start)
    finish(out, ready, report, floor=recipe.floor, device=where, command=command)


def finish_again(folder: Path, prepared: Path, floor: float, device: str, notes: Sequence[str]) -> None:
    """Wake, measure and describe a trained folder anew; `notes` are sentences for its card."""
    report = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    report["notes"] = [*report.get("notes", []), *notes]
    ready, where = Prepared.load(prepared), _device(device)
    save_tokenizer(ready.tokenizer, folder, report["recipe"]["config"]["context"])
    finish(folder, ready, report, floor=floor, device=where, command=report["command"])


def _device(name: str) -> torch.device:
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    recipe = Recipe(
        steps=args.steps,
        minutes=args.minutes,
        batch=args.batch,
        rate=args.rate,
        balance=args.balance,
        floor=args.floor,
        seed=args.seed,
        quantize_from=args.quantize_from,
        checkpoint_minutes=args.checkpoint_minutes,
        max_tokens=args.max_tokens,
        config=TargetConfig(context=args.context),
    )
    command = "python -m outrider.train.train_target " + shlex.join(arguments or sys.argv[1:])
    primary = (args.primary_name, args.primary_licence)
    try:
        if args.prepare_only:
            prepare(args.data, args.seed, primary=primary, command=command).save(args.out, args.context)
            return 0
        if args.finish_only:
            if not args.prepared:
                raise ConfigError("--finish-only needs the --prepared folder that the model was trained from")
            finish_again(args.out, args.prepared, recipe.floor, args.device, args.note)
            return 0
        train_target(
            args.data,
            args.out,
            recipe,
            device=args.device,
            prepared=args.prepared,
            work=args.work,
            start=args.start_from,
            primary=primary,
            command=command,
        )
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m outrider.train.train_target", description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], help="standard library folder, then wheels, zips, folders")
    add("--out", type=Path, required=True, help="folder for the model, its card and the checkpoint to resume from")
    add("--steps", type=int, default=0, help="optimiser steps (or give --minutes)")
    add("--minutes", type=float, default=0.0, help="wall clock to fill with steps, compilation included")
    add("--batch", type=int, default=Recipe.batch, help="windows a step")
    add("--context", type=int, default=TargetConfig.context, help="tokens a window")
    add("--rate", type=float, default=Recipe.rate, help="peak learning rate")
    add("--balance", type=float, default=Recipe.balance, help="weight of the load-balancing loss")
    add("--quantize-from", type=float, default=Recipe.quantize_from, help="share of steps before MXFP4 rounding")
    add("--max-tokens", type=int, default=0, help="use only the first tokens of the stream")
    add("--start-from", type=Path, help="begin with the weights of this exported model")
    add("--seed", type=int, default=0)
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--checkpoint-minutes", type=float, default=Recipe.checkpoint_minutes)
    add("--work", type=Path, help="where the checkpoint lies (default: OUT/work)")
    add("--prepared", type=Path, help="folder of a --prepare-only run, instead of --data")
    add("--prepare-only", action="store_true", help="write tokenizer and tokens to --out and stop")
    add("--finish-only", action="store_true", help="raise starved experts, measure and describe the model in --out")
    add("--floor", type=float, default=Recipe.floor, help="least part of a uniform share an expert gets on the probe")
    add("--note", action="append", default=[], help="with --finish-only: a sentence for the card")
    add("--primary-name", default="Python standard library", help="how the card names the first --data folder")
    add("--primary-licence", default="PSF-2.0")
    return parser


if __name__ == "__main__":
    sys.exit(main())
