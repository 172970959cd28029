"""Text that a drafter learns from: documents, their held-out part, and the prompts that are drawn from them.

Contract: everything is a function of the files and a seed. A document is held out by a hash of its path (of its text,
for lines of a .jsonl file), so the split stays when other documents come or go; for Python files it is that of
`train.corpus`. Exact copies count once, and on the held-out side if one of them is there; near copies are not looked
for.
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
    def digest(self) -> bytes:
        """Tells its content from others."""
        content = self.content.tobytes() if isinstance(self.content, np.ndarray) else json.dumps(self.content).encode()
        return hashlib.sha256(content).digest()

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

    def digest(self) -> str:
        """Tells these documents and their split from others."""
        parts = (b"".join(text.digest for text in side) for side in (self.train, self.heldout))
        return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


def read_texts(paths: Sequence[Path]) -> Texts:
    """Read and split all documents.

    Args: `paths` are folders of .py, .txt and .md files, single .txt and .md files, wheels and zips of Python source,
        .jsonl files with `text`, `messages` or `conversations` on each line, or folders that `train.prepare` filled.

    Raises: ConfigError, one sentence, for a path that is missing, unreadable or of no known kind, or if nothing is to
        be read.
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
        try:
            for text, held in _read(path):
                (heldout if held else train).append(text)
            sources.append(describe(path))
        except OSError as error:
            raise ConfigError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    heldout = list({text.digest: text for text in heldout}.values())
    kept = {text.digest: text for text in train}
    for text in heldout:
        kept.pop(text.digest, None)
    train = list(kept.values())
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
    text = _decoded(file)
    if text.strip():
        yield Text(name, text), is_heldout_text(name)


def _decoded(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text (byte {error.start}); convert it or leave it out") from error


def _read_lines(path: Path) -> Iterator[tuple[Text, bool]]:
    for number, line in enumerate(_decoded(path).split("\n"), start=1):
        if line.strip():
            content = _content(line, f"{path}, line {number}")
            yield Text(f"{path.name}:{number}", content), is_heldout_text(json.dumps(content))


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
    if not any(said.strip() for _, said in turns):
        raise ConfigError(f"{where} has only empty messages")
    return [{"role": _ROLES.get(role, role), "content": said} for role, said in turns]


class Prompts:
    """Prompts drawn from documents: `prompt(index)` is a pure function of documents, seed and index.

    A prompt begins with what the tokenizer puts before any text, then has a window at a random place of a document
    that is chosen in proportion to its size; of a conversation it is everything up to an answer, its oldest turns left
    out, and at last its beginning, where that is too long.

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
        for first in [0, *(i for i in asked if 0 < i <= last)]:
            ids = self._tokenizer.chat(messages[first : last + 1])
            if len(ids) <= self._most:
                return ids
        return ids[-self._most :]
