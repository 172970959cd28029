"""What one target forward is given: rows of one or more sequences, with their place in KV memory."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one sequence: batch rows [start, stop), the first at absolute position `position`.

    `pages`: int64 pages of the sequence, padded to whole attention splits.
    """

    start: int
    stop: int
    position: int
    pages: Tensor


@dataclass(frozen=True)
class Batch:
    """All rows of a step: int64 [rows] token ids, absolute positions and KV token slots, and one span a sequence."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[Span, ...]
