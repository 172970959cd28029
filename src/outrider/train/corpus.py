"""Python source text for training: reading, the held-out split, the contamination filter, chat pairs.

Contract: `build_corpus(data)` is a pure function of the files under `data`. `data[0]` is a folder of the standard
library; whole files of it, chosen by a hash of their relative path, are held out, and no other document shares a
large part of its lines with one of them. Every document is valid UTF-8 with "\\n" line ends.
"""

import ast
import hashlib
import inspect
import textwrap
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from outrider.errors import ConfigError

HELDOUT_PER_MILLE = 75
_MAX_BYTES = 300_000
_MIN_BYTES = 64
_MAX_LINE = 1000
_MAX_DIGITS = 0.25  # share of digits above which a file is a table, not code
_SKIPPED_PARTS = {"site-packages", "__pycache__"}
_TEST_PARTS = {"test", "tests", "idle_test"}
_TABLE_ROOTS = {"encodings", "pydoc_data", "lib2to3"}
_LINE_CHARS = 20  # shorter lines ("return None", "else:") say nothing about a copy
_MIN_SHARED_LINES = 5
_MAX_SHARED_OF_HELDOUT = 0.2
_MAX_SHARED_OF_FILE = 0.4
_CHAT_BYTE_SHARE = 0.04
_CHAT_STRIDE = 3
_CHAT_MAX_DOC = 600
_CHAT_MAX_SOURCE = 2500


@dataclass(frozen=True)
class Document:
    """One file: `source` is the folder or archive it came from, `path` its POSIX path inside."""

    source: str
    path: str
    text: str


@dataclass(frozen=True)
class ChatPair:
    """A function's docstring and its source without it."""

    docstring: str
    code: str


@dataclass(frozen=True)
class Corpus:
    """`train` and `heldout` share no file; `dropped` names what the contamination filter took ("source/path")."""

    train: list[Document]
    heldout: list[Document]
    dropped: list[str]


def build_corpus(data: Sequence[Path]) -> Corpus:
    """Read every source, split `data[0]`, remove exact duplicates and near copies of held-out files.

    Raises: ConfigError if `data` is empty, a path is missing or nothing would be held out.
    """
    if not data:
        raise ConfigError("training needs at least one folder of Python source")
    primary = list(read_source(data[0]))
    heldout = [doc for doc in primary if is_heldout(doc.path)]
    if not heldout:
        raise ConfigError(f"no held-out file found in {data[0]}; give the standard library's folder first")
    candidates = [doc for doc in primary if not is_heldout(doc.path)]
    for path in data[1:]:
        candidates.extend(read_source(path))
    unique = _without_duplicates(candidates)
    train, dropped = remove_contamination(unique, heldout)
    return Corpus(train, heldout, dropped)


def heldout_documents(stdlib: Path) -> list[Document]:
    """The held-out files again, from a standard-library folder of the same Python version, in path order."""
    return [doc for doc in read_source(stdlib) if is_heldout(doc.path)]


def is_heldout(path: str) -> bool:
    """Whether this relative path is held out: about 7.5% of the files that are neither tests nor generated tables."""
    if not is_module(path):
        return False
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < HELDOUT_PER_MILLE


def is_module(path: str) -> bool:
    """Whether this path of the standard library is neither a test nor a generated table."""
    parts = PurePosixPath(path).parts
    return parts[0] not in _TABLE_ROOTS and not _TEST_PARTS.intersection(parts[:-1])


def read_source(path: Path) -> Iterator[Document]:
    """Usable .py files of a folder or of a wheel / zip archive, in path order.

    Left out: files that are no UTF-8, very small, very large, with very long lines, or mostly digits.
    """
    if path.is_dir():
        files = sorted(p.relative_to(path).as_posix() for p in path.rglob("*.py"))
        for name in files:
            if not _SKIPPED_PARTS.intersection(PurePosixPath(name).parts):
                yield from _usable(path.name, name, (path / name).read_bytes())
    elif path.suffix in {".whl", ".zip"} and path.is_file():
        if not zipfile.is_zipfile(path):
            raise ConfigError(f"{path} is no zip archive; it is damaged, or it is something else")
        with zipfile.ZipFile(path) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(".py")):
                yield from _usable(path.name, name, archive.read(name))
    else:
        raise ConfigError(f"{path} is neither a folder nor a wheel or zip archive of Python source")


def _usable(source: str, name: str, raw: bytes) -> Iterator[Document]:
    if not _MIN_BYTES <= len(raw) <= _MAX_BYTES:
        return
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    digits = sum(map(text.count, "0123456789"))
    if "\0" in text or digits > _MAX_DIGITS * len(text) or max(map(len, text.split("\n"))) > _MAX_LINE:
        return
    yield Document(source, name, text)


def _without_duplicates(documents: Sequence[Document]) -> list[Document]:
    seen: set[bytes] = set()
    unique = []
    for doc in documents:
        digest = hashlib.sha256(doc.text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            unique.append(doc)
    return unique


def remove_contamination(train: Sequence[Document], heldout: Sequence[Document]) -> tuple[list[Document], list[str]]:
    """Drop training files that share many non-trivial lines with one held-out file.

    Many: at least 5 distinct lines of 20 characters or more that are a fifth of the held-out file's such lines, or two
    fifths of the training file's own.

    Returns: the documents kept, and the names of those dropped.
    """
    lines_of = [_telling_lines(doc.text) for doc in heldout]
    owners: dict[str, list[int]] = {}
    for index, lines in enumerate(lines_of):
        for line in lines:
            owners.setdefault(line, []).append(index)
    kept, dropped = [], []
    for doc in train:
        own = _telling_lines(doc.text)
        shared = Counter(index for line in own for index in owners.get(line, ()))
        copied = any(
            count >= _MIN_SHARED_LINES
            and (count > _MAX_SHARED_OF_HELDOUT * len(lines_of[i]) or count > _MAX_SHARED_OF_FILE * len(own))
            for i, count in shared.items()
        )
        if copied:
            dropped.append(f"{doc.source}/{doc.path}")
        else:
            kept.append(doc)
    return kept, dropped


def _telling_lines(text: str) -> set[str]:
    return {line for raw in text.split("\n") if len(line := raw.strip()) >= _LINE_CHARS}


def chat_pairs(documents: Sequence[Document]) -> list[ChatPair]:
    """Functions with a docstring from every third document, thinned evenly to 4% of all documents' characters."""
    pairs = [pair for doc in documents[::_CHAT_STRIDE] for pair in _functions(doc.text)]
    total = sum(len(p.docstring) + len(p.code) for p in pairs)
    budget = _CHAT_BYTE_SHARE * sum(len(doc.text) for doc in documents)
    if total <= budget:
        return pairs
    keep = int(len(pairs) * budget / total)
    return [pairs[i * len(pairs) // keep] for i in range(keep)]


def _functions(text: str) -> Iterator[ChatPair]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (pair := _pair(node, lines)):
            yield pair


def _pair(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> ChatPair | None:
    docstring = ast.get_docstring(node, clean=False)
    if docstring is None or len(node.body) < 2 or node.end_lineno is None:
        return None
    quoted, following = node.body[0], node.body[1]
    alone = quoted.lineno > node.lineno and following.lineno > (quoted.end_lineno or quoted.lineno)
    if not alone or lines[quoted.lineno - 1][: quoted.col_offset].strip():
        return None
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    body = [*lines[first : quoted.lineno - 1], *lines[quoted.end_lineno : node.end_lineno]]
    code = textwrap.dedent("\n".join(body)) + "\n"
    doc = inspect.cleandoc(docstring)
    if not _LINE_CHARS <= len(doc) <= _CHAT_MAX_DOC or len(code) > _CHAT_MAX_SOURCE:
        return None
    return ChatPair(doc, code)
