"""Training text that the target writes itself, kept on disk sequence by sequence.

Contract: `regenerate` continues prompts by this engine, with any part of the experts resident; sequence `i` is a pure
function of the prompts, the settings and `i`. `Samples` is append-only and survives being killed at any moment: what
`append` has returned for is there when the folder is opened again, and nothing half-written is.

Several processes, each with its own seed and folder, share the work of a large run (`train_draft` takes all folders):

    python -m outrider.train.draft_data demo --data FOLDER --out SAMPLES --seed 3 --sequences 10000
"""

import argparse
import hashlib
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.config import EngineOptions, SamplingParams, parse_slots
from outrider.console import write_json
from outrider.core import Progress, no_progress
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.tokenizer import Tokenizer
from outrider.errors import ConfigError, OutriderError
from outrider.kvcache.pages import PAGE_SIZE
from outrider.train.draft_text import Prompts, read_texts
from outrider.train.draft_work import WorkFolder, fingerprint

COMMAND = "command.json"  # how samples were made, for the card

Written = tuple[Sequence[int], int]
"""Ids of a sequence with its prompt, and how many of them are the prompt."""


@dataclass(frozen=True)
class Continuation:
    """How the target continues prompts.

    Attributes:
        prompt: fewest and most tokens of a prompt.
        tokens: most tokens of a continuation; a stop token ends it before.
        greedy: share of sequences decoded greedily, the others at `temperature`. A small model repeats itself when
            greedy, so some of both.
        batch: sequences decoded together.
    """

    prompt: tuple[int, int] = (32, 256)
    tokens: int = 192
    greedy: float = 0.7
    temperature: float = 0.8
    batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        fewest, most = self.prompt
        if not 1 <= fewest <= most or self.tokens < 2 or self.batch < 1 or not 0 <= self.greedy <= 1 or self.seed < 0:
            raise ConfigError(
                f"{self} is not usable: prompts need 1 <= fewest <= most, continuations 2 tokens, and seeds are not "
                "negative"
            )

    @property
    def longest(self) -> int:
        """Most tokens of prompt and continuation."""
        return self.prompt[1] + self.tokens

    def params(self, index: int) -> SamplingParams:
        """How sequence `index` is decoded."""
        sampled = np.random.default_rng((self.seed, index, 1)).random() >= self.greedy
        return SamplingParams(self.tokens, temperature=self.temperature if sampled else 0.0, seed=index)


@dataclass(frozen=True)
class Sequences:
    """Token sequences one after the other.

    tokens: int32 [N]; lengths, prompts: int64 [S], whole lengths and how many tokens of each are its prompt.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int64]
    prompts: NDArray[np.int64]

    @staticmethod
    def of(written: Sequence[Written]) -> "Sequences":
        """Of (ids, prompt length) each."""
        tokens = np.concatenate([np.zeros(0, np.int32), *(np.array(ids, np.int32) for ids, _ in written)])
        lengths = np.array([len(ids) for ids, _ in written], np.int64)
        return Sequences(tokens, lengths, np.array([prompt for _, prompt in written], np.int64))

    @staticmethod
    def join(parts: "Sequence[Sequences]") -> "Sequences":
        """All of them in order."""
        return Sequences(
            np.concatenate([p.tokens for p in parts]),
            np.concatenate([p.lengths for p in parts]),
            np.concatenate([p.prompts for p in parts]),
        )

    @property
    def starts(self) -> NDArray[np.int64]:
        """int64 [S]: where each begins in `tokens`."""
        return self.lengths.cumsum() - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def digest(self) -> str:
        """Tells these sequences from others."""
        seen = hashlib.sha256()
        for part in (self.tokens, self.lengths, self.prompts):
            seen.update(part.tobytes())
        return seen.hexdigest()[:16]


class Samples:
    """Token sequences in a folder that nobody else writes: tokens.bin, int32, and spans.bin.

    spans.bin is int32 [N, 2]: prompt length and whole length of each sequence. It is written last, so it decides what
    is there.

    Raises: ConfigError if tokens are missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._tokens, self._spans = folder / "tokens.bin", folder / "spans.bin"
        for file in (self._tokens, self._spans):
            file.touch()
        whole = self._spans.stat().st_size // 8 * 8
        _cut(self._spans, whole)
        self.spans: NDArray[np.int32] = np.fromfile(self._spans, dtype=np.int32).reshape(-1, 2)
        total = int(self.spans[:, 1].sum()) * 4
        if self._tokens.stat().st_size < total:
            raise ConfigError(f"{self._tokens} is shorter than {self._spans} says; remove the folder and start over")
        _cut(self._tokens, total)

    def __len__(self) -> int:
        return len(self.spans)

    def append(self, written: Sequence[Written]) -> None:
        """Add sequences."""
        added = Sequences.of(written)
        spans = np.stack((added.prompts, added.lengths), axis=1).astype(np.int32)
        for file, values in ((self._tokens, added.tokens), (self._spans, spans)):
            with file.open("ab") as end:
                end.write(values.tobytes())
        self.spans = np.concatenate((self.spans, spans))

    def sequences(self, count: int) -> Sequences:
        """The first `count`."""
        prompts, lengths = self.spans[:count].astype(np.int64).T
        return Sequences(np.fromfile(self._tokens, np.int32, int(lengths.sum())), lengths, prompts)


def read_samples(folder: Path) -> Sequences:
    """What is in a folder of `Samples`, another process may be writing there.

    Raises: ConfigError if it is none.
    """
    if not (folder / "spans.bin").is_file():
        raise ConfigError(f"{folder} holds no samples (no spans.bin); name a folder that was regenerated into")
    spans = np.fromfile(folder / "spans.bin", dtype=np.int32)
    prompts, lengths = spans[: len(spans) // 2 * 2].reshape(-1, 2).astype(np.int64).T
    tokens = np.fromfile(folder / "tokens.bin", np.int32, int(lengths.sum()))
    if len(tokens) < lengths.sum():
        raise ConfigError(f"{folder / 'tokens.bin'} is shorter than spans.bin says; regenerate these samples")
    return Sequences(tokens, lengths, prompts)


def _cut(file: Path, size: int) -> None:
    if file.stat().st_size > size:
        with file.open("r+b") as end:
            end.truncate(size)


def regenerate(
    engine: Engine,
    prompts: Prompts,
    samples: Samples,
    count: int,
    settings: Continuation,
    progress: Progress = no_progress,
    what: str = "regenerating text",
) -> None:
    """Fill `samples` up to `count` sequences; what is there already is kept.

    Raises: RequestError if a prompt with its continuation does not fit into the engine's context.
    """
    while len(samples) < count:
        progress(what, len(samples), count)
        chunk = range(len(samples), min(len(samples) + settings.batch, count))
        samples.append(continuations(engine, [(prompts.prompt(i), settings.params(i)) for i in chunk]))
    progress(what, count, count)


def continuations(engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Written]:
    """Run all requests (prompt ids, parameters) together."""
    sessions = []
    try:
        for prompt, params in requests:
            sessions.append(engine.submit(prompt, params))
        while not all(session.finished for session in sessions):
            engine.step()
    finally:
        for session in sessions:
            engine.cancel(session)
    return [([*s.prompt, *s.output], len(s.prompt)) for s in sessions]


def engine_options(options: EngineOptions, batch: int, longest: int) -> EngineOptions:
    """`options` for an engine that holds `batch` sequences of `longest` tokens, driven by the host: training reads
    what passes through its eager decoder."""
    kv_tokens = batch * (-(-longest // PAGE_SIZE) + 1) * PAGE_SIZE
    return replace(
        options, max_context=longest, kv_tokens=kv_tokens, max_batch=batch, probe_copies=False, driver="host"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    command = "python -m outrider.train.draft_data " + shlex.join(arguments or sys.argv[1:])
    work = WorkFolder(args.out)
    try:
        settings = Continuation(
            (args.shortest, args.longest), args.tokens, args.greedy, args.temperature, args.batch, args.seed
        )
        texts = read_texts(args.data)
        options = EngineOptions(parse_slots(args.expert_slots), device=args.device, dtype=args.dtype, threads=1)
        with (
            work.locked(),
            closing(build_engine(args.target, engine_options(options, settings.batch, settings.longest))) as engine,
        ):
            folder = engine.checkpoint.folder
            work.claim({"target": fingerprint(folder), "text": texts.digest(), **asdict(settings)})
            write_json(args.out / COMMAND, {"command": command})
            prompts = Prompts(texts.train, Tokenizer(folder), settings.prompt, settings.seed)
            regenerate(engine, prompts, Samples(args.out), args.sequences, settings)
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m outrider.train.draft_data")
    add = parser.add_argument
    add("target", help="demo, a checkpoint folder or a hub id")
    add("--data", type=Path, nargs="+", required=True, help="what read_texts reads")
    add("--out", type=Path, required=True, help="folder of samples, continued if it exists")
    add("--sequences", type=int, default=1000)
    add("--shortest", type=int, default=Continuation.prompt[0], help="fewest tokens of a prompt")
    add("--longest", type=int, default=Continuation.prompt[1], help="most tokens of a prompt")
    add("--tokens", type=int, default=Continuation.tokens, help="most tokens of a continuation")
    add("--greedy", type=float, default=Continuation.greedy, help="share of greedy sequences")
    add("--temperature", type=float, default=Continuation.temperature, help="of the others")
    add("--batch", type=int, default=Continuation.batch)
    add("--seed", type=int, default=0, help="give each process another one")
    add("--expert-slots", default="100%")
    add("--device", default="auto")
    add("--dtype", default="auto")
    return parser


if __name__ == "__main__":
    sys.exit(main())
