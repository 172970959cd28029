"""What the target's tapped layers put out for every training token, on disk.

Contract: `capture` runs token sequences through this engine (any part of the experts resident) and fills a file of
bfloat16 features, `taps * hidden * 2` bytes a token. It continues where it was stopped; a file that belongs to other
sequences or taps is written anew.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.config import format_bytes
from outrider.console import write_json
from outrider.core import Phase, Progress, no_progress
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.experts.host_provider import HostProvider
from outrider.kvcache.pages import PAGE_SIZE, PageTable
from outrider.models.decoder import Decoder
from outrider.models.target import Target
from outrider.spec.observation import Observation
from outrider.train.draft_data import Sequences


def capture(
    engine: Engine,
    sequences: Sequences,
    taps: Sequence[int],
    path: Path,
    progress: Progress = no_progress,
) -> Tensor:
    """Features bfloat16 [len(tokens), taps * hidden], a view of the mapped file `path`.

    Raises: ConfigError if the disk has no room for the file.
    """
    width = len(taps) * engine.config.hidden_size
    shape, state = (len(sequences.tokens), width), path.with_suffix(".json")
    key, nbytes = f"{sequences.digest()} {list(taps)}", 2 * width * len(sequences.tokens)
    done = _captured(state, key) if path.exists() and path.stat().st_size == nbytes else 0
    if not done:
        state.unlink(missing_ok=True)
        _reserve(path, nbytes)
    mapped = np.memmap(path, dtype=np.int16, mode="r+", shape=shape)
    whole = torch.from_numpy(mapped).view(torch.bfloat16)
    assert isinstance(engine.decoder, Decoder) and isinstance(
        engine.provider, HostProvider
    )  # draft_data.engine_options
    target = Target(engine.decoder, engine.kv, engine.provider, engine.decoder.embedding.device)
    starts = sequences.starts
    for chunk in _chunks(sequences.lengths, done, engine.kv.pool.num_free * PAGE_SIZE):
        progress("capturing features (sequences)", chunk.start, len(sequences))
        parts = [sequences.tokens[starts[i] : starts[i] + sequences.lengths[i]].tolist() for i in chunk]
        rows = _run(target, parts, taps)
        whole[starts[chunk.start] : starts[chunk.start] + len(rows)] = rows
        mapped.flush()
        write_json(state, {"key": key, "sequences": chunk.stop})
    progress("capturing features (sequences)", len(sequences), len(sequences))
    return whole


def _captured(state: Path, key: str) -> int:
    """Sequences whose features are on disk already."""
    if not state.exists():
        return 0
    try:
        stored = json.loads(state.read_text(encoding="utf-8"))
    except ValueError:
        return 0
    return int(stored["sequences"]) if stored["key"] == key else 0


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


def _reserve(path: Path, nbytes: int) -> None:
    """Make `path` a file of `nbytes` zeros that the disk has room for; a mapped write cannot say that there is none."""
    try:
        with path.open("wb") as file:
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"the features would take {format_bytes(nbytes)}, which cannot be had in {path.parent} ({error.strerror}); "
            "make room there and run the same command, or begin with fewer or shorter sequences in another folder"
        ) from error
