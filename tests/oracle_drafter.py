"""A drafter that knows what is coming and errs at chosen places, so that every acceptance length occurs.

It stands around a real drafter, whose context is kept as always; only the proposal is replaced.
"""

import random
from collections.abc import Sequence

from torch import Tensor

from outrider.engine.engine import Engine
from outrider.kvcache.pages import PageTable
from outrider.spec.drafter import Drafter
from outrider.spec.session import SpecSession


class OracleDrafter(Drafter):
    """Proposes a session's known text; each draft is wrong with probability `error`."""

    def __init__(self, real: Drafter, error: float, seed: int = 0) -> None:
        self.config, self.context = real.config, real.context
        self._real, self._error = real, error
        self._random = random.Random(seed)
        self._texts: dict[int, list[int]] = {}

    def know(self, session: SpecSession, output: list[int]) -> None:
        """`output` is what the target will give for `session`."""
        self._texts[id(session.table)] = session.prompt + output

    def extend(self, features: Tensor, positions: Tensor, slots: Tensor) -> None:
        self._real.extend(features, positions, slots)

    def propose(self, anchors: Sequence[int], tables: Sequence[PageTable]) -> Tensor:
        logits = self._real.propose(anchors, tables).clone()  # an inference tensor is not to be written
        for row, table in zip(logits, tables, strict=True):
            coming = self._texts[id(table)][table.length + 1 :]
            for place in range(self.config.num_drafts):
                token = coming[place] if place < len(coming) else 0
                if self._random.random() < self._error:
                    token = (token + 1) % self.config.vocab_size
                row[place, token] = 1e4
        return logits


def install_oracle(engine: Engine, error: float, seed: int = 0) -> OracleDrafter:
    """Replace the engine's drafter."""
    assert engine.rounds.drafter is not None
    engine.rounds.drafter = OracleDrafter(engine.rounds.drafter, error, seed)
    return engine.rounds.drafter
