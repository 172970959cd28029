"""Executes one plan: rows into the target, tokens out of it."""

from contextlib import ExitStack

import torch

from outrider.core import ExpertProvider
from outrider.errors import RequestError
from outrider.kernels.warp import draw, uniform, warp
from outrider.kvcache.storage import KVStorage
from outrider.models.batch import Batch, Span
from outrider.models.decoder import Decoder
from outrider.scheduler.scheduler import Plan, StepResult
from outrider.scheduler.sequence import Sequence


class Runner:
    """Owns nothing; appends to the page tables of the plan's sequences."""

    def __init__(self, decoder: Decoder, kv: KVStorage, provider: ExpertProvider, device: torch.device) -> None:
        self._decoder = decoder
        self._kv = kv
        self._provider = provider
        self._device = device

    def execute(self, plan: Plan) -> StepResult:
        """One target forward over the plan's rows and the choice of the next tokens.

        If it fails, the sequences are as they were before, and the step can be run again.
        """
        with ExitStack() as undo:
            for sequence in plan.sequences:
                undo.callback(sequence.table.truncate, sequence.table.length)
            result = self._run(plan)
            undo.pop_all()
            return result

    def _run(self, plan: Plan) -> StepResult:
        batch = self._batch(plan)
        self._provider.begin_step(plan.phase)
        hidden = self._decoder.forward(batch, self._kv, self._provider)
        ends = [span.stop - 1 for span, s in zip(batch.spans, plan.sequences, strict=True) if s.prefilled]
        logits = iter(self._decoder.logits(hidden[ends])) if ends else iter(())
        tokens = tuple(_choose(s, next(logits)) if s.prefilled else None for s in plan.sequences)
        self._provider.commit(range(len(batch.token_ids)))
        return StepResult(plan, tokens)

    def _batch(self, plan: Plan) -> Batch:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans = []
        for sequence, count in zip(plan.sequences, plan.counts, strict=True):
            table, start = sequence.table, sequence.table.length
            table.append(count)
            tokens += (sequence.prompt + sequence.output)[start : start + count]
            positions += range(start, start + count)
            slots += table.slots(start, start + count)
            pages = self._tensor(self._kv.padded_pages(table))
            spans.append(Span(len(tokens) - count, len(tokens), start, pages))
        return Batch(self._tensor(tokens), self._tensor(positions), self._tensor(slots), tuple(spans))

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _choose(sequence: Sequence, logits: torch.Tensor) -> int:
    """The next token of `sequence` from its logits [vocab].

    Raises: RequestError if they are not finite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise RequestError(
            f"the model gave infinite or NaN logits at position {sequence.table.length}; "
            "the checkpoint is damaged, or its values need dtype float32"
        )
    if sequence.params.temperature == 0:
        return int(logits.argmax())
    probs = warp(logits, sequence.params)
    return draw(probs, uniform(sequence.params.seed, len(sequence.output)))
