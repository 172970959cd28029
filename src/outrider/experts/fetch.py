"""The copy thread: fetches in three bands, chunk by chunk, so that on-demand work never waits for a whole expert.

Contract: after every chunk the thread looks again for the fetch of the lowest band (first submitted first), so a demand
waits for at most the chunks already under way. A promoted fetch keeps what it has copied. Counters that the thread
changes are guarded by the queue's lock; everything else belongs to the caller's thread.
"""

import heapq
import itertools
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core import Band, ExpertKey
from outrider.errors import OutriderError
from outrider.experts.store import ExpertStore


@dataclass(eq=False)
class Fetch:
    """One expert on its way into a slot.

    `demanded`: a step waits for it, or has. `copied` counts record bytes, `ahead` payload bytes that came undemanded.
    """

    key: ExpertKey
    record: Tensor
    band: Band
    demanded: bool
    fence: Any = None
    order: int = 0
    copied: int = 0
    ahead: int = 0
    done: bool = False
    cancelled: bool = False
    ready: Any = None


class CopyBackend(Protocol):
    """How bytes get into a slot's memory on one kind of device."""

    chunk_nbytes: int

    def fence(self) -> Any:
        """A mark of all compute issued so far; a slot must not be overwritten before it has passed."""

    def copy(self, store: ExpertStore, fetch: Fetch, start: int, stop: int) -> int:
        """Copy one chunk; returns bytes moved. Sets `fetch.ready` to what `arrived` and `join` need."""

    def arrived(self, fetch: Fetch) -> bool:
        """Whether the bytes of a done fetch are all there."""

    def open_wait(self) -> Any:
        """The compute side is about to wait for a fetch."""

    def join(self, fetch: Fetch, opened: Any) -> None:
        """Make later compute see the bytes of a done fetch."""

    def exposed_seconds(self) -> float:
        """Time that compute has waited between `open_wait` and `join` since the last `reset`."""

    def reset(self) -> None:
        """Forget the time waited."""

    def close(self) -> None:
        """Wait for chunks that are still under way."""


class HostBackend:
    """Slots in ordinary memory: a copy is done when it returns."""

    def __init__(self, chunk_nbytes: int = 1 << 20) -> None:
        self.chunk_nbytes = chunk_nbytes
        self._exposed = 0.0

    def fence(self) -> None:
        return None

    def copy(self, store: ExpertStore, fetch: Fetch, start: int, stop: int) -> int:
        return store.copy_range(fetch.key, start, stop, fetch.record)

    def arrived(self, fetch: Fetch) -> bool:
        return fetch.done

    def open_wait(self) -> float:
        return time.perf_counter()

    def join(self, fetch: Fetch, opened: float) -> None:
        self._exposed += time.perf_counter() - opened

    def exposed_seconds(self) -> float:
        return self._exposed

    def reset(self) -> None:
        self._exposed = 0.0

    def close(self) -> None:
        pass


class CudaBackend:
    """Slots in device memory: chunks go through a stream of their own, at most two in flight.

    Two keep the copy engine busy, and a demand overtakes everything that has not been issued yet.
    """

    def __init__(self, device: torch.device, chunk_nbytes: int = 1 << 20) -> None:
        self.chunk_nbytes = chunk_nbytes
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._issued: list[torch.cuda.Event] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._exposed = 0.0

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, store: ExpertStore, fetch: Fetch, start: int, stop: int) -> int:
        if len(self._issued) == 2:
            self._issued.pop(0).synchronize()
        with torch.cuda.stream(self._stream):
            if start == 0:
                self._stream.wait_event(fetch.fence)
            moved = store.copy_range(fetch.key, start, stop, fetch.record)
        fetch.ready = torch.cuda.Event()
        fetch.ready.record(self._stream)
        self._issued.append(fetch.ready)
        return moved

    def arrived(self, fetch: Fetch) -> bool:
        return fetch.done and bool(fetch.ready.query())

    def open_wait(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self, fetch: Fetch, opened: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(fetch.ready)
        closed = torch.cuda.Event(enable_timing=True)
        closed.record(stream)
        self._waits.append((opened, closed))

        if len(self._waits) > 1000:
            self._settle(500)  # these have passed long ago, so the stream is not held up

    def exposed_seconds(self) -> float:
        self._settle(len(self._waits))
        return self._exposed

    def reset(self) -> None:
        self._waits.clear()
        self._exposed = 0.0

    def close(self) -> None:
        self._stream.synchronize()

    def _settle(self, count: int) -> None:
        """Turn the first `count` pairs of events into seconds."""
        for opened, closed in self._waits[:count]:
            closed.synchronize()
            self._exposed += opened.elapsed_time(closed) / 1e3
        del self._waits[:count]


@dataclass
class FetchQueue:
    """Owns the copy thread. `h2d_bytes` counts bytes moved by band since the last `reset_counters`."""

    store: ExpertStore
    backend: CopyBackend
    h2d_bytes: dict[Band, int] = field(default_factory=lambda: dict.fromkeys(Band, 0))
    prefetched_bytes: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[Band, int, int, Fetch]] = []
        self._ticket = itertools.count()
        self._copying: Fetch | None = None
        self._failure: BaseException | None = None
        self._closed = self._dead = False
        self._thread = threading.Thread(target=self._run, name="outrider-copy", daemon=True)
        self._thread.start()

    def submit(self, fetches: Iterable[Fetch]) -> None:
        """Queue `fetches` in their order, under one lock."""
        with self._changed:
            for fetch in fetches:
                fetch.order = next(self._ticket)
                self._push(fetch)
            self._changed.notify_all()

    def promote(self, fetch: Fetch, band: Band) -> bool:
        """Raise a fetch that is not done to a more urgent band; whether that changed anything."""
        with self._changed:
            return self._promote(fetch, band)

    def demand(self, fetch: Fetch) -> bool:
        """A step needs this fetch: from now on it is on demand; whether that raised its band."""
        with self._changed:
            fetch.demanded = True
            return self._promote(fetch, Band.ON_DEMAND)

    def cancel(self, fetches: Iterable[Fetch]) -> None:
        """Take back those of `fetches` that are not done; on return no byte of them is being copied."""
        with self._changed:
            taken = [fetch for fetch in fetches if not fetch.done]
            for fetch in taken:
                fetch.cancelled = True
            self._changed.wait_for(lambda: self._copying not in taken or self._dead)

    def wait(self, fetch: Fetch) -> None:
        """Block until `fetch` is done and visible to compute; counts the time as exposed.

        Raises: OutriderError if the copy thread could not read the expert.
        """
        opened = self.backend.open_wait()
        with self._changed:
            self._changed.wait_for(lambda: fetch.done or fetch.cancelled or self._dead)
            if not fetch.done:
                reason = self._failure or ("it was cancelled" if fetch.cancelled else "the engine is closed")
                raise OutriderError(f"expert {tuple(fetch.key)} could not be copied: {reason}") from self._failure
        self.backend.join(fetch, opened)

    def reset_counters(self, fetches: Iterable[Fetch]) -> None:
        """Zero the counters; what `fetches` have brought so far can no longer become waste."""
        with self._changed:
            self.h2d_bytes = dict.fromkeys(Band, 0)
            self.prefetched_bytes = 0
            for fetch in fetches:
                fetch.ahead = 0
        self.backend.reset()

    def close(self) -> None:
        """Stop the thread after the chunk under way; on return nothing reads the store or writes a slot."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self.backend.close()

    def _run(self) -> None:
        try:
            while (fetch := self._next()) is not None:
                start, band, ahead = fetch.copied, fetch.band, not fetch.demanded
                stop = min(start + self.backend.chunk_nbytes, self.store.layout.record_nbytes)
                moved = self.backend.copy(self.store, fetch, start, stop)
                self._account(fetch, start, stop, moved, band, ahead)
        except (RuntimeError, OSError) as error:  # torch reports device errors as RuntimeError
            self._failure = error
        finally:
            with self._changed:
                self._failure = self._failure or sys.exception()
                self._dead = True
                self._changed.notify_all()

    def _promote(self, fetch: Fetch, band: Band) -> bool:
        if fetch.done or fetch.band <= band:
            return False
        fetch.band, fetch.order = band, next(self._ticket)
        self._push(fetch)
        self._changed.notify_all()
        return True

    def _push(self, fetch: Fetch) -> None:
        heapq.heappush(self._heap, (fetch.band, fetch.order, next(self._ticket), fetch))

    def _next(self) -> Fetch | None:
        """The most urgent live fetch, marked as being copied; None when the queue is closed."""
        with self._changed:
            while not self._closed:
                while self._heap:
                    band, order, _, fetch = heapq.heappop(self._heap)
                    # A promotion leaves the entry of the old band behind.
                    if (band, order) == (fetch.band, fetch.order) and not (fetch.done or fetch.cancelled):
                        self._copying = fetch
                        return fetch
                self._changed.wait()
            return None

    def _account(self, fetch: Fetch, start: int, stop: int, moved: int, band: Band, ahead: bool) -> None:
        with self._changed:
            fetch.copied = stop
            self.h2d_bytes[band] += moved
            if ahead:
                payload = self.store.layout.payload_between(start, stop)
                fetch.ahead += payload
                self.prefetched_bytes += payload
            # A fetch that was cancelled under way is not done, even if this was its last chunk.
            fetch.done = stop == self.store.layout.record_nbytes and not fetch.cancelled
            if not (fetch.done or fetch.cancelled):
                self._push(fetch)
            self._copying = None
            self._changed.notify_all()
