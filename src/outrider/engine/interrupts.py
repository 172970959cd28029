"""Ctrl-C between steps, never within one.

An interrupt inside a step could leave a slot without its fetch, or a token between the model and its sequence. It is
kept until the step is over; a second one is not, so that a step that takes minutes can still be broken off (the engine
should not be used afterwards).
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise a KeyboardInterrupt that arrives inside at the end; outside the main thread this does nothing."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []

    def keep(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, usual)
        arrived.append((number, frame))

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if arrived:
            usual(*arrived[0])
