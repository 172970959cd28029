"""Times of work on a GPU: CUDA events around it, medians with their spread."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Times:
    """Seconds: median, fastest and slowest of `repeats`."""

    median: float
    fastest: float
    slowest: float
    repeats: int

    @classmethod
    def of(cls, seconds: list[float], per: int = 1) -> "Times":
        """Of measured `seconds`, each of which `per` runs took."""
        each = [s / per for s in seconds]
        return cls(median(each), min(each), max(each), len(each))


def time_graph(run: Callable[[], None], per: int = 1, repeats: int = 9, warm_up: int = 3) -> Times:
    """Capture `run`, which does its work `per` times, and time replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(warm_up):
        graph.replay()
    return Times.of([_timed(graph.replay) for _ in range(repeats)], per)


def time_eager(run: Callable[[], None], repeats: int = 9, warm_up: int = 3) -> Times:
    """Time `run` as it is launched, for work that is long beside its launch."""
    for _ in range(warm_up):
        run()
    return Times.of([_timed(run) for _ in range(repeats)])


def _timed(run: Callable[[], None]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
