"""The loop that trains a drafter on captured features.

Contract: the batch of a step, its anchors included, is a pure function of the seed and the step, so what `save` writes
is all that a resumed run needs to continue with the same losses. Loss: cross-entropy of rows 1.. of each block against
the tokens at their own positions (row 0, the anchor, predicts nothing), row k weighted exp(-(k - 1) / gamma), rows
beyond the sequence's end weighted 0.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import DraftConfig
from outrider.errors import ConfigError
from outrider.train.draft_data import Sequences
from outrider.train.draft_model import DraftModel
from outrider.train.draft_recipe import Recipe
from outrider.train.optim import Optimizer, learning_rate

_LOG_EVERY = 20
_DEVICE_SHARE = 0.6  # of the free device memory that features may take before they stay in host memory


@dataclass(frozen=True)
class Frozen:
    """The target's embedding table and head, both [vocab, hidden], and its final norm [hidden], where training is."""

    embedding: Tensor
    head: Tensor
    norm: Tensor


@dataclass(frozen=True)
class TrainingSet:
    """Sequences with their features bfloat16 [tokens, taps * hidden]; the first `raw` of them are not regenerated."""

    sequences: Sequences
    features: Tensor
    raw: int = 0


@dataclass(frozen=True)
class Batch:
    """`features` [B, S, taps * H], `tokens` int64 [B, S] (zeros beyond the end), `lengths` and `anchors` int64."""

    features: Tensor
    tokens: Tensor
    lengths: Tensor
    anchors: Tensor


class Batches:
    """Cuts batches out of a training set, padded to their longest sequence; on CUDA, where shapes are compiled, to the
    longest of all.
    """

    def __init__(self, data: TrainingSet, recipe: Recipe, device: torch.device) -> None:
        self._recipe, self._device, self._raw = recipe, device, data.raw
        self._lengths, self._prompts = data.sequences.lengths, data.sequences.prompts
        self._starts = torch.from_numpy(data.sequences.starts)
        self._longest = int(self._lengths.max())
        self._tokens = torch.from_numpy(data.sequences.tokens)
        self._features = data.features
        if device.type == "cuda" and data.features.nbytes < _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
            self._features = data.features.to(device)
        self._switch = round(recipe.raw_until * recipe.steps) if data.raw and data.raw < len(data.sequences) else 0
        self._order: tuple[tuple[int, int], Tensor] | None = None

    def chosen(self, step: int) -> tuple[Tensor, Tensor]:
        """int64 [B] sequences and [B, A] anchors of a step."""
        size = self._recipe.batch
        first = 0 if step < self._switch or not self._switch else self._raw
        count = len(self._lengths) - first
        place = np.arange(size) + (step if first == 0 else step - self._switch) * size
        which = torch.tensor([int(self._permutation(first, count, int(p) // count)[int(p) % count]) for p in place])
        return which, draw_anchors(
            self._prompts[which.numpy()], self._lengths[which.numpy()], self._recipe.anchors, (self._recipe.seed, step)
        )

    def batch(self, step: int) -> Batch:
        """The batch of a step, on the training device."""
        which, anchors = self.chosen(step)
        lengths = torch.from_numpy(self._lengths)[which]
        at = torch.arange(self._longest if self._device.type == "cuda" else int(lengths.max()))
        inside = at < lengths.unsqueeze(1)
        rows = self._starts[which].unsqueeze(1) + at * inside  # beyond the end: the first token, seen by no block
        tokens = self._tokens[rows].long() * inside
        features = self._features[rows.to(self._features.device)].to(self._device, non_blocking=True)
        return Batch(features, tokens.to(self._device), lengths.to(self._device), anchors.to(self._device))

    def _permutation(self, first: int, count: int, epoch: int) -> Tensor:
        key = (first, epoch)
        if self._order is None or self._order[0] != key:
            generator = torch.Generator().manual_seed((self._recipe.seed * 1_000_003 + epoch) * 2 + (first > 0))
            self._order = key, first + torch.randperm(count, generator=generator)
        return self._order[1]


def draw_anchors(
    prompts: Sequence[int] | np.ndarray[Any, Any], lengths: Any, count: int, seed: tuple[int, ...]
) -> Tensor:
    """int64 [B, count]: positions from the first token behind the prompt to the last but one, spread evenly at random.

    Each of `count` equal strata of that range gives one; a range shorter than `count` gives some positions twice.
    """
    low = np.asarray(prompts, dtype=np.int64)[:, None]
    room = np.maximum(np.asarray(lengths, dtype=np.int64)[:, None] - 1 - low, 1)
    jitter = np.random.default_rng((*seed, 2)).random((len(low), count))
    return torch.from_numpy(low + ((np.arange(count) + jitter) * room / count).astype(np.int64))


def row_weights(block: int, gamma: float) -> Tensor:
    """float32 [block]: 0 for the anchor's row, then exp(-(k - 1) / gamma)."""
    weights = torch.exp(-(torch.arange(block, dtype=torch.float32) - 1) / gamma)
    weights[0] = 0.0
    return weights


def labels_of(batch: Batch, block: int) -> tuple[Tensor, Tensor]:
    """int64 [B, A, block] tokens at the rows' own positions, and bool of the same shape: inside the sequence."""
    positions = batch.anchors.unsqueeze(-1) + torch.arange(block, device=batch.anchors.device)
    inside = positions < batch.lengths[:, None, None]
    flat = positions.clamp(max=batch.tokens.shape[1] - 1).flatten(1)
    return batch.tokens.gather(1, flat).view_as(positions), inside


def block_loss(model: DraftModel, frozen: Frozen, batch: Batch, gamma: float) -> Tensor:
    """Weighted mean cross-entropy in nats."""
    config = model.config
    labels, inside = labels_of(batch, config.block_size)
    weights = (row_weights(config.block_size, gamma).to(labels.device) * inside)[:, :, 1:]
    opening = F.embedding(labels[:, :, 0], frozen.embedding)
    hidden = model(batch.features, batch.anchors, opening, frozen.embedding[config.mask_token_id])
    logits = F.linear(hidden[:, :, 1:], frozen.head.to(hidden.dtype)).flatten(0, 2)
    losses = F.cross_entropy(logits.float(), labels[:, :, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1e-6)


class Trainer:
    """The loop's state: model, optimiser, step and the losses so far."""

    def __init__(self, config: DraftConfig, recipe: Recipe, frozen: Frozen) -> None:
        self.recipe, self.frozen = recipe, frozen
        self.device = device = frozen.embedding.device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = DraftModel(config)
        self.model.initialise(recipe.seed, frozen.norm.cpu())
        self.model.to(device)
        self.optimizer = Optimizer(self.model, recipe.weight_decay)
        self.batches: Batches | None = None
        self.data: dict[str, int] = {}
        self.step = 0
        self.seconds = 0.0
        self.whole = True
        self.losses: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self._fresh: list[Tensor] = []
        self._loss: Callable[[DraftModel, Frozen, Batch, float], Tensor] = block_loss
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            self._loss = torch.compile(block_loss, dynamic=False)

    def feed(self, data: TrainingSet) -> None:
        """Take `data` to train on."""
        self.batches = Batches(data, self.recipe, self.device)
        lengths = data.sequences.lengths
        self.data = {
            "written_sequences": len(lengths) - data.raw,
            "written_tokens": int(lengths[data.raw :].sum()),
            "raw_sequences": data.raw,
            "raw_tokens": int(lengths[: data.raw].sum()),
        }

    def advance(self) -> None:
        """One step; its loss is kept without waiting for it. `whole` is False while weights are being changed."""
        if self.batches is None:
            raise RuntimeError("feed() the trainer before it advances")
        r, began = self.recipe, time.monotonic()
        batch = self.batches.batch(self.step)
        batch = Batch(batch.features.to(self.dtype), batch.tokens, batch.lengths, batch.anchors)
        loss = self._loss(self.model, self.frozen, batch, r.position_gamma)
        loss.backward()
        warmup = max(1, round(r.warmup * r.steps))
        self.whole = False
        self.optimizer.step(learning_rate(self.step, r.steps, r.rate, warmup, r.decay))
        self._fresh.append(loss.detach())
        self.step += 1
        self.whole = True
        if len(self._fresh) >= _LOG_EVERY:
            self.settle()
        self.seconds += time.monotonic() - began

    def settle(self) -> None:
        """Wait for the losses of all steps so far. Raises: ConfigError if one is no number."""
        self.losses += torch.stack(self._fresh).tolist() if self._fresh else []
        self._fresh = []
        if self.losses and not math.isfinite(self.losses[-1]):
            raise ConfigError(
                f"the loss is {self.losses[-1]} at step {len(self.losses)}; begin anew with a lower --rate"
            )

    def save(self, path: Path) -> None:
        """Write the checkpoint, whole or not at all. Raises: ConfigError if it cannot be written."""
        self.settle()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state(),
            "step": self.step,
            "seconds": self.seconds,
            "data": self.data,
            "losses": self.losses,
            "curve": self.curve,
        }
        part = path.with_suffix(".part")
        try:
            torch.save(state, part)
            part.replace(path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter on a full disk
            part.unlink(missing_ok=True)
            raise ConfigError(f"{path} cannot be written ({str(error).splitlines()[0]})") from error

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same recipe. Raises: ConfigError if it is damaged."""
        damaged = f"{path} is damaged; remove it to train again from the first step"
        if not is_zipfile(path):
            raise ConfigError(damaged)
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except (RuntimeError, UnpicklingError) as error:
            raise ConfigError(damaged) from error
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state(state["optimizer"])
        self.step, self.losses = int(state["step"]), list(state["losses"])
        self.seconds, self.data = float(state["seconds"]), dict(state["data"])
        self.curve = [(int(step), float(value)) for step, value in state["curve"]]
