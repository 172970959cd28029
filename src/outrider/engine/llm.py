"""`LLM`: the Python surface. One model, prompts in, completions out, statistics on demand."""

from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import asdict, dataclass
from typing import Any

from outrider.checkpoint import locate
from outrider.config import EngineOptions, PolicyName, SamplingParams, parse_slots
from outrider.core import Progress, no_progress
from outrider.engine.build import build_engine
from outrider.engine.tokenizer import Messages, TextStream, Tokenizer
from outrider.errors import RequestError
from outrider.stats import Stats

Prompt = str | Ids[int]


@dataclass(frozen=True)
class Completion:
    """What came of one prompt. `text` is None for a prompt of ids; `finish_reason` is "stop" or "length"."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


class LLM:
    """A loaded model.

    Args:
        model: `demo`, a checkpoint folder or a hub id.
        expert_slots: how much of the experts may be resident: "50%", "6GiB", or slots per layer.
        options: further `EngineOptions` fields (policy, device, dtype, max_context, ...).

    Raises: OutriderError in one sentence if the model cannot be loaded this way.
    """

    def __init__(
        self,
        model: str,
        expert_slots: str = "100%",
        policy: PolicyName = "decayed-lfu",
        progress: Progress = no_progress,
        **options: Any,
    ) -> None:
        settings = EngineOptions(expert_slots=parse_slots(expert_slots), policy=policy, **options)
        self.engine = build_engine(model, settings, progress)
        self.tokenizer = Tokenizer(locate(model))

    def generate(self, prompts: Prompt | list[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Complete `prompts` (texts, or lists of ids) in one batch; results in their order.

        Raises: RequestError for a prompt that cannot be served; then none is run.
        """
        params = params or SamplingParams()
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        return list(self._run(prompts, params))  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[tuple[int, str]]:
        """Yield (token id, text that it completes) as they come; the text is empty for a prompt of ids."""
        is_text = isinstance(prompt, str)
        sequence = self.engine.submit(self._ids(prompt), params or SamplingParams())
        text = TextStream(self.tokenizer)
        try:
            while sequence.finish_reason is None:
                seen = len(sequence.output)
                self.engine.step()
                for token in sequence.output[seen:]:
                    stop = token in sequence.stop_ids
                    yield token, text.push(token) if is_text and not stop else ""
            if is_text and (rest := text.flush()):
                yield sequence.output[-1], rest
        finally:
            self.engine.cancel(sequence)

    def chat_ids(self, messages: Messages) -> list[int]:
        """The prompt ids of a conversation, through the model's chat template."""
        return self.tokenizer.chat(messages)

    def stats(self) -> Stats:
        """What was measured since the last reset."""
        return self.engine.stats()

    def reset_counters(self) -> None:
        """Zero all counters."""
        self.engine.reset_counters()

    def reset_cache(self) -> None:
        """Empty the expert slots; the next generation starts cold and gives the same tokens."""
        self.engine.reset_cache()

    def close(self) -> None:
        """Free the engine's thread and pinned memory."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give at least one character")
            return self.tokenizer.encode(prompt)
        return list(prompt)

    def _run(self, prompts: list[Prompt], params: SamplingParams) -> Iterator[Completion]:
        sequences = []
        try:
            for prompt in prompts:
                sequences.append(self.engine.submit(self._ids(prompt), params))  # noqa: PERF401 (cancel what is queued)
            while any(s.finish_reason is None for s in sequences):
                self.engine.step()
        finally:
            for sequence in sequences:
                self.engine.cancel(sequence)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert sequence.finish_reason is not None
            kept = sequence.output[:-1] if sequence.output[-1] in sequence.stop_ids else sequence.output
            text = self.tokenizer.decode(kept) if isinstance(prompt, str) else None
            yield Completion(sequence.prompt, sequence.output, text, sequence.finish_reason.value)
