"""Capture of queued work as a CUDA graph."""

import gc
from collections.abc import Callable

import torch


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """What replays `run`. It runs once before, to compile what has to be compiled: set the rows to none before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # a graph of an engine that is gone, destroyed during the capture, would end it
    try:
        with torch.cuda.graph(graph):
            run()
    finally:
        if collects:
            gc.enable()
    return graph.replay
