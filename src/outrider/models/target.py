"""The target with its KV pages and expert memory: token ids of several sequences in, residual rows out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.core import ExpertKey, ExpertProvider, Phase
from outrider.kvcache.pages import PageTable
from outrider.kvcache.storage import KVStorage
from outrider.models.batch import Batch, Observer, Span
from outrider.models.decoder import Decoder


@dataclass(frozen=True)
class QueuedTokens:
    """What a queued round gave a sequence.

    Attributes:
        tokens: the new ones, -1 for logits that are not finite (then nothing follows).
        accepted: drafts that stood; None where the drafter's logits were not finite.
        rows: rows that were verified.
    """

    tokens: list[int]
    accepted: int | None
    rows: int

    @property
    def settled(self) -> bool:
        """Whether all logits that counted were finite; if not, the round was not committed."""
        return self.accepted is not None and -1 not in self.tokens


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of queued rounds by the device's clock, in all: drafting, verifying, and from one verify to the next
    draft (acceptance, commit, context), the last round's excepted."""

    draft: float
    verify: float
    accept: float


class RoundQueue(Protocol):
    """Runs greedy rounds one behind the other, without the host between them."""

    most_rounds: int
    most_stops: int

    def decode(
        self,
        tables: Sequence[PageTable],
        anchors: Sequence[int],
        left: Sequence[int],
        stops: Sequence[frozenset[int]],
        rounds: int,
    ) -> list[list[QueuedTokens]]:
        """At most `rounds` rounds, fewer where a sequence ends or gives logits that are not finite.

        Those that are settled are committed, the drafter's context included.

        Args: left: tokens that may still follow. The tables grow, by no more than that: the caller truncates them.

        Returns: [rounds that ran][sequences].
        """

    def routes(self, rows: int) -> list[list[list[int]]]:
        """Expert ids [layers][rows][k] of the last round that ran, which had so many rows."""

    @property
    def times(self) -> RoundTimes | None:
        """Of the last `decode`; None where the device has no clock."""


class TargetModel(Protocol):
    """What runs rows of the target, however its experts are driven."""

    @property
    def expert_nbytes(self) -> Mapping[ExpertKey, int]:
        """Exact stored payload bytes of every expert."""

    @property
    def queue(self) -> RoundQueue | None:
        """Rounds without the host between them, None if it drives each."""

    @property
    def most_sequences(self) -> int | None:
        """Sequences of a step, None if any number will do."""

    @property
    def most_verify_rows(self) -> int | None:
        """Rows of a verify, None if any number will do."""

    def forward(
        self, phase: Phase, tables: Sequence[PageTable], tokens: Sequence[Sequence[int]], observer: Observer
    ) -> tuple[Tensor, Batch]:
        """Open a step and run `tokens[i]` behind what `tables[i]` holds, one forward for all.

        The tables grow by their tokens, also when the forward fails: the caller truncates them, and commits the step.

        Returns: [rows, hidden], what `logits` takes, and the batch that was run.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] of some rows of what `forward` returned."""

    def commit(self, kept_rows: Sequence[int]) -> None:
        """End the step: only `kept_rows` of its batch refresh the cache's recency."""


class Target:
    """Owns nothing of what it is given; `device` is where the decoder lives."""

    def __init__(self, decoder: Decoder, kv: KVStorage, provider: ExpertProvider, device: torch.device) -> None:
        self.decoder, self.kv, self.provider = decoder, kv, provider
        self._device = device

    def forward(
        self, phase: Phase, tables: Sequence[PageTable], tokens: Sequence[Sequence[int]], observer: Observer
    ) -> tuple[Tensor, Batch]:
        """See `TargetModel`; returns the residual stream after the last layer."""
        batch = self._batch(tables, tokens)
        self.provider.begin_step(phase)
        return self.decoder.forward(batch, self.kv, self.provider, observer), batch

    def logits(self, hidden: Tensor) -> Tensor:
        """See `TargetModel`."""
        return self.decoder.logits(hidden)

    def commit(self, kept_rows: Sequence[int]) -> None:
        """See `TargetModel`."""
        self.provider.commit(kept_rows)

    @property
    def expert_nbytes(self) -> Mapping[ExpertKey, int]:
        """Exact stored payload bytes of every expert."""
        return self.provider.expert_nbytes

    @property
    def queue(self) -> RoundQueue | None:
        """There is none: Python runs between the layers."""
        return None

    @property
    def most_sequences(self) -> int | None:
        """Any number."""
        return None

    @property
    def most_verify_rows(self) -> int | None:
        """Any number."""
        return None

    def _batch(self, tables: Sequence[PageTable], tokens: Sequence[Sequence[int]]) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans = []
        for table, own in zip(tables, tokens, strict=True):
            start, stop = table.length, table.length + len(own)
            table.append(len(own))
            ids += own
            positions += range(start, stop)
            slots += table.slots(start, stop)
            spans.append(Span(len(ids) - len(own), len(ids), start, self._tensor(self.kv.padded_pages(table))))
        return Batch(self._tensor(ids), self._tensor(positions), self._tensor(slots), tuple(spans))

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
