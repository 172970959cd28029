"""The composition root: from a model's name and options to a running engine. Nothing else wires parts together."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.checkpoint import locate, open_checkpoint
from outrider.checkpoint.draft import DraftCheckpoint, open_draft
from outrider.checkpoint.locate import locate_draft
from outrider.config import DriverName, EngineOptions, ModelConfig, format_bytes
from outrider.core import Progress, no_progress
from outrider.engine.build_host import Parts, build_host
from outrider.engine.engine import Engine
from outrider.engine.faults import device_faults
from outrider.engine.memory_needs import MemoryNeeds
from outrider.engine.memory_plan import RUNTIME_NBYTES
from outrider.errors import ConfigError
from outrider.experts.host_provider import HostProvider
from outrider.experts.layout import torch_dtype
from outrider.experts.store import MappedStore
from outrider.kvcache.pages import PAGE_SIZE, PagePool, pages_for
from outrider.kvcache.storage import KVShape, KVStorage
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


def build_engine(model: str, options: EngineOptions | None = None, progress: Progress = no_progress) -> Engine:
    """Open, check and load `model` (`demo`, a folder or a hub id).

    Raises: OutriderError (CheckpointError, ConfigError, DeviceError) in one sentence, before anything is left
        half-built.
    """
    with device_faults("the engine was built"), ExitStack() as held:
        engine = _build(model, options or EngineOptions(), held, progress)
        engine.at_close = held.pop_all().close
        return engine


@torch.inference_mode(mode=False)  # slots and pages are written outside of it, whatever the caller is in
def _build(model: str, options: EngineOptions, held: ExitStack, progress: Progress) -> Engine:
    checkpoint = open_checkpoint(locate(model))
    config = checkpoint.config
    draft = _open_draft(options, model, config)
    device = _device(options)
    dtype = _dtype(options, device)
    most_rows = _most_rows(options, draft)
    max_context = _context(config, options)
    prompt_rows = _prompt_rows(options, max_context)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    mapped = MappedStore(checkpoint)
    kv_tokens = options.kv_tokens or 4 * max_context
    blocks = options.max_batch * draft.config.block_size if draft else 0
    driver, note = _driver(config, options, max(most_rows, blocks), device, dtype)

    def needs_of(driver: DriverName) -> MemoryNeeds:
        return MemoryNeeds(
            checkpoint, draft, mapped, options, driver == "device", kv_tokens, max_context, most_rows, prompt_rows,
            _width(options, draft), device, dtype,
        )  # fmt: skip

    slots = needs_of(driver).slots()
    pinned = needs_of(driver).pinned(slots)
    if options.ram is not None and pinned > options.ram:
        driver, note = _unpinned(options, pinned)
        slots, pinned = needs_of(driver).slots(), 0
    needs_of(driver).check(slots, pinned)
    if options.gpu_memory is not None:
        held.enter_context(_bounded(device, options.gpu_memory))
    loader = _DenseLoader(checkpoint.dense_elements(), "loading dense weights", device, dtype, progress)
    pool = PagePool(pages_for(kv_tokens))
    kv = _pages(config, pool, dtype, device)
    parts = Parts(
        checkpoint, mapped, slots, loader.of(checkpoint.dense), kv, options, device, dtype, max_context, pinned > 0
    )
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


def _unpinned(options: EngineOptions, pinned: int) -> tuple[DriverName, str]:
    """Who drives where the experts may not all be pinned.

    Raises: ConfigError if the device is asked to.
    """
    assert options.ram is not None
    found = f"{format_bytes(pinned)} of experts would have to be pinned and ram allows {format_bytes(options.ram)}"
    if options.driver == "device":
        raise ConfigError(f"driver is 'device', but {found}; raise --ram, or use --driver host")
    return "host", f"experts are driven by the host and read from the checkpoint's files, which is slower: {found}"


@contextmanager
def _bounded(device: torch.device, gpu_memory: int) -> Iterator[None]:
    """Meanwhile this process allocates no more than that, less what CUDA itself takes; more is an error, not a leak."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (gpu_memory - RUNTIME_NBYTES) / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


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
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        device = torch.device(options.device)
    if device.type == "cpu" and (options.gpu_memory is not None or options.ram is not None):
        raise ConfigError("gpu_memory and ram bound what a GPU uses, and the device is a CPU; leave them out")
    return device


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
