"""Expert memory that the host drives: store, copy thread, provider, and the eager target."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from outrider.checkpoint import Checkpoint
from outrider.config import EngineOptions
from outrider.core import ExpertKey, Progress
from outrider.experts.fetch import CopyBackend, CudaBackend, HostBackend
from outrider.experts.host_provider import HostProvider
from outrider.experts.store import ExpertStore, MappedStore, PinnedStore
from outrider.kvcache.storage import KVStorage
from outrider.models.decoder import Decoder
from outrider.models.layers import Weights
from outrider.models.target import Target

_PROBE_BYTES = 64 << 20


@dataclass(frozen=True)
class Parts:
    """What either driver builds on.

    Attributes:
        slots: of each MoE layer. weights: dense tensors, loaded when asked for.
        pinned: whether absent experts lie in pinned memory; if not, they are read from the checkpoint's files.
    """

    checkpoint: Checkpoint
    mapped: MappedStore
    slots: dict[int, int]
    weights: Weights
    kv: KVStorage
    options: EngineOptions
    device: torch.device
    dtype: torch.dtype
    max_context: int
    pinned: bool

    @property
    def resident(self) -> bool:
        """Whether every expert has a slot."""
        return min(self.slots.values()) == self.checkpoint.config.num_experts


def build_host(parts: Parts, progress: Progress) -> tuple[Decoder, HostProvider, Target, float | None]:
    """Decoder, provider and target; bytes per second of the copy path, None if it was not measured."""
    config, device, options = parts.checkpoint.config, parts.device, parts.options
    decoder = Decoder(config, parts.weights)
    # Experts that all fit are read once, straight into their slots: no second copy in pinned memory.
    store = PinnedStore(parts.mapped, progress) if parts.pinned else parts.mapped
    backend = CudaBackend(device) if device.type == "cuda" else HostBackend()
    provider = HostProvider(store, parts.slots, config.num_experts, options.policy, backend, device)
    if parts.resident:
        _preload(provider, parts.checkpoint.expert_keys(), len(store.expert_nbytes), progress)
    probed = _probe(provider, store, backend) if options.probe_copies and not parts.resident else None
    return decoder, provider, Target(decoder, parts.kv, provider, device), probed


def _preload(provider: HostProvider, keys: Iterator[ExpertKey], total: int, progress: Progress) -> None:
    for done, _ in enumerate(provider.preload(keys), start=1):
        nbytes = provider.store.layout.record_nbytes
        progress("loading experts", done * nbytes, total * nbytes)
    provider.reset_counters()


def _probe(provider: HostProvider, store: ExpertStore, backend: CopyBackend) -> float:
    """Bytes per second of the engine's own copy path, the faster of two passes over some experts.

    The first pass also reads them from disk; the slots are emptied afterwards.
    """
    record = store.layout.record_nbytes
    room = provider.keys_that_fit()
    best = 0.0
    for _ in range(2):
        keys = islice(room, max(1, _PROBE_BYTES // record))
        started = time.perf_counter()
        moved = sum(provider.preload(keys))
        if isinstance(backend, CudaBackend):
            torch.cuda.synchronize()
        best = max(best, moved / (time.perf_counter() - started))
        provider.reset_cache()
    provider.reset_counters()
    return best
