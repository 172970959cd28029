"""The composition root: from a model's name and options to a running engine. Nothing else wires parts together."""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from outrider.checkpoint import Checkpoint, locate, open_checkpoint
from outrider.config import EngineOptions, ModelConfig, format_bytes
from outrider.core import ExpertKey, Progress, no_progress
from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.errors import ConfigError
from outrider.experts.budget import slots_per_layer
from outrider.experts.fetch import CopyBackend, CudaBackend, HostBackend
from outrider.experts.host_provider import HostProvider
from outrider.experts.layout import torch_dtype
from outrider.experts.store import ExpertStore, MappedStore, PinnedStore
from outrider.kvcache.pages import pages_for
from outrider.kvcache.storage import KVStorage, kv_bytes_per_token
from outrider.models.decoder import Decoder
from outrider.scheduler.scheduler import Scheduler

DEFAULT_CONTEXT = 4096
_PROBE_BYTES = 64 << 20


@torch.inference_mode(mode=False)  # slots and pages are written outside of it, whatever the caller is in
def build_engine(model: str, options: EngineOptions | None = None, progress: Progress = no_progress) -> Engine:
    """Open, check and load `model` (`demo`, a folder or a hub id).

    Raises: OutriderError (CheckpointError, ConfigError) in one sentence, before anything is left half-built.
    """
    options = options or EngineOptions()
    checkpoint = open_checkpoint(locate(model))
    config = checkpoint.config
    device = _device(options)
    dtype = _dtype(options, device)
    max_context = _context(config, options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    mapped = MappedStore(checkpoint)
    slots = slots_per_layer(config, options.expert_slots, mapped.layout.record_nbytes)
    resident = min(slots.values()) == config.num_experts
    kv_tokens = options.kv_tokens or 4 * max_context
    _check_memory(checkpoint, mapped, sum(slots.values()), resident, kv_tokens, device, dtype)
    decoder = Decoder(config, _DenseLoader(checkpoint, device, dtype, progress))
    try:
        kv = KVStorage(config, pages_for(kv_tokens), dtype, device)
    except MemoryError as error:
        raise ConfigError(f"KV pages for {kv_tokens} tokens are more than this machine can address") from error
    # Experts that all fit are read once, straight into their slots: no second copy in pinned memory.
    store = PinnedStore(mapped, progress) if device.type == "cuda" and not resident else mapped
    backend = CudaBackend(device) if device.type == "cuda" else HostBackend()
    provider = HostProvider(store, slots, config.num_experts, options.policy, backend, device)
    if resident:
        _preload(provider, checkpoint.expert_keys(), len(store.expert_nbytes), progress)
    probed = _probe(provider, store, backend) if options.probe_copies and not resident else None
    scheduler = Scheduler(kv.pool, options.max_batch, options.prefill_chunk)
    runner = Runner(decoder, kv, provider, device)
    return Engine(checkpoint, decoder, provider, kv, scheduler, runner, max_context, probed)


class _DenseLoader:
    """Reads dense tensors into the engine's dtype and device, with progress in the bytes that they take there."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress) -> None:
        self._checkpoint, self._device, self._dtype, self._progress = checkpoint, device, dtype, progress
        self._done, self._total = 0, checkpoint.dense_elements() * dtype.itemsize

    def __call__(self, name: str) -> Tensor:
        # `copy`: a view would keep the weights in page cache, where the kernel may drop them between two steps.
        weight = self._checkpoint.dense(name).to(device=self._device, dtype=self._dtype, copy=True)
        self._done += weight.nbytes
        self._progress("loading dense weights", self._done, self._total)
        return weight


def _device(options: EngineOptions) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but no CUDA GPU is usable here; use --device cpu")
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(options.device)


def _dtype(options: EngineOptions, device: torch.device) -> torch.dtype:
    if options.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch_dtype(options.dtype)


def _context(config: ModelConfig, options: EngineOptions) -> int:
    if options.max_context is None:
        return min(config.max_positions, DEFAULT_CONTEXT)
    if options.max_context > config.max_positions:
        raise ConfigError(
            f"max_context is {options.max_context}, but the model was made for {config.max_positions} positions"
        )
    return options.max_context


def _check_memory(
    checkpoint: Checkpoint,
    store: MappedStore,
    slots: int,
    resident: bool,
    kv_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Refuse what cannot fit before anything is allocated. KV on a CPU costs memory when it is used, so not here.

    Raises: ConfigError with every term of the sum.
    """
    config = checkpoint.config
    dense = checkpoint.dense_elements() * dtype.itemsize
    terms = {"dense weights": dense, f"{slots} expert slots": slots * store.layout.record_nbytes}
    if device.type == "cuda":
        terms[f"KV of {kv_tokens} tokens"] = kv_tokens * kv_bytes_per_token(config, dtype)
        _refuse_over("GPU memory", terms, torch.cuda.mem_get_info(device)[0])
        if not resident:
            _refuse_over("RAM", {"pinned experts": sum(store.expert_nbytes.values())}, available_ram())
    else:
        _refuse_over("RAM", terms, available_ram())


def _refuse_over(what: str, terms: dict[str, int], available: int | None) -> None:
    needed = sum(terms.values())
    if available is not None and needed > available:
        listed = " + ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in terms.items())
        raise ConfigError(
            f"{format_bytes(available)} of {what} are free, and {listed} come to {format_bytes(needed)}; "
            "lower --expert-slots or --max-context"
        )


def available_ram() -> int | None:
    """Bytes that can be allocated without swapping, None where the system does not say."""
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


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
