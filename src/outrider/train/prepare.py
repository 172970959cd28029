"""From folders of source to what the training loop reads: one stream of token ids, held-out ids, and a record.

Contract: `prepare` is a function of the data and the seed; `Prepared` round-trips through a folder, so the loop can
run on a machine that has no corpus.
"""

import json
import lzma
import random
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider.train.corpus import Corpus, build_corpus, chat_pairs, is_module
from outrider.train.tokenizer import Vocabulary, load_tokenizer, save_tokenizer, train_tokenizer

_TOKENIZER_STRIDE = 3  # the merges are learnt on every third document
_BATCH = 512
_PROBE_FILES = 40

Ids = NDArray[np.uint16]


@dataclass(frozen=True)
class Source:
    """Where text came from: `name` with its version, the licence it states, and how many bytes of it are trained on."""

    name: str
    licence: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Record:
    """What was trained and held out; sizes in bytes and tokens; `xz_bytes` is `xz -9e` of the held-out files joined."""

    sources: list[Source]
    dropped: list[str]
    heldout: list[str]
    heldout_bytes: int
    heldout_tokens: int
    xz_bytes: int
    train_tokens: int
    chat_tokens: int
    primary_repeat: int
    command: str


@dataclass
class Prepared:
    """`tokens` uint16 [N], documents each followed by the end-of-text id; `heldout` uint16 ids of each file.

    `probe` uint16 [M]: a few training files like the held-out ones, on which the balance of routing is watched.
    """

    tokenizer: Tokenizer
    tokens: Ids
    heldout: list[Ids]
    probe: Ids
    record: Record

    def save(self, folder: Path, context: int) -> None:
        save_tokenizer(self.tokenizer, folder, context)
        np.save(folder / "tokens.npy", self.tokens)
        lengths = np.array([len(ids) for ids in self.heldout])
        np.save(folder / "heldout.npy", np.concatenate(self.heldout))
        np.save(folder / "heldout_lengths.npy", lengths)
        np.save(folder / "probe.npy", self.probe)
        (folder / "prepared.json").write_text(json.dumps(asdict(self.record), indent=1), encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> "Prepared":
        raw = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
        raw["sources"] = [Source(**s) for s in raw["sources"]]
        ends = np.load(folder / "heldout_lengths.npy").cumsum()
        heldout = np.split(np.load(folder / "heldout.npy"), ends[:-1])
        tokens, probe = np.load(folder / "tokens.npy"), np.load(folder / "probe.npy")
        return Prepared(load_tokenizer(folder), tokens, heldout, probe, Record(**raw))


def prepare(
    data: Sequence[Path],
    seed: int,
    *,
    primary: tuple[str, str],
    repeat: int = 2,
    vocabulary: int = 4096,
    command: str = "",
) -> Prepared:
    """Read, split, learn the tokenizer, encode.

    Args: `primary` names `data[0]` and its licence; `repeat` counts how often its training files enter the stream;
    `command` is recorded.
    """
    corpus = build_corpus(data)
    first = data[0].name
    tokenizer = train_tokenizer((doc.text for doc in corpus.train[::_TOKENIZER_STRIDE]), vocabulary)
    words = Vocabulary(tokenizer)
    own = [doc.text for doc in corpus.train if doc.source == first]
    others = [doc.text for doc in corpus.train if doc.source != first]
    pairs = [(p.docstring, p.code) for p in chat_pairs(corpus.train)]
    chats = words.encode_chat(pairs)
    documents = [*_encode(words, own)] * repeat + [*_encode(words, others)] + chats
    shuffler = random.Random(seed)
    shuffler.shuffle(documents)
    modules = [doc.text for doc in corpus.train if doc.source == first and is_module(doc.path)]
    shuffler.shuffle(modules)
    probe = _join(words.encode(modules[:_PROBE_FILES]), words.end_of_text)
    tokens = _join(documents, words.end_of_text)
    heldout = [np.array(ids, dtype=np.uint16) for ids in words.encode([doc.text for doc in corpus.heldout])]
    text = "".join(doc.text for doc in corpus.heldout).encode()
    record = Record(
        sources=_sources(corpus, data, primary),
        dropped=corpus.dropped,
        heldout=[doc.path for doc in corpus.heldout],
        heldout_bytes=len(text),
        heldout_tokens=sum(map(len, heldout)),
        xz_bytes=len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
        train_tokens=len(tokens),
        chat_tokens=sum(map(len, chats)),
        primary_repeat=repeat,
        command=command,
    )
    return Prepared(tokenizer, tokens, heldout, probe, record)


def _encode(words: Vocabulary, texts: Sequence[str]) -> Iterator[Ids]:
    for start in range(0, len(texts), _BATCH):
        for ids in words.encode(texts[start : start + _BATCH]):
            yield np.array(ids, dtype=np.uint16)


def _join(documents: Sequence[Sequence[int] | Ids], separator: int) -> Ids:
    end = np.array([separator], dtype=np.uint16)
    return np.concatenate([end, *(part for doc in documents for part in (np.asarray(doc, dtype=np.uint16), end))])


def _sources(corpus: Corpus, data: Sequence[Path], primary: tuple[str, str]) -> list[Source]:
    files: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for doc in corpus.train:
        files[doc.source] = files.get(doc.source, 0) + 1
        sizes[doc.source] = sizes.get(doc.source, 0) + len(doc.text.encode())
    described = [primary, *(describe(path) for path in data[1:])]
    return [
        Source(name, licence, files.get(path.name, 0), sizes.get(path.name, 0))
        for path, (name, licence) in zip(data, described, strict=True)
    ]


def describe(path: Path) -> tuple[str, str]:
    """("name==version", stated licence) of a wheel; anything else gives its name and "not stated"."""
    if not zipfile.is_zipfile(path):
        return path.name, "not stated"
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1]
        if not names:
            return path.name, "not stated"
        header = archive.read(names[0]).decode("utf-8", errors="replace").split("\n\n")[0]
    fields = dict(re.findall(r"^(Name|Version|License-Expression|License): (.+)$", header, re.MULTILINE))
    classifiers = re.findall(r"^Classifier: License :: (?:OSI Approved :: )?(.+)$", header, re.MULTILINE)
    stated = fields.get("License-Expression") or "; ".join(classifiers) or fields.get("License", "not stated")
    return f"{fields.get('Name', path.name)}=={fields.get('Version', '?')}", stated.strip()[:80]
