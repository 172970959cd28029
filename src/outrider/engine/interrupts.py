"""Ctrl-C between steps, never within one.

An interrupt inside a step could leave a slot without its fetch, or a token between the model and its sequence. It is
kept until the step is over; a second one is not, so that a step that takes minutes can still be broken off (the engine
should not be used afterwards).
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Handle a SIGINT or SIGTERM that arrives inside at the end, if a Python function handles it at all.

    Outside the main thread this does nothing.
    """
    usual: dict[int, Callable[[int, FrameType | None], Any]] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in _INTERRUPTS}
        usual = {int(number): handler for number, handler in handlers.items() if callable(handler)}
    arrived: list[tuple[int, FrameType | None]] = []

    def keep(number: int, frame: FrameType | None) -> None:
        signal.signal(number, usual[number])
        arrived.append((number, frame))

    for number in usual:
        signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        for number, frame in arrived[:1]:
            usual[number](number, frame)
