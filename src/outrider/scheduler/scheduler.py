"""First come, first served: a waiting prompt is prefilled chunk by chunk, then joins the decoding batch.

Contract: a request starts only when pages for its whole length (prompt + max_tokens) are free, so that nothing that
runs can run out. Prompt chunks end at multiples of `prefill_chunk`, or of `stream_chunk` while more than a
`prefill_chunk` is left, whatever else is running.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.core import Phase
from outrider.kvcache.pages import OutOfPages, PagePool, pages_for
from outrider.scheduler.sequence import Sequence

S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True)
class Plan(Generic[S]):
    """One step: PREFILL runs the next `count` prompt tokens of its one sequence, DECODE a round of all of them."""

    phase: Phase
    sequences: tuple[S, ...]
    count: int = 0


@dataclass(frozen=True)
class StepResult(Generic[S]):
    """What a step produced: for each sequence of the plan its new tokens, none while its prompt is unfinished."""

    plan: Plan[S]
    tokens: tuple[tuple[int, ...], ...]


class Scheduler(Generic[S]):
    """Decides the next step. `max_batch` bounds the sequences that run at once; `stream_chunk` 0: there are none."""

    def __init__(self, pool: PagePool, max_batch: int, prefill_chunk: int, stream_chunk: int = 0) -> None:
        self._pool = pool
        self._max_batch = max_batch
        self._chunk, self._stream_chunk = prefill_chunk, stream_chunk
        self._waiting: deque[S] = deque()
        self._running: list[S] = []
        self._held: list[S] = []

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._waiting or self._running)

    def add(self, sequence: S) -> None:
        """Queue a request behind those already there."""
        self._waiting.append(sequence)

    def hold(self, sequence: S) -> None:
        """Keep pages for a sequence that the caller runs by hand, until `remove`.

        Raises: OutOfPages if its whole length is not free beside what runs already.
        """
        needed, free = _pages_of(sequence), self._pool.num_free - self._reserved()
        if needed > free:
            raise OutOfPages(f"a session of {needed} KV pages was asked for and {max(free, 0)} are free")
        self._held.append(sequence)

    def next_chunk(self, sequence: S) -> int:
        """How many prompt tokens the next prefill step of `sequence` runs."""
        start, end = sequence.table.length, len(sequence.prompt)
        long = self._stream_chunk and end - start > self._chunk
        chunk = self._stream_chunk if long else self._chunk
        return min((start // chunk + 1) * chunk, end) - start

    def schedule(self) -> Plan[S] | None:
        """The next step, None if there is no work."""
        self._admit()
        for sequence in self._running:
            if not sequence.prefilled:
                return Plan(Phase.PREFILL, (sequence,), self.next_chunk(sequence))
        if not self._running:
            return None
        return Plan(Phase.DECODE, tuple(self._running))

    def update(self, result: StepResult[S]) -> None:
        """Retire the sequences that the step ended and free their pages."""
        for sequence in result.plan.sequences:
            if sequence.finished:
                self.remove(sequence)

    def remove(self, sequence: S) -> None:
        """Forget a sequence, finished or not, and free its pages."""
        for place in (self._waiting, self._running, self._held):
            if sequence in place:
                place.remove(sequence)
        sequence.table.release()

    def _admit(self) -> None:
        reserved = self._reserved()
        while self._waiting and len(self._running) < self._max_batch:
            needed = _pages_of(self._waiting[0])
            if needed + reserved > self._pool.num_free:
                return
            reserved += needed
            self._running.append(self._waiting.popleft())

    def _reserved(self) -> int:
        """Free pages that are spoken for."""
        return sum(_pages_of(s) - len(s.table.pages) for s in (*self._running, *self._held))


def _pages_of(sequence: S) -> int:
    # The last token is only emitted, never fed back.
    return pages_for(len(sequence.prompt) + sequence.params.max_tokens - 1)
