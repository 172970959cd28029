"""The composition root: from a model's name and options to a running engine. Nothing else wires parts together."""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from outrider.checkpoint import Checkpoint, locate, open_checkpoint
from outrider.checkpoint.draft import DraftCheckpoint, open_draft
from outrider.checkpoint.locate import locate_draft
from outrider.config import EngineOptions, ModelConfig, format_bytes
from outrider.core import ExpertKey, Progress, no_progress
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.experts.budget import slots_per_layer
from outrider.experts.fetch import CopyBackend, CudaBackend, HostBackend
from outrider.experts.host_provider import HostProvider
from outrider.experts.layout import torch_dtype
from outrider.experts.store import ExpertStore, MappedStore, PinnedStore
from outrider.kvcache.pages import PAGE_SIZE, PagePool, pages_for
from outrider.kvcache.storage import KVShape, KVStorage, kv_bytes_per_token
from outrider.models.decoder import Decoder
from outrider.models.layers import Weights
from outrider.models.target import Target
from outrider.route_ahead.statistics import RouteAheadStatistics
from outrider.scheduler.scheduler import Scheduler
from outrider.spec.drafter import Drafter
from outrider.spec.session import Rounds, SpecSession

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
    draft = _open_draft(options, model, config)
    device = _device(options)
    dtype = _dtype(options, device)
    max_context = _context(config, options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    mapped = MappedStore(checkpoint)
    slots = slots_per_layer(config, options.expert_slots, mapped.layout.record_nbytes)
    resident = min(slots.values()) == config.num_experts
    kv_tokens = options.kv_tokens or 4 * max_context
    _check_memory(checkpoint, draft, mapped, sum(slots.values()), resident, kv_tokens, device, dtype)
    loader = _DenseLoader(checkpoint.dense_elements(), "loading dense weights", device, dtype, progress)
    decoder = Decoder(config, loader.of(checkpoint.dense))
    pool = PagePool(pages_for(kv_tokens))
    kv = _pages(config, pool, dtype, device)
    drafter = None
    if draft:
        loader = _DenseLoader(draft.elements(), "loading the draft", device, dtype, progress)
        drafter = _drafter(draft, decoder, loader.of(draft.tensor), _pages(draft.config, pool, dtype, device))
    # Experts that all fit are read once, straight into their slots: no second copy in pinned memory.
    store = PinnedStore(mapped, progress) if device.type == "cuda" and not resident else mapped
    backend = CudaBackend(device) if device.type == "cuda" else HostBackend()
    provider = HostProvider(store, slots, config.num_experts, options.policy, backend, device)
    if resident:
        _preload(provider, checkpoint.expert_keys(), len(store.expert_nbytes), progress)
    probed = _probe(provider, store, backend) if options.probe_copies and not resident else None
    route_ahead = RouteAheadStatistics(store.expert_nbytes) if options.route_ahead_stats else None
    width = options.width if isinstance(options.width, int) else None
    rounds = Rounds(Target(decoder, kv, provider, device), drafter, width, route_ahead)
    scheduler = Scheduler[SpecSession](pool, options.max_batch, options.prefill_chunk)
    return Engine(checkpoint, decoder, provider, kv, rounds, scheduler, max_context, probed, route_ahead)


class _DenseLoader:
    """Reads dense tensors into the engine's dtype and device, with progress in the bytes that they take there."""

    def __init__(self, elements: int, what: str, device: torch.device, dtype: torch.dtype, progress: Progress) -> None:
        self._what, self._device, self._dtype, self._progress = what, device, dtype, progress
        self._done, self._total = 0, elements * dtype.itemsize

    def of(self, stored: Weights) -> Weights:
        """`stored`, made to load."""

        def load(name: str) -> Tensor:
            # `copy`: a view would keep the weights in page cache, where the kernel may drop them between two steps.
            weight = stored(name).to(device=self._device, dtype=self._dtype, copy=True)
            self._done += weight.nbytes
            self._progress(self._what, self._done, self._total)
            return weight

        return load


def _open_draft(options: EngineOptions, model: str, config: ModelConfig) -> DraftCheckpoint | None:
    if options.draft is None:
        if isinstance(options.width, int):
            raise ConfigError(f"width is {options.width}, but there is no draft to verify; give --draft")
        return None
    if options.width == "off":
        return None
    draft = open_draft(locate_draft(options.draft, model), config)
    most = draft.config.num_drafts + 1
    if isinstance(options.width, int) and options.width > most:
        raise ConfigError(f"width is {options.width}, but a block of this draft has {most} rows; give at most that")
    return draft


def _drafter(draft: DraftCheckpoint, decoder: Decoder, weights: Weights, context: KVStorage) -> Drafter:
    embedding = decoder.embedding
    draft.check_copies(embedding, decoder.head)
    ids = draft.ids
    own = draft.config.draft_vocab_size != draft.config.vocab_size
    return Drafter(
        draft.config,
        weights,
        embedding,
        weights("lm_head.weight") if own else decoder.head,
        None if ids is None else ids.to(embedding.device),
        context,
    )


def _pages(config: KVShape, pool: PagePool, dtype: torch.dtype, device: torch.device) -> KVStorage:
    try:
        return KVStorage(config, pool, dtype, device)
    except MemoryError as error:
        tokens = pool.num_pages * PAGE_SIZE
        raise ConfigError(f"KV pages for {tokens} tokens are more than this machine can address") from error


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
    draft: DraftCheckpoint | None,
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
    dense = checkpoint.dense_elements() * dtype.itemsize
    terms = {"dense weights": dense, f"{slots} expert slots": slots * store.layout.record_nbytes}
    kv = kv_bytes_per_token(checkpoint.config, dtype)
    if draft:
        terms["the draft"] = draft.elements() * dtype.itemsize
        kv += kv_bytes_per_token(draft.config, dtype)
    if device.type == "cuda":
        terms[f"KV of {kv_tokens} tokens"] = kv_tokens * kv
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
