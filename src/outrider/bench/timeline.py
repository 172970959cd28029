"""`outrider bench timeline`: one decoding step of a full-size synthetic target by the device's own clock.

Stamps stand between the kernels of every layer, on both branches of the graph. Each takes a launch of its own, so the
step is longer than without them: the picture shows where time goes, `outrider bench step` says how much there is.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from outrider.bench.environment import environment
from outrider.bench.step import ROUNDS, routes_of
from outrider.bench.synthetic import SyntheticTarget
from outrider.checkpoint.presets import load_config
from outrider.config import parse_slots
from outrider.errors import CheckpointError, ConfigError
from outrider.figure import new_figure, save_figure
from outrider.kernels.device.stamp import stamp

MARKS = ("layer", "routed", "resolved", "fetch", "fetched", "resident", "joined", "absent")
"""What has been reached at a stamp, in each layer: it begins, its routes are known, its lists are written, its fetch
begins and ends (beside the rest), its resident experts are computed, its absent ones are there, and are computed."""
_SPANS = (
    ("attention and router", "layer", "routed", 0),
    ("resolve", "routed", "resolved", 0),
    ("resident experts", "resolved", "resident", 0),
    ("waiting for bytes", "resident", "joined", 0),
    ("absent experts", "joined", "absent", 0),
    ("fetch", "fetch", "fetched", 1),
)
_COLORS = ("#4c78a8", "#b279a2", "#54a24b", "#e45756", "#9ecae9", "#f58518")
_WARM_UP = 8


@dataclass(frozen=True)
class Span:
    """`what` took place in `layer` from `start` to `end`, in seconds since the first stamp.

    Branch 0 computes, 1 fetches.
    """

    what: str
    layer: int
    branch: int
    start: float
    end: float


@dataclass(frozen=True)
class TimelineResult:
    """The step whose length is the median of those seen, from the routes of its first layer to the experts of its last,
    and every kind's share: seconds of a step, medians over all of them. The fetch runs beside the others."""

    model: str
    expert_slots: str
    routing: str
    context: int
    steps: int
    step_seconds: float
    shares: dict[str, float]
    spans: list[Span]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


class Marks:
    """Stamps of one step: int64 [layers + 1, marks], the last line's first is the end."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.log = torch.zeros(layers + 1, len(MARKS), dtype=torch.int64, device=device)

    def __call__(self, layer: int, reached: str) -> None:
        stamp(self.log, layer * len(MARKS) + MARKS.index(reached))


def bench_timeline(
    model: str, expert_slots: str = "50%", routing: str = "uniform", context: int = 1024, steps: int = 32
) -> TimelineResult:
    """Measure on the current GPU. Raises: ConfigError if there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("bench timeline measures a CUDA GPU, and none is usable here")
    config = load_config(model)
    marks = Marks(config.num_layers, torch.device("cuda"))
    target = SyntheticTarget(
        config, parse_slots(expert_slots), context=context, trace=routes_of(routing, config), mark=marks
    )
    for _ in range(_WARM_UP):
        target.decode(ROUNDS)
    logs = []
    for _ in range(steps):
        target.decode(1)
        logs.append(marks.log.cpu())
    target.provider.close()
    return _result(model, expert_slots, routing, context, logs)


def _result(model: str, expert_slots: str, routing: str, context: int, logs: Sequence[Tensor]) -> TimelineResult:
    each = [list(spans_of(log)) for log in logs]
    lengths = [float(log[-1, 0] - log[0, 0]) / 1e9 for log in logs]
    middle = sorted(range(len(logs)), key=lengths.__getitem__)[len(logs) // 2]
    shares = {
        what: median(sum(span.end - span.start for span in spans if span.what == what) for spans in each)
        for what, *_ in _SPANS
    }
    return TimelineResult(
        model, expert_slots, routing, context, len(logs), lengths[middle], shares, each[middle], environment()
    )


def spans_of(log: Tensor) -> Iterator[Span]:
    """The spans of one step's stamps; what was not stamped is left out."""
    first = int(log[0, 0])
    for layer, line in enumerate(log[:-1].tolist()):
        for what, begins, ends, branch in _SPANS:
            start, end = line[MARKS.index(begins)], line[MARKS.index(ends)]
            if start and end:
                yield Span(what, layer, branch, (start - first) / 1e9, (end - first) / 1e9)


def render(result: TimelineResult) -> Table:
    """The shares for people."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"A step of synthetic {result.model}, {result.expert_slots} resident, routed by {result.routing}",
        caption=f"median of {result.steps} steps with stamps, {result.step_seconds * 1e3:.2f} ms; the fetch runs "
        f"beside the others; {result.environment['device']}, commit {result.environment['commit']}",
    )
    table.add_column("part")
    table.add_column("ms a step", justify="right")
    table.add_column("share", justify="right")
    for what, seconds in result.shares.items():
        table.add_row(what, f"{seconds * 1e3:.3f}", f"{seconds / result.step_seconds:.0%}")
    return table


def read_timeline(path: Path) -> TimelineResult:
    """A result that was written before. Raises: CheckpointError if it is none."""
    try:
        raw = json.loads(path.read_text())
        return TimelineResult(**raw | {"spans": [Span(**span) for span in raw["spans"]]})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a result of 'outrider bench timeline' ({error!r})") from error


def plot(result: TimelineResult, path: Path, layers: int = 6) -> None:
    """Draw the first layers of the step.

    Raises: ConfigError without matplotlib, or if it cannot be written.
    """
    figure = new_figure(11, 2.6)
    axes = figure.subplots()
    for (what, *_), color in zip(_SPANS, _COLORS, strict=True):
        own = [span for span in result.spans if span.what == what and span.layer < layers]
        for branch in {span.branch for span in own}:
            bars = [(span.start * 1e3, (span.end - span.start) * 1e3) for span in own if span.branch == branch]
            axes.broken_barh(bars, (1 - branch - 0.35, 0.7), color=color, label=what)
    axes.set_yticks([1, 0], ["compute", "fetch"])
    axes.set_xlabel(f"ms; {result.environment['device']}, stamps included")
    axes.set_title(
        f"{result.model}, {result.expert_slots} of the experts resident: the first {layers} layers of a step",
        fontsize=10,
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncol=6, fontsize=8, frameon=False)
    save_figure(figure, path)
