"""`outrider bench prefill`: prompts through a synthetic target, and what they do to the cache that decoding uses.

The bound is what the copy engine alone would need for the cold bytes. A prompt runs in chunks (of up to 4,096 tokens),
between which a running decode can get its turn: the time of one chunk is its stall.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from outrider.bench.environment import environment
from outrider.bench.kernels import dma
from outrider.bench.step import ROUNDS, routes_of
from outrider.bench.synthetic import SyntheticTarget
from outrider.bench.tables import PREFILL_HEADER, prefill_cells
from outrider.bench.timing import Times
from outrider.checkpoint.presets import load_config
from outrider.config import EngineOptions, parse_slots
from outrider.core import Progress, no_progress
from outrider.errors import ConfigError
from outrider.experts.home import Home
from outrider.models.rows import BUCKETS

_BURSTS = 8
STREAM_CHUNK = EngineOptions.stream_chunk


@dataclass(frozen=True)
class PrefillRow:
    """One length at one residency: seconds of the whole prompt, cold bytes of it, and tokens per second if the copy
    engine moved those bytes and nothing else took time (None: there are none).

    hit_rate_before, hit_rate_after: of decoding with the same routes before and after the prompts.
    """

    expert_slots: str
    tokens: int
    times: Times
    tokens_per_second: float
    cold_bytes: float
    bound: float | None
    chunk_seconds: float
    hit_rate_before: float
    hit_rate_after: float


@dataclass(frozen=True)
class PrefillResult:
    """All rows with where and how they were taken."""

    model: str
    routing: str
    dma_bytes_per_second: float
    rows: list[PrefillRow]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def bench_prefill(
    model: str,
    slots: Sequence[str],
    lengths: Sequence[int],
    routing: str = "uniform",
    repeats: int = 5,
    progress: Progress = no_progress,
) -> PrefillResult:
    """Measure prompts of `lengths` at every residency of `slots` on the current GPU; `routing` is that of the decoding.

    Raises: ConfigError if there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench prefill measures a CUDA GPU, and none is usable here")
    config = load_config(model)
    copy = dma(repeats)
    rows: list[PrefillRow] = []
    home: Home | None = None
    trace: Tensor | None = routes_of(routing, config)
    for share in slots:
        target = SyntheticTarget(
            config,
            parse_slots(share),
            room=max(lengths) + 2048,
            rows=BUCKETS[-1],
            home=home,
            trace=trace,
            prompt_rows=STREAM_CHUNK,
        )
        target.provider.close.detach()  # the next residency reads the same home
        home = home or target.home
        for tokens in lengths:
            rows.append(_measure(target, share, tokens, repeats, copy))
            progress("prompts measured", len(rows), len(slots) * len(lengths))
        del target
        torch.cuda.empty_cache()
    if home:
        home.close()
    return PrefillResult(model, routing, copy, rows, environment())


def _measure(target: SyntheticTarget, share: str, tokens: int, repeats: int, copy: float) -> PrefillRow:
    target.prefill(tokens)
    for _ in range(_BURSTS):
        target.decode(ROUNDS)
    before = _hit_rate(target)
    target.provider.reset_counters()
    seconds = []
    for _ in range(repeats):
        began = perf_counter()
        target.prefill(tokens)
        seconds.append(perf_counter() - began)
    cold = target.provider.snapshot().prefill_cold_bytes / repeats
    times = Times.of(seconds)
    chunks = -(-tokens // STREAM_CHUNK)
    return PrefillRow(
        share,
        tokens,
        times,
        tokens / times.median,
        cold,
        tokens / (cold / copy) if cold else None,
        times.median / chunks,
        before,
        _hit_rate(target),
    )


def _hit_rate(target: SyntheticTarget) -> float:
    target.provider.reset_counters()
    for _ in range(_BURSTS):
        target.decode(ROUNDS)
    seen = target.provider.snapshot()
    return seen.hits / (seen.hits + seen.misses)


def render(result: PrefillResult) -> Table:
    """The rows for people."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"Prompts of synthetic {result.model}, decoding routed by {result.routing}",
        caption=f"bound: cold bytes at {result.dma_bytes_per_second / 1e9:.1f} GB/s (copy engine) alone; "
        f"{result.environment['device']}, commit {result.environment['commit']}",
    )
    for name in PREFILL_HEADER:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.to_dict()["rows"]:
        table.add_row(*prefill_cells(row))
    return table
