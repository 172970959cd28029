"""What the target's tapped layers put out for every training token, on disk.

Contract: `capture` runs token sequences through this engine (any part of the experts resident) and fills a file of
bfloat16 features, `taps * hidden * 2` bytes a token. It continues where it was stopped; a file that belongs to other
sequences or taps is written anew.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.config import format_bytes
from outrider.core import Phase, Progress, no_progress
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.kvcache.pages import PAGE_SIZE, PageTable
from outrider.models.target import Target
from outrider.spec.observation import Observation
from outrider.train.draft_data import Sequences

_SPARE_DISK = 1 << 30


def capture(
    engine: Engine,
    sequences: Sequences,
    taps: Sequence[int],
    path: Path,
    limit: int,
    progress: Progress = no_progress,
) -> Tensor:
    """Features bfloat16 [len(tokens), taps * hidden], a view of the mapped file `path`.

    Args: `limit`: most bytes that the file may have.

    Raises: ConfigError if the file would be larger than `limit` or than what the disk has free.
    """
    width = len(taps) * engine.config.hidden_size
    shape, state = (len(sequences.tokens), width), path.with_suffix(".json")
    key = _digest(sequences, taps)
    done = 0
    if state.exists() and path.exists():
        stored = json.loads(state.read_text(encoding="utf-8"))
        done = stored["sequences"] if stored["key"] == key else 0
    if done == 0:
        _check_room(path, 2 * width * len(sequences.tokens), limit)
    mapped = np.memmap(path, dtype=np.int16, mode="r+" if done else "w+", shape=shape)
    whole = torch.from_numpy(mapped).view(torch.bfloat16)
    target = Target(engine.decoder, engine.kv, engine.provider, engine.decoder.embedding.device)
    starts = sequences.starts
    for chunk in _chunks(sequences.lengths, done, engine.kv.pool.num_free * PAGE_SIZE):
        progress("capturing features (sequences)", chunk.start, len(sequences))
        parts = [sequences.tokens[starts[i] : starts[i] + sequences.lengths[i]].tolist() for i in chunk]
        rows = _run(target, parts, taps)
        whole[starts[chunk.start] : starts[chunk.start] + len(rows)] = rows
        state.write_text(json.dumps({"key": key, "sequences": chunk.stop}), encoding="utf-8")
    progress("capturing features (sequences)", len(sequences), len(sequences))
    mapped.flush()
    return whole


def _run(target: Target, parts: Sequence[Sequence[int]], taps: Sequence[int]) -> Tensor:
    """Features bfloat16 on the CPU [rows, taps * hidden] of whole sequences, all in one forward."""
    tables = [PageTable(target.kv.pool) for _ in parts]
    rows = range(sum(map(len, parts)))
    seen = Observation(taps)
    try:
        target.forward(Phase.PREFILL, tables, parts, seen)
        target.provider.commit(rows)
    finally:
        for table in tables:
            table.release()
    return seen.features(rows).to(torch.bfloat16).cpu()


def _chunks(lengths: NDArray[np.int64], first: int, room: int) -> list[range]:
    """Runs of sequences from `first` on whose pages fit into `room` tokens together."""
    chunks, start, used = [], first, 0
    for index in range(first, len(lengths)):
        needed = -(-int(lengths[index]) // PAGE_SIZE) * PAGE_SIZE
        if used + needed > room and index > start:
            chunks.append(range(start, index))
            start, used = index, 0
        used += needed
    return [*chunks, range(start, len(lengths))] if start < len(lengths) else chunks


def _digest(sequences: Sequences, taps: Sequence[int]) -> str:
    """Tells these sequences with these taps from any others."""
    seen = hashlib.sha256(repr(tuple(taps)).encode())
    for part in (sequences.tokens, sequences.lengths):
        seen.update(part.tobytes())
    return seen.hexdigest()


def _check_room(path: Path, nbytes: int, limit: int) -> None:
    free = shutil.disk_usage(path.parent).free - _SPARE_DISK
    if nbytes > limit:
        raise ConfigError(
            f"the features would take {format_bytes(nbytes)} of disk, more than the {format_bytes(limit)} that the "
            "recipe allows; regenerate fewer sequences or shorter ones"
        )
    if nbytes > free:
        raise ConfigError(
            f"the features would take {format_bytes(nbytes)}, but {format_bytes(max(0, free))} are free in "
            f"{path.parent}; regenerate fewer sequences or shorter ones, or name another folder"
        )
