"""Greedy rounds that the device runs one after the other, with no host between them.

One captured graph is a whole round: with a drafter its block, then the target's forward, head, choice, acceptance,
commit of the cache and the drafter's new context. The host queues several, then reads what all of them said. A
sequence that ends empties the rounds behind it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.experts.device_provider import DeviceProvider
from outrider.kernels.device import linear
from outrider.kernels.device.accept import DRAFTS_NOT_FINITE, FIELDS, accept
from outrider.kernels.device.choose import Scratch, choose
from outrider.kernels.device.graph import captured
from outrider.kernels.device.set_rows import Standing, set_verify_rows
from outrider.kvcache.pages import PageTable
from outrider.models.device_decoder import Buffers
from outrider.models.rows import Rows, bucket_for
from outrider.models.target import QueuedTokens, RoundTimes
from outrider.spec.device_drafter import DeviceDrafter

MOST_ROUNDS = 16
"""Rounds that are queued at once."""


class QueuedRounds:
    """Rounds of up to `sequences` sequences; a verify has up to `width` rows of each.

    Args:
        forward: queues the target's forward of `buffers`, one for each row bucket. head: [vocab, hidden].
    """

    def __init__(
        self,
        head: Tensor,
        rows: Rows,
        buffers: dict[int, Buffers],
        forward: Callable[[Buffers], None],
        provider: DeviceProvider,
        drafter: DeviceDrafter | None,
        width: int,
        sequences: int,
        graphs: bool,
    ) -> None:
        device = head.device
        self._head, self._rows, self._buffers, self._forward = head, rows, buffers, forward
        self._provider, self._drafter, self._width = provider, drafter, width
        most = bucket_for(sequences * width)
        self._logits = torch.zeros(most * len(head), dtype=torch.float32, device=device)
        self._scratch = Scratch(most, len(head), device)
        self._choices = torch.zeros(most, dtype=torch.int32, device=device)
        self._standing = Standing(sequences, MOST_ROUNDS, device)
        self._said = torch.zeros(MOST_ROUNDS, sequences, FIELDS + width, dtype=torch.int32, device=device)
        every = sorted({self._buckets(number) for number in range(1, sequences + 1)})
        self._rounds: dict[tuple[int, int], Callable[[], None]] = {b: partial(self._run, *b) for b in every}
        if graphs and device.type == "cuda":
            self._rounds = {buckets: captured(run) for buckets, run in self._rounds.items()}

    def start(
        self,
        tables: Sequence[PageTable],
        anchors: Sequence[int],
        lengths: Sequence[int],
        left: Sequence[int],
        stops: Sequence[frozenset[int]],
    ) -> None:
        """Before the first round; the tables have pages for all that may follow."""
        self._rows.set_tables([table.pages for table in tables])
        self._standing.start(anchors, lengths, left, stops)
        if self._drafter:
            self._drafter.start(tables)

    def run(self, rounds: int, sequences: int) -> Buffers:
        """Queue rounds; the target's buffers that they use."""
        buckets = self._buckets(sequences)
        for _ in range(rounds):
            self._rounds[buckets]()
        return self._buffers[buckets[0]]

    def read(self, rounds: int, sequences: int) -> list[list[QueuedTokens]]:
        """[rounds that ran][sequences]; waits for them."""
        read: list[list[list[int]]] = self._said[:rounds, :sequences].tolist()
        return [[_tokens(line) for line in said] for said in read if said[0][2] > 0]

    def times(self, rounds: int) -> RoundTimes | None:
        """Of the first `rounds` rounds."""
        if not self._standing.times.is_cuda or rounds == 0:
            return None
        began, drafted, verified = (self._standing.times[:rounds].cpu().double() / 1e9).unbind(1)
        between = began[1:] - verified[:-1]
        return RoundTimes(*(float(span.sum()) for span in (drafted - began, verified - drafted, between)))

    def _buckets(self, sequences: int) -> tuple[int, int]:
        """Of the target's rows and of the drafter's."""
        block = self._drafter.config.block_size if self._drafter else 1
        return bucket_for(sequences * self._width), bucket_for(sequences * block)

    def _run(self, bucket: int, block_bucket: int) -> None:
        rows, buffers = self._rows, self._buffers[bucket]
        drafts, number, stride = None, 0, 0
        if self._drafter:
            config = self._drafter.config
            drafts, number, stride = (
                self._drafter.draft(self._standing, block_bucket),
                config.num_drafts,
                config.block_size,
            )
        set_verify_rows(self._standing, rows.columns, self._width, drafts, stride)
        self._forward(buffers)
        logits = self._logits[: bucket * len(self._head)].view(1, bucket, -1)
        linear.project(buffers.h, self._head, logits, rows.count)
        choose(logits[0], self._choices, rows.count, self._scratch)
        accept(self._standing, self._width, self._choices, rows.count, rows.kept, self._said, drafts, number, stride)
        self._provider.commit_rows(buffers.ids, rows.kept, rows.count)
        if self._drafter:
            # Rejected rows go in, too: they lie behind the sequence's end, where the next block overwrites them.
            self._drafter.feed(buffers.features, rows.positions, rows.slots, rows.count)


def _tokens(line: list[int]) -> QueuedTokens:
    accepted, rows, number = line[:FIELDS]
    return QueuedTokens(line[FIELDS : FIELDS + number], None if accepted == DRAFTS_NOT_FINITE else accepted, rows)
