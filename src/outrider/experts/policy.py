"""Which resident expert has to go: LRU and decayed LFU behind one small interface.

Contract: a policy belongs to one layer. `touch` is called once per committed decode step with the experts of the kept
rows, `order` ranks candidates, the first victim first; ties go by slot index, so the same trace gives the same victims
on every device. All arithmetic is in integers.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from outrider.config import PolicyName


class CachePolicy(Protocol):
    """Recency of one layer's experts, resident or not."""

    def touch(self, rows_of_expert: Mapping[int, int]) -> None:
        """One committed step used each expert in that many kept rows (>= 1)."""

    def order(self, candidates: Iterable[tuple[int, int]]) -> list[int]:
        """Slots of (slot, expert) candidates, the one to evict first in front."""

    def reset(self) -> None:
        """Forget everything."""


class LRU:
    """Evict the expert whose last use is longest ago."""

    def __init__(self, num_experts: int) -> None:
        self._last = [0] * num_experts
        self._clock = 0

    def touch(self, rows_of_expert: Mapping[int, int]) -> None:
        self._clock += 1
        for expert in rows_of_expert:
            self._last[expert] = self._clock

    def order(self, candidates: Iterable[tuple[int, int]]) -> list[int]:
        return [slot for slot, _ in sorted(candidates, key=lambda c: (self._last[c[1]], c[0]))]

    def reset(self) -> None:
        self._last = [0] * len(self._last)
        self._clock = 0


class DecayedLFU:
    """Evict the expert with the smallest use count, where every committed step takes 1/2^`SHIFT` off all counts.

    Counts are fixed point with `FRACTION` fractional bits. An expert counts once a kept row, so one that many
    sequences of a batch share is worth more.
    """

    SHIFT = 6
    FRACTION = 16

    def __init__(self, num_experts: int) -> None:
        self._counts = [0] * num_experts

    def touch(self, rows_of_expert: Mapping[int, int]) -> None:
        self._counts = [count - (count >> self.SHIFT) for count in self._counts]
        for expert, rows in rows_of_expert.items():
            self._counts[expert] += rows << self.FRACTION

    def order(self, candidates: Iterable[tuple[int, int]]) -> list[int]:
        return [slot for slot, _ in sorted(candidates, key=lambda c: (self._counts[c[1]], c[0]))]

    def reset(self) -> None:
        self._counts = [0] * len(self._counts)


POLICIES: dict[PolicyName, type[LRU] | type[DecayedLFU]] = {"lru": LRU, "decayed-lfu": DecayedLFU}
