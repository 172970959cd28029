"""The words that all layers share: experts, bands, phases, and the protocol between a model and its expert memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[str, int, int], None]
"""Called as (what, bytes done, bytes in all) during long work."""


def no_progress(what: str, done: int, total: int) -> None:
    """The `Progress` of those who do not watch."""


class ExpertKey(NamedTuple):
    """One expert of one layer."""

    layer: int
    expert: int


class Band(IntEnum):
    """Priority of a fetch; lower runs first."""

    ON_DEMAND = 0
    ROUTE_AHEAD = 1
    BACKGROUND = 2


class Phase(Enum):
    """What a step computes; prefill is counted apart and leaves the cache's recency alone."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class ExpertPart:
    """One tensor of an expert as it is stored: its name within the expert, dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


ExpertWeights = Mapping[str, "Tensor"]
"""An expert's parts by name, views of one record."""


class ExpertProvider(Protocol):
    """Expert memory as a model sees it.

    A step is `begin_step`, then one `resolve` per MoE layer in order, then `commit`. What is not committed is dropped
    by the next `begin_step`.
    """

    @property
    def expert_nbytes(self) -> Mapping[ExpertKey, int]:
        """Exact stored payload bytes of every expert."""

    def begin_step(self, phase: Phase) -> None:
        """Start a step; pending counts of an uncommitted step are dropped."""

    def resolve(self, layer: int, expert_ids: "Tensor") -> Iterator[tuple[int, ExpertWeights]]:
        """Yield each expert of the union of `expert_ids` (int64 [rows, k]) once, resident ones first.

        The weights of an expert stay valid until the next one is asked for.
        """

    def commit(self, kept_rows: Sequence[int]) -> None:
        """End the step: only `kept_rows` (indices into `expert_ids`) refresh the cache's recency."""

    def prefetch(self, keys: Iterable[ExpertKey], priority: Band = Band.ROUTE_AHEAD) -> Sequence[ExpertKey]:
        """Queue fetches of absent experts; returns those that were queued."""


class RouteSink(Protocol):
    """Is told what every verify routed to; it changes nothing."""

    def begin_step(self) -> None:
        """A verify begins; what was not committed is dropped."""

    def abandon(self) -> None:
        """The verify failed and will be made again."""

    def observe(self, layer: int, routes: Sequence[Sequence[int]]) -> None:
        """The experts of each row in one layer."""

    def commit(self, kept_rows: Sequence[int]) -> None:
        """The verify is over; `kept_rows` are the rows that stay (anchors and accepted drafts)."""
