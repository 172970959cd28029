"""First come, first served: a waiting prompt is prefilled chunk by chunk, then joins the decoding batch.

Contract: a request starts only when pages for its whole length (prompt + max_tokens) are free, so that nothing that
runs can run out. Prompt chunks end at multiples of `prefill_chunk`, whatever else is running.
"""

from collections import deque
from dataclasses import dataclass

from outrider.core import Phase
from outrider.kvcache.pages import PagePool, pages_for
from outrider.scheduler.sequence import Sequence


@dataclass(frozen=True)
class Plan:
    """One step: for each sequence, the tokens to run start at `table.length` and are `counts` many."""

    phase: Phase
    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class StepResult:
    """What a step produced: for each sequence of the plan its next token, None while its prompt is unfinished."""

    plan: Plan
    tokens: tuple[int | None, ...]


class Scheduler:
    """Decides the next step. `max_batch` bounds the sequences that run at once."""

    def __init__(self, pool: PagePool, max_batch: int, prefill_chunk: int) -> None:
        self._pool = pool
        self._max_batch = max_batch
        self._chunk = prefill_chunk
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a request behind those already there."""
        self._waiting.append(sequence)

    def schedule(self) -> Plan | None:
        """The next step, None if there is no work."""
        self._admit()
        for sequence in self._running:
            if not sequence.prefilled:
                start = sequence.table.length
                stop = min((start // self._chunk + 1) * self._chunk, len(sequence.prompt))
                return Plan(Phase.PREFILL, (sequence,), (stop - start,))
        if not self._running:
            return None
        return Plan(Phase.DECODE, tuple(self._running), (1,) * len(self._running))

    def update(self, result: StepResult) -> None:
        """Hand out the new tokens, retire the sequences that they end and free their pages."""
        for sequence, token in zip(result.plan.sequences, result.tokens, strict=True):
            if token is not None:
                sequence.append(token)
            if sequence.finished:
                self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not, and free its pages."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        sequence.table.release()

    def _admit(self) -> None:
        reserved = sum(_pages_of(s) - len(s.table.pages) for s in self._running)
        while self._waiting and len(self._running) < self._max_batch:
            needed = _pages_of(self._waiting[0])
            if needed + reserved > self._pool.num_free:
                return
            reserved += needed
            self._running.append(self._waiting.popleft())


def _pages_of(sequence: Sequence) -> int:
    # The last token is only emitted, never fed back.
    return pages_for(len(sequence.prompt) + sequence.params.max_tokens - 1)
