"""One request on its way through the engine."""

from dataclasses import dataclass, field
from enum import Enum

from outrider.config import SamplingParams
from outrider.kvcache.pages import PageTable


class FinishReason(Enum):
    """Why a sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


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

    def append(self, token: int) -> None:
        """Take the next output token and see whether it ends the sequence."""
        self.output.append(token)
        if token in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.output) == self.params.max_tokens:
            self.finish_reason = FinishReason.LENGTH
