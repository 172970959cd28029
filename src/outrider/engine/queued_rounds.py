"""Greedy rounds of plain decoding that the device runs one after the other, with no host between them.

One captured graph is a whole round: forward, head, choice, commit of the cache, and the rows of the next round. The
host queues several, then reads what all of them said. A stop empties the rounds behind it.
"""

from collections.abc import Sequence

import torch

from outrider.kernels.device import linear
from outrider.kernels.device.advance import MOST_STOPS, STOPPED, advance
from outrider.kernels.device.choose import Scratch, choose
from outrider.models.device_decoder import Buffers, DeviceDecoder
from outrider.models.rows import Rows

MOST_ROUNDS = 16
"""Rounds that are queued at once."""
_NO_STOP = -3


class QueuedRounds:
    """Rounds of up to `buffers.rows` sequences, one row each."""

    def __init__(self, decoder: DeviceDecoder, rows: Rows, buffers: Buffers) -> None:
        vocab, device, most = len(decoder.head), decoder.head.device, buffers.rows
        self._decoder, self._rows, self._buffers = decoder, rows, buffers
        self._logits = torch.zeros(1, most, vocab, dtype=torch.float32, device=device)
        self._scratch = Scratch(most, vocab, device)
        self._tokens = torch.zeros(most, dtype=torch.int32, device=device)
        self._stops = torch.full((most, MOST_STOPS), _NO_STOP, dtype=torch.int32, device=device)
        self._said = torch.zeros(MOST_ROUNDS + 1, most, dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)

    def after_forward(self) -> None:
        """What a round does behind its forward and before its commit: head and choice."""
        linear.project(self._buffers.h, self._decoder.head, self._logits, self._rows.count)
        choose(self._logits[0], self._tokens, self._rows.count, self._scratch)

    def after_commit(self) -> None:
        """The rows of the next round."""
        rows = self._rows
        advance(
            self._tokens, self._stops, self._said, self._turn, rows.count, rows.units[2], rows.ids, rows.positions,
            rows.limits, rows.slots, rows.tables,
        )  # fmt: skip

    def start(self, stops: Sequence[frozenset[int]]) -> None:
        """Before the first round: what each sequence stops at, at most `MOST_STOPS` tokens."""
        lines = [[*own, *[_NO_STOP] * (MOST_STOPS - len(own))] for own in stops]
        self._stops[: len(lines)].copy_(torch.tensor(lines, dtype=torch.int32))
        self._turn.zero_()

    def read(self, rounds: int, sequences: int) -> list[list[int]]:
        """Tokens [rounds that ran][sequences]; waits for them."""
        said: list[list[int]] = self._said[:rounds, :sequences].tolist()
        return [tokens for tokens in said if tokens[0] != STOPPED]
