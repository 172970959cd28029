"""Text that a drafter learns from: documents, their held-out part, and the prompts that are drawn from them.

Contract: everything is a function of the files and a seed. A document is held out by a hash of its path (of its text,
for lines of a .jsonl file), so the split stays when other documents come or go; for Python files it is exactly that of
`train.corpus`, so what the demo target never saw its drafter never sees either.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.engine.tokenizer import Messages, Tokenizer
from outrider.errors import ConfigError
from outrider.train.corpus import HELDOUT_PER_MILLE, is_heldout, read_source
from outrider.train.prepare import Ids, Prepared, describe

_PLAIN = (".txt", ".md")
_CHARS_A_TOKEN = 12  # characters read for each token wanted: more than nearly any text needs
_FROM_THE_TOP = 0.1  # share of prompts that begin where their document does
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Text:
    """One document: a text, a conversation, or token ids of the target's own tokenizer."""

    name: str
    content: str | Messages | Ids

    @property
    def size(self) -> int:
        """Characters, or tokens of ids."""
        if isinstance(self.content, list):
            return sum(len(message["content"]) for message in self.content)
        return len(self.content)


@dataclass(frozen=True)
class Texts:
    """`train` and `heldout` share no document. `sources`: (name, licence as stated) of each path that was read."""

    train: list[Text]
    heldout: list[Text]
    sources: list[tuple[str, str]]


def read_texts(paths: Sequence[Path]) -> Texts:
    """Read and split all documents.

    Args: `paths` are folders of .py, .txt and .md files, single .txt and .md files, wheels and zips of Python source,
        .jsonl files with `text`, `messages` or `conversations` on each line, or folders that `train.prepare` filled.

    Raises: ConfigError, one sentence, for a path that is missing or of no known kind, or if nothing is to be read.
    """
    train: list[Text] = []
    heldout: list[Text] = []
    sources: list[tuple[str, str]] = []
    for path in paths:
        if (path / "prepared.json").is_file():
            ready = Prepared.load(path)
            train += _split_stream(ready.tokens)
            heldout += [Text(name, ids) for name, ids in zip(ready.record.heldout, ready.heldout, strict=True)]
            sources += [(source.name, source.licence) for source in ready.record.sources]
            continue
        found = list(_read(path))
        for text, held in found:
            (heldout if held else train).append(text)
        sources.append(describe(path))
    if not train and heldout:
        train.append(heldout.pop())
    if not train:
        raise ConfigError(f"no text found in {', '.join(map(str, paths)) or 'no path at all'}; give --data with text")
    return Texts(train, heldout, sources)


def is_heldout_text(key: str) -> bool:
    """Whether the document of this path (or with this text) is held out: 7.5% of all."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELDOUT_PER_MILLE


def _split_stream(tokens: Ids) -> list[Text]:
    ends = np.flatnonzero(tokens == tokens[0])
    pieces = zip(ends[:-1] + 1, ends[1:], strict=True)
    return [Text(f"document {i}", tokens[a:b]) for i, (a, b) in enumerate(pieces) if b > a]


def _read(path: Path) -> Iterator[tuple[Text, bool]]:
    """Documents, each with whether it is held out."""
    if path.suffix == ".jsonl" and path.is_file():
        yield from _read_lines(path)
        return
    if path.suffix in _PLAIN and path.is_file():
        yield from _read_plain(path, path.name)
        return
    if not path.is_dir() and not (path.suffix in {".whl", ".zip"} and path.is_file()):
        raise ConfigError(f"{path} is neither a folder of text nor a .txt, .md, .jsonl, .whl or .zip file")
    for doc in read_source(path):
        yield Text(doc.path, doc.text), is_heldout(doc.path)
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.suffix in _PLAIN and p.is_file()):
            yield from _read_plain(file, file.relative_to(path).as_posix())


def _read_plain(file: Path, name: str) -> Iterator[tuple[Text, bool]]:
    try:
        text = file.read_bytes().decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}); convert it or leave it out") from error
    if text.strip():
        yield Text(name, text), is_heldout_text(name)


def _read_lines(path: Path) -> Iterator[tuple[Text, bool]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Text(f"{path.name}:{number}", _content(line, f"{path}, line {number}")), is_heldout_text(line)


def _content(line: str, where: str) -> str | Messages:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error})") from error
    kinds = ("text", "messages", "conversations")
    value: Any = next((raw[kind] for kind in kinds if kind in raw), None) if isinstance(raw, dict) else None
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise ConfigError(f"{where} has neither 'text' nor 'messages' nor 'conversations'")
    turns = [(turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) for turn in value]
    if not all(isinstance(role, str) and isinstance(said, str) for role, said in turns):
        raise ConfigError(f"{where} has a message without 'role' and 'content' (or 'from' and 'value') as text")
    return [{"role": _ROLES.get(role, role), "content": said} for role, said in turns]


class Prompts:
    """Prompts drawn from documents: `prompt(index)` is a pure function of documents, seed and index.

    A prompt begins with what the tokenizer puts before any text, then has a window at a random place of a document
    that is chosen in proportion to its size; of a conversation it is everything up to an answer.

    Args: `lengths`: fewest and most tokens of a prompt.
    """

    def __init__(self, texts: Sequence[Text], tokenizer: Tokenizer, lengths: tuple[int, int], seed: int) -> None:
        self._texts, self._tokenizer, self._seed = texts, tokenizer, seed
        self._fewest, self._most = lengths
        self._ends = np.cumsum([text.size for text in texts])
        self._opening: list[int] | None = None

    def prompt(self, index: int) -> list[int]:
        """Token ids, at most the most; fewer than the fewest only if the document ends there."""
        random = np.random.default_rng((self._seed, index))
        place = int(random.integers(self._ends[-1]))
        which = int(np.searchsorted(self._ends, place, side="right"))
        content = self._texts[which].content
        length = int(random.integers(self._fewest, self._most + 1))
        if isinstance(content, list):
            return self._conversation(content, random)
        start = place - int(self._ends[which] - self._texts[which].size)
        start = 0 if random.random() < _FROM_THE_TOP else max(0, min(start, self._texts[which].size - self._fewest))
        if isinstance(content, str):
            piece = content[start : start + _CHARS_A_TOKEN * length]
            return self._tokenizer.encode(piece)[:length]
        if self._opening is None:
            self._opening = self._tokenizer.encode("")
        window = content[start : start + length - len(self._opening)].tolist()
        return [*self._opening, *window]

    def _conversation(self, messages: Messages, random: np.random.Generator) -> list[int]:
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"] or [len(messages) - 1]
        last = asked[int(random.integers(len(asked)))]
        return self._tokenizer.chat(messages[: last + 1])[-self._most :]
