"""The composition root: from a model's name and options to a running engine. Nothing else wires parts together."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.checkpoint import Checkpoint, locate, open_checkpoint
from outrider.checkpoint.draft import DraftCheckpoint, open_draft
from outrider.checkpoint.locate import locate_draft
from outrider.config import DriverName, EngineOptions, ModelConfig, format_bytes
from outrider.core import Progress, no_progress
from outrider.engine.build_host import Parts, build_host
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.experts.budget import slots_per_layer
from outrider.experts.host_provider import HostProvider
from outrider.experts.layout import torch_dtype
from outrider.experts.store import MappedStore
from outrider.kvcache.pages import PAGE_SIZE, PagePool, pages_for
from outrider.kvcache.storage import KVShape, KVStorage, kv_bytes_per_token
from outrider.models.decoder import Decoder
from outrider.models.layers import Weights
from outrider.models.target import TargetModel
from outrider.route_ahead.statistics import RouteAheadStatistics
from outrider.scheduler.scheduler import Scheduler
from outrider.spec.drafter import Drafter, DrafterModel
from outrider.spec.session import Rounds, SpecSession

if TYPE_CHECKING:
    from outrider.experts.device_provider import DeviceProvider
    from outrider.models.device_decoder import DeviceDecoder

DEFAULT_CONTEXT = 4096


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
    most_rows = _most_rows(options, draft)
    max_context = _context(config, options)
    prompt_rows = _prompt_rows(options, max_context)
    driver, note = _driver(config, options, most_rows, device, dtype)
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    mapped = MappedStore(checkpoint)
    slots = slots_per_layer(config, options.expert_slots, mapped.layout.record_nbytes)
    resident = min(slots.values()) == config.num_experts
    kv_tokens = options.kv_tokens or 4 * max_context
    record = mapped.layout.record_nbytes
    extra: dict[str, int] = {}
    if driver == "device":
        extra = _device_terms(config, options, draft, most_rows, prompt_rows, list(slots.values()), record, dtype)
    _check_memory(checkpoint, draft, mapped, sum(slots.values()), extra, resident, kv_tokens, device, dtype)
    loader = _DenseLoader(checkpoint.dense_elements(), "loading dense weights", device, dtype, progress)
    pool = PagePool(pages_for(kv_tokens))
    kv = _pages(config, pool, dtype, device)
    parts = Parts(checkpoint, mapped, slots, loader.of(checkpoint.dense), kv, options, device, dtype, max_context)
    decoder: Decoder | DeviceDecoder
    provider: HostProvider | DeviceProvider
    target: TargetModel
    drafter: DrafterModel | None = None

    def shared(decoder: "Decoder | DeviceDecoder") -> tuple[Weights, Tensor, Tensor, Tensor | None]:
        assert draft
        own = _DenseLoader(draft.elements(), "loading the draft", device, dtype, progress)
        return _shared_with(draft, decoder, own.of(draft.tensor))

    if driver == "device":
        from outrider.engine.build_device import build_device

        drafting = (draft.config, shared) if draft else None
        decoder, provider, target, drafter, probed = build_device(
            parts, drafting, most_rows, prompt_rows, _width(options, draft), progress
        )
    else:
        decoder, provider, target, probed = build_host(parts, progress)
        if draft:
            drafter = Drafter(draft.config, *shared(decoder), _pages(draft.config, pool, dtype, device))
    route_ahead = RouteAheadStatistics(provider.expert_nbytes) if options.route_ahead_stats else None
    width = options.width if isinstance(options.width, int) else None
    rounds = Rounds(target, drafter, width, route_ahead)
    streamed = prompt_rows if driver == "device" else 0
    scheduler = Scheduler[SpecSession](pool, options.max_batch, options.prefill_chunk, streamed)
    return Engine(checkpoint, decoder, provider, kv, rounds, scheduler, max_context, probed, route_ahead, note)


def _driver(
    config: ModelConfig, options: EngineOptions, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[DriverName, str | None]:
    """Who drives the experts, and why it is not the device where one would expect it.

    Raises: ConfigError if the device is asked to and cannot.
    """
    if options.driver == "host" or (options.driver == "auto" and device.type != "cuda"):
        return "host", None
    from outrider.engine.build_device import unfit_for_device  # Triton takes its time, and not every system has it

    why = unfit_for_device(config, rows, device, dtype)
    if why is None:
        return "device", None
    if options.driver == "device":
        raise ConfigError(f"driver is 'device', but {why}; use --driver host")
    return "host", f"experts are driven by the host, which is slower: the device could, but {why}"


def _device_terms(
    config: ModelConfig,
    options: EngineOptions,
    draft: DraftCheckpoint | None,
    rows: int,
    prompt_rows: int,
    slots: list[int],
    record: int,
    dtype: torch.dtype,
) -> dict[str, int]:
    """What a device that drives needs beside weights, slots and KV, in bytes."""
    from outrider.engine.build_device import working_nbytes
    from outrider.experts.device_provider import places_for, staging_slots

    taps = draft.config.tap_layers if draft else ()
    passing = staging_slots(config.num_experts, config.experts_per_token, rows)
    passing += 2 * places_for(config.num_experts, slots) if prompt_rows else 0
    terms = {f"{passing} places for experts that pass": passing * record} if passing else {}
    return terms | working_nbytes(config, rows, prompt_rows, options.max_batch, taps, dtype)


def _prompt_rows(options: EngineOptions, max_context: int) -> int:
    """Rows of the longest chunk of a long prompt, 0 if there are none."""
    most = -(-max_context // 512) * 512
    return 0 if max_context <= options.prefill_chunk else min(options.stream_chunk, most)


def _most_rows(options: EngineOptions, draft: DraftCheckpoint | None) -> int:
    """The most rows of one step."""
    return max(options.prefill_chunk, options.max_batch * _width(options, draft))


def _width(options: EngineOptions, draft: DraftCheckpoint | None) -> int:
    """The most rows of a sequence in a verify."""
    return options.width if isinstance(options.width, int) else draft.config.num_drafts + 1 if draft else 1


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


def _shared_with(
    draft: DraftCheckpoint, decoder: "Decoder | DeviceDecoder", weights: Weights
) -> tuple[Weights, Tensor, Tensor, Tensor | None]:
    """What a drafter is made of: weights, the target's embedding, a head, and target ids of a vocabulary of its own."""
    embedding = decoder.embedding
    draft.check_copies(embedding, decoder.head)
    ids = draft.ids
    own = draft.config.draft_vocab_size != draft.config.vocab_size
    head = weights("lm_head.weight") if own else decoder.head
    return weights, embedding, head, None if ids is None else ids.to(embedding.device)


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
    extra: dict[str, int],
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
    terms |= extra
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
