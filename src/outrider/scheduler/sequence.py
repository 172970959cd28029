"""One request on its way through the engine."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from outrider.config import SamplingParams
from outrider.kvcache.pages import PageTable


class FinishReason(Enum):
    """Why a sequence ended, in OpenAI's words; `ABORT`: it was cancelled."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(eq=False)
class Sequence:
    """A prompt, what it has produced, and its pages. Tokens [0, table.length) are in KV memory."""

    id: int
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    table: PageTable
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is in KV memory."""
        return self.table.length >= len(self.prompt)

    @property
    def finished(self) -> bool:
        """Whether the last output token is the last one."""
        return self.finish_reason is not None

    @property
    def remaining(self) -> int:
        """Tokens that may still follow."""
        return 0 if self.finished else self.params.max_tokens - len(self.output)

    def until_end(self, tokens: Iterable[int]) -> list[int]:
        """The first of `tokens` as next output, up to the one that ends the sequence."""
        taken = []
        for token in islice(tokens, self.remaining):
            taken.append(token)
            if token in self.stop_ids:
                break
        return taken

    def extend(self, tokens: Iterable[int]) -> list[int]:
        """Append `until_end(tokens)`, see whether it ends the sequence, and return it."""
        taken = self.until_end(tokens)
        self.output += taken
        if taken and taken[-1] in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif taken and self.remaining == 0:
            self.finish_reason = FinishReason.LENGTH
        return taken
