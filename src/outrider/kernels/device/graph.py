"""Capture of queued work as a CUDA graph."""

from collections.abc import Callable

import torch


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """What replays `run`. It runs once before, to compile what has to be compiled: set the rows to none before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
