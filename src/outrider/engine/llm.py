"""`LLM`: the Python surface. One model, prompts in, completions out, statistics on demand."""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

from outrider.config import EngineOptions, PolicyName, SamplingParams, parse_slots
from outrider.core import Progress, no_progress
from outrider.engine.build import build_engine
from outrider.engine.tokenizer import Messages, TextStream, Tokenizer
from outrider.errors import RequestError
from outrider.spec.session import SpecSession
from outrider.stats import Stats

Prompt = str | Ids[int]


@dataclass(frozen=True)
class Completion:
    """What came of one prompt. `text` is None for a prompt of ids; `finish_reason` is "stop" or "length"."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str


@dataclass(frozen=True)
class Chunk:
    """One token of a stream and the text that it completes (empty for a prompt of ids, and within a character).

    `finish_reason` is set on the last one.
    """

    token_id: int
    text: str
    finish_reason: str | None


class LLM:
    """A loaded model.

    Args:
        model: `demo`, a checkpoint folder or a hub id.
        draft: its DFlash drafter (`demo`, a folder or a hub id); None decodes plainly. No token depends on it when
            greedy, no probability when sampled.
        expert_slots: how much of the experts may be resident: "50%", "6GiB", or slots per layer; None: all, or what
            `gpu_memory` leaves room for.
        options: further `EngineOptions` fields (policy, device, dtype, max_context, ...).

    Raises: OutriderError in one sentence if the model cannot be loaded this way.
    """

    def __init__(
        self,
        model: str,
        draft: str | None = None,
        expert_slots: str | None = None,
        policy: PolicyName = "decayed-lfu",
        progress: Progress = no_progress,
        **options: Any,
    ) -> None:
        settings = EngineOptions(
            parse_slots(expert_slots) if expert_slots else None, policy=policy, draft=draft, **options
        )
        self.engine = build_engine(model, settings, progress)
        self.tokenizer = Tokenizer(self.engine.checkpoint.folder)

    def generate(self, prompts: str | Ids[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Complete one text, or a list of texts or id lists in one batch; results in their order.

        Raises: RequestError for a prompt that cannot be served; then none is run.
        """
        return list(self._run([prompts] if isinstance(prompts, str) else prompts, params or SamplingParams()))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt and yield each token as it comes; closing the iterator cancels the request.

        Raises: RequestError for a prompt that cannot be served.
        """
        params = params or SamplingParams()
        return self._stream(self.engine.check(self._ids(prompt), params), isinstance(prompt, str), params)

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Answer the conversation `messages` (`{"role": ..., "content": ...}` each), streamed like `stream`.

        Raises: RequestError if the model has no chat template, or the conversation does not fit.
        """
        params = params or SamplingParams()
        return self._stream(self.engine.check(self.tokenizer.chat(messages), params), True, params)

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
        if not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is a text or a list of token ids, not {prompt!r}")
        return list(prompt)

    def _step(self) -> None:
        if self.engine.step() is None:
            raise RequestError(
                "sessions that were begun by hand hold the KV pages that this needs; finish or cancel them first, or "
                "raise kv_tokens"
            )

    def _stream(self, ids: list[int], as_text: bool, params: SamplingParams) -> Iterator[Chunk]:
        sequence = self.engine.submit(ids, params)
        text = TextStream(self.tokenizer)
        try:
            seen, finished = 0, False
            while not finished:
                self._step()
                fresh, finished = sequence.output[seen:], sequence.finished
                seen += len(fresh)
                for left, token in zip(range(len(fresh) - 1, -1, -1), fresh, strict=True):
                    piece = text.push(token) if as_text and token not in sequence.stop_ids else ""
                    last = finished and left == 0
                    if as_text and last:
                        piece += text.flush()
                    yield Chunk(token, piece, sequence.finish_reason.value if last and sequence.finish_reason else None)
        finally:
            self.engine.cancel(sequence)

    def _run(self, prompts: Ids[Prompt], params: SamplingParams) -> Iterator[Completion]:
        sequences: list[SpecSession] = []
        try:
            sequences.extend(self.engine.submit(self._ids(prompt), params) for prompt in prompts)
            while not all(s.finished for s in sequences):
                self._step()
        finally:
            for sequence in sequences:
                self.engine.cancel(sequence)
        for prompt, sequence in zip(prompts, sequences, strict=True):
            assert sequence.finish_reason is not None
            kept = sequence.output[:-1] if sequence.output[-1] in sequence.stop_ids else sequence.output
            text = self.tokenizer.decode(kept) if isinstance(prompt, str) else None
            yield Completion(sequence.prompt, sequence.output, text, sequence.finish_reason.value)
