"""Recorded expert routing, read from the three forms in which it is published.

Contract: `read_trace` recognises the form by its content and returns a checked `RoutingTrace`, or raises one sentence
that names the file and the place in it. Pickles are never loaded. The forms:

* **npz**: `ids` integer [tokens, layer, rank]; run i is `ids[offset[i]:offset[i] + tokens[i]]`; runs whose
  `repetition[i]` is set fell into a loop and are left out. Says nothing about how many experts there are.
* **jsonl** (also gzipped): one run, one object a token, `{"layers": [[expert, ...], ...]}`; other fields are ignored.
  Says nothing about how many experts there are.
* **csv** (also gzipped): one row a (turn, phase, step, layer, slot) with the `expert` in that slot, columns named in a
  header; lines that start with # are comments, and a comment may say `n_expert=` and `n_expert_used=`. Only decode
  rows (`phase` 1) are read; every turn is a run.

What a trace does not say is which tokens were the prompt's: every token here counts as a decode step.
"""

import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.errors import CheckpointError, ConfigError

MAX_ID = int(np.iinfo(np.uint16).max)

_CSV_KEY = ("turn", "step", "layer", "slot")
_CSV_COLUMNS = (*_CSV_KEY, "phase", "expert")
_DECODE = 1
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, NotImplementedError, RuntimeError, MemoryError)


@dataclass(frozen=True)
class RoutingTrace:
    """Which experts every token went to. `runs` are independent sequences, each uint16 [tokens, layer, k].

    `num_layers` counts layers that have experts; the k experts of one token in one layer are distinct.
    """

    name: str
    num_layers: int
    num_experts: int
    experts_per_token: int
    runs: list[npt.NDArray[np.uint16]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return sum(len(run) for run in self.runs)


def read_trace(path: str | Path, num_experts: int | None = None) -> RoutingTrace:
    """Read a routing trace of any of the forms above.

    `num_experts` (experts per layer) is taken from the file where the file says it. Where it does not, None takes the
    smallest power of two above the largest id: a guess, right for most models, wrong for one of 60 experts or for a
    recording so short that its last experts never came up. Give the number then: slot counts follow from it.

    Raises: CheckpointError if the file is missing, damaged or of no known form; ConfigError if `num_experts` does not
    fit what the file holds.
    """
    path = Path(path)
    data = _read_bytes(path)
    stated: int | None = None
    if data.startswith(b"PK"):
        runs = _read_npz(path, data)
    else:
        lines = _text_lines(path, data)
        first = next((text for _, text in lines if not text.startswith("#")), "")
        if first.startswith("{"):
            runs = [_read_jsonl(path, lines)]
        elif "," in first:
            runs, stated = _read_csv(path, lines)
        else:
            raise CheckpointError(
                f"{path} is not a routing trace that is known here; give an .npz with ids, offset, tokens and "
                f"repetition, a .jsonl with layers, or a .csv with {', '.join(_CSV_COLUMNS)}"
            )
    _check_distinct(path, runs)
    largest = max(int(run.max()) for run in runs)
    return RoutingTrace(
        name=f"{path.parent.name}/{path.name}" if path.parent.name else path.name,
        num_layers=runs[0].shape[1],
        num_experts=_expert_count(path, largest, stated, num_experts),
        experts_per_token=runs[0].shape[2],
        runs=runs,
    )


def _read_bytes(path: Path) -> bytes:
    """The file's bytes, decompressed if they are gzip."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read as a routing trace: {error.strerror or error}") from error
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise CheckpointError(f"{path} is a truncated or damaged gzip file ({error}); fetch it again") from error
    if not data.strip():
        raise CheckpointError(f"{path} is empty; a routing trace needs at least one token")
    return data


def _text_lines(path: Path, data: bytes) -> list[tuple[int, str]]:
    """(line number from 1, stripped text) of every line that is not blank."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is neither text nor an .npz file, so it is no routing trace") from error
    return [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _expert_count(path: Path, largest: int, stated: int | None, given: int | None) -> int:
    if stated is not None and given is not None and stated != given:
        raise ConfigError(f"{path} says that it has {stated} experts a layer, but num_experts is {given}; leave it out")
    count = given if stated is None else stated
    if count is None:
        return 1 << largest.bit_length()
    if count <= largest:
        source = "num_experts is" if stated is None else "its header says"
        raise ConfigError(f"{path} routes to expert {largest}, but {source} {count}; it must be at least {largest + 1}")
    return count


def _check_distinct(path: Path, runs: list[npt.NDArray[np.uint16]]) -> None:
    for index, run in enumerate(runs):
        ordered = np.sort(run, axis=2)
        twice = np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])
        if len(twice):
            token, layer, rank = (int(position) for position in twice[0])
            expert = int(ordered[token, layer, rank])
            raise CheckpointError(
                f"{path}: run {index}, token {token}, layer {layer} names expert {expert} twice; a router's choices "
                f"are distinct"
            )


# npz


def _read_npz(path: Path, data: bytes) -> list[npt.NDArray[np.uint16]]:
    ids, offset, tokens, repetition = _npz_arrays(path, data)
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise CheckpointError(
            f"{path}: 'ids' is {ids.dtype} {list(ids.shape)}; it must hold whole numbers [tokens, layer, rank]"
        )
    if int(ids.min()) < 0 or int(ids.max()) > MAX_ID:
        raise CheckpointError(f"{path}: 'ids' has values outside 0 to {MAX_ID}, which are no expert ids")
    for name, vector in (("offset", offset), ("tokens", tokens), ("repetition", repetition)):
        if vector.ndim != 1 or vector.dtype.kind not in "iub" or len(vector) != len(offset):
            raise CheckpointError(
                f"{path}: '{name}' is {vector.dtype} {list(vector.shape)}; it must hold one whole number a run"
            )
    runs = []
    for index, (start, count, repeats) in enumerate(zip(offset.tolist(), tokens.tolist(), repetition, strict=True)):
        if start < 0 or count < 0 or start + count > len(ids):
            raise CheckpointError(
                f"{path}: run {index} takes tokens {start} to {start + count}, but 'ids' has {len(ids)} tokens"
            )
        if count and not repeats:
            runs.append(ids[start : start + count].astype(np.uint16))
    if not runs:
        raise CheckpointError(f"{path} has no run left: each one is empty or marked in 'repetition'")
    return runs


def _npz_arrays(path: Path, data: bytes) -> list[npt.NDArray[Any]]:
    arrays = []
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            for name in ("ids", "offset", "tokens", "repetition"):
                if name not in archive:
                    raise CheckpointError(f"{path} has no array '{name}', which a routing trace in .npz form needs")
                arrays.append(archive[name])
    except (zipfile.BadZipFile, zlib.error, *_UNREADABLE) as error:
        raise CheckpointError(f"{path} is a truncated or damaged .npz file ({error}); fetch it again") from error
    return arrays


# jsonl


def _read_jsonl(path: Path, lines: list[tuple[int, str]]) -> npt.NDArray[np.uint16]:
    tokens: list[list[list[int]]] = []
    for number, text in lines:
        where = f"{path}, line {number}"
        layers = _json_layers(where, text)
        if tokens and len(layers) != len(tokens[0]):
            raise CheckpointError(f"{where}: 'layers' has {len(layers)} layers, earlier tokens have {len(tokens[0])}")
        width = len((tokens or [layers])[0][0])
        for layer, experts in enumerate(layers):
            if len(experts) != width:
                raise CheckpointError(
                    f"{where}: layer {layer} of 'layers' names {len(experts)} experts, the first one names {width}"
                )
        tokens.append(layers)
    return np.array(tokens, dtype=np.uint16)


def _json_layers(where: str, text: str) -> list[list[int]]:
    """The `layers` field of one token: at least one layer, at least one expert in each."""
    try:
        token = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not a whole JSON object ({error}); the file may be cut short") from error
    layers = token.get("layers") if isinstance(token, dict) else None
    if not isinstance(layers, list) or not layers or not all(isinstance(row, list) and row for row in layers):
        raise CheckpointError(f"{where} has no field 'layers' that lists each layer's expert ids")
    for layer, row in enumerate(layers):
        for expert in row:
            if type(expert) is not int or not 0 <= expert <= MAX_ID:
                raise CheckpointError(
                    f"{where}: layer {layer} of 'layers' holds {str(expert)[:40]!r}, which is no expert id from 0 to "
                    f"{MAX_ID}"
                )
    return layers


# csv


def _read_csv(path: Path, lines: list[tuple[int, str]]) -> tuple[list[npt.NDArray[np.uint16]], int | None]:
    """Runs, and experts per layer where a comment says so."""
    comments = "\n".join(text for _, text in lines if text.startswith("#"))
    rows = np.array(list(_decode_rows(path, lines)), dtype=np.int64).reshape(-1, len(_CSV_COLUMNS) + 1)
    if not len(rows):
        raise CheckpointError(f"{path} has no decode rows: none has 'phase' {_DECODE}")
    turn, step, layer, slot, _, expert, line = rows[np.lexsort(rows[:, 3::-1].T)].T
    layers, layer = np.unique(layer, return_inverse=True)
    starts = np.flatnonzero(np.diff(turn, prepend=-1) | np.diff(step, prepend=-1) | np.diff(layer, prepend=-1))
    counts = np.diff(starts, append=len(turn))
    used = _stated(comments, "n_expert_used") or int(counts.max())
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        if count != used or not np.array_equal(slot[start : start + count], np.arange(used)):
            raise CheckpointError(
                f"{path}, line {line[start]}: turn {turn[start]}, step {step[start]}, layer {layers[layer[start]]} has "
                f"{count} rows; it must have one for each 'slot' from 0 to {used - 1}"
            )
    # One group a layer of a step; groups are sorted and distinct, so a step with as many groups as layers is whole.
    steps = np.flatnonzero(np.diff(turn[starts], prepend=-1) | np.diff(step[starts], prepend=-1))
    ragged = np.flatnonzero(np.diff(steps, append=len(starts)) != len(layers))
    if len(ragged):
        first = starts[steps[ragged[0]]]
        raise CheckpointError(
            f"{path}, line {line[first]}: turn {turn[first]}, step {step[first]} lacks a 'layer'; every step must have "
            f"all {len(layers)} layers"
        )
    tokens = expert.astype(np.uint16).reshape(-1, len(layers), used)
    token_turn = turn[:: len(layers) * used]
    return [tokens[token_turn == index] for index in np.unique(token_turn)], _stated(comments, "n_expert")


def _decode_rows(path: Path, lines: list[tuple[int, str]]) -> Iterator[list[int]]:
    """`_CSV_COLUMNS` and the line number of every decode row."""
    body = [(number, text) for number, text in lines if not text.startswith("#")]
    header = [name.strip() for name in body[0][1].split(",")]
    for name in _CSV_COLUMNS:
        if name not in header:
            raise CheckpointError(f"{path}, line {body[0][0]} has no column '{name}'; it names {', '.join(header)}")
    places = [header.index(name) for name in _CSV_COLUMNS]
    for number, text in body[1:]:
        fields = text.split(",")
        if len(fields) != len(header):
            raise CheckpointError(
                f"{path}, line {number} has {len(fields)} fields, its header has {len(header)}; the file may be cut "
                f"short"
            )
        values = [_whole_number(path, number, _CSV_COLUMNS[i], fields[place]) for i, place in enumerate(places)]
        if values[4] == _DECODE:
            yield [*values, number]


def _whole_number(path: Path, number: int, name: str, text: str) -> int:
    limit = MAX_ID if name == "expert" else 10**9
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= limit):
        raise CheckpointError(
            f"{path}, line {number}: '{name}' is {text[:40]!r}, which is no whole number from 0 to {limit}"
        )
    return int(text)


def _stated(comments: str, key: str) -> int | None:
    match = re.search(rf"\b{key}=(\d{{1,5}})\b", comments)
    return int(match[1]) if match else None
