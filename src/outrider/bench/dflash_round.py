"""`outrider bench round`: whole DFlash rounds (draft, verify, accept) of a full-size synthetic target and draft.

Weights are random, so hardly a draft stands: what a round costs is measured, not what it gives. The split is by the
device's own clock; the calls that the host makes while rounds run come from a profiler's trace.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from outrider.bench.environment import environment
from outrider.bench.kernels import dma
from outrider.bench.step import ROUNDS, routes_of
from outrider.bench.synthetic import SyntheticTarget
from outrider.bench.tables import ROUND_HEADER, round_cells
from outrider.bench.timing import Times
from outrider.checkpoint.presets import load_config, load_draft_config
from outrider.config import parse_slots
from outrider.core import Progress, no_progress
from outrider.errors import ConfigError
from outrider.experts.home import Home

_WARM_UP = 4


@dataclass(frozen=True)
class RoundRow:
    """One residency. Times are of a whole round by the host's clock; draft, verify and accept, in seconds, by the
    device's (the medians of the repeats).

    rows: of a verify. tokens: that a round gave. expected: the resident round + cold bytes / DMA; None without one.
    host_calls: CUDA calls by name between the first and the last of `ROUNDS` graph launches.
    """

    expert_slots: str
    rows: int
    tokens: float
    times: Times
    draft: float
    verify: float
    accept: float
    hit_rate: float
    cold_bytes: float
    expected: float | None
    host_calls: dict[str, int]


@dataclass(frozen=True)
class RoundResult:
    """All rows with where and how they were taken."""

    model: str
    context: int
    routing: str
    dma_bytes_per_second: float
    rows: list[RoundRow]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def bench_round(
    model: str,
    slots: Sequence[str],
    context: int = 1024,
    routing: str = "uniform",
    repeats: int = 7,
    trace: Path | None = None,
    progress: Progress = no_progress,
) -> RoundResult:
    """Measure rounds of the preset `model` with its published draft's shape on the current GPU.

    Args: trace: where to write the profiler's trace of the last residency, for Perfetto.

    Raises: ConfigError if there is no GPU; CheckpointError for a model whose draft's shape is not known.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench round measures a CUDA GPU, and none is usable here")
    config, draft = load_config(model), load_draft_config(model)
    routes, copy = routes_of(routing, config), dma(repeats)
    rows: list[RoundRow] = []
    home: Home | None = None
    for done, share in enumerate(slots, start=1):
        target = SyntheticTarget(config, parse_slots(share), context=context, home=home, trace=routes, draft=draft)
        target.provider.close.detach()  # the next residency reads the same home
        home = home or target.home
        resident = next((row.times.median for row in rows if row.cold_bytes == 0), None)
        rows.append(_measure(target, share, repeats, copy, resident, trace if share == slots[-1] else None))
        del target
        torch.cuda.empty_cache()
        progress("residencies measured", done, len(slots))
    if home:
        home.close()
    return RoundResult(model, context, routing, copy, rows, environment())


def _measure(
    target: SyntheticTarget, share: str, repeats: int, copy: float, resident: float | None, trace: Path | None
) -> RoundRow:
    for _ in range(_WARM_UP):
        target.decode(ROUNDS)
    target.provider.reset_counters()
    seconds, splits, tokens = [], [], 0
    for _ in range(repeats):
        began = perf_counter()
        said = target.decode(ROUNDS)
        seconds.append(perf_counter() - began)
        tokens += sum(len(own.tokens) for own in said)
        split = target.target.times
        assert split is not None
        splits.append((split.draft / ROUNDS, split.verify / ROUNDS, split.accept / (ROUNDS - 1)))
    seen = target.provider.snapshot()
    times, cold = Times.of(seconds, ROUNDS), seen.cold_bytes / seen.steps
    if resident is None and cold == 0:
        resident = times.median
    draft, verify, accept = (sorted(part)[repeats // 2] for part in zip(*splits, strict=True))
    return RoundRow(
        share,
        said[0].rows,
        tokens / (repeats * ROUNDS),
        times,
        draft,
        verify,
        accept,
        seen.hits / (seen.hits + seen.misses),
        cold,
        None if resident is None else resident + cold / copy,
        _host_calls(target, trace),
    )


def _host_calls(target: SyntheticTarget, trace: Path | None) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        target.decode(ROUNDS)
    if trace:
        profiled.export_chrome_trace(str(trace))
    calls = [event for event in profiled.events() if event.name.startswith("cuda")]
    launches = [call.time_range for call in calls if call.name == "cudaGraphLaunch"]
    first, last = min(span.start for span in launches), max(span.end for span in launches)
    return dict(Counter(call.name for call in calls if first <= call.time_range.start <= last))


def render(result: RoundResult) -> Table:
    """The rows for people."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"DFlash rounds of synthetic {result.model} at {result.context} tokens, routed by {result.routing}",
        caption=f"expected: resident round + cold bytes / {result.dma_bytes_per_second / 1e9:.1f} GB/s (copy engine); "
        f"{result.environment['device']}, commit {result.environment['commit']}",
    )
    for name in ROUND_HEADER:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.to_dict()["rows"]:
        table.add_row(*round_cells(row))
    return table
