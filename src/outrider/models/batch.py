"""What one target forward is given, rows of one or more sequences with their place in KV memory, and who may watch."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one sequence: batch rows [start, stop), the first at absolute position `position`.

    `pages`: integer pages of the sequence, padded to whole attention splits.
    """

    start: int
    stop: int
    position: int
    pages: Tensor


@dataclass(frozen=True)
class Batch:
    """All rows of a step: integer [rows] token ids, absolute positions and KV token slots, and one span a sequence."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[Span, ...]


class Observer(Protocol):
    """Sees what passes through a forward, and changes nothing of it."""

    def residual(self, layer: int, x: Tensor) -> None:
        """The residual stream [rows, hidden] after `layer`."""

    def routed(self, layer: int, expert_ids: Tensor) -> None:
        """What the router of `layer` chose, int64 [rows, k]."""
