"""Expert memory that the device drives: packed records, slots, provider, and the captured target."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice

import torch
from torch import Tensor

from outrider.config import DraftConfig, ModelConfig
from outrider.core import Progress
from outrider.engine.build_host import Parts
from outrider.engine.device_target import DeviceTarget
from outrider.experts.device_provider import DeviceProvider, places_for, staging_slots
from outrider.experts.home import Home, PackedRecords
from outrider.experts.layout import ExpertLayout
from outrider.kernels.device.experts import ExpertKernel, ExpertShape
from outrider.kernels.device.mxfp4 import Mxfp4Experts
from outrider.kernels.device.plain import PlainExperts
from outrider.kvcache.pages import pages_for
from outrider.kvcache.storage import KVStorage
from outrider.models.device_decoder import Buffers, DeviceDecoder, LongBuffers
from outrider.models.layers import Weights
from outrider.models.rows import BUCKETS, bucket_for
from outrider.spec.device_drafter import DeviceDrafter, block_pages, drafter_nbytes

_PROBE_BYTES = 512 << 20

Draft = tuple[DraftConfig, Callable[[DeviceDecoder], tuple[Weights, Tensor, Tensor, Tensor | None]]]
"""A draft and what its drafter is made of: weights, embedding, head, and target ids of a vocabulary of its own."""


def unfit_for_device(config: ModelConfig, rows: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the device cannot drive steps of up to `rows` rows of this model, None if it can."""
    if device.type == "cuda" and dtype != torch.bfloat16:
        return "its kernels compute in bfloat16"
    if device.type != "cuda" and config.mxfp4_experts:
        return "MXFP4 experts need a CUDA GPU there"
    if config.mxfp4_experts and find_spec("cuda") is None:
        return "cuda-core, which compiles its MXFP4 kernel, is not installed"
    if not all(config.is_moe):
        return "this model has layers without experts"
    if rows > BUCKETS[-1]:
        made_of = "prefill_chunk, or max_batch times width or block"
        return f"a step may have {rows} rows ({made_of}), more than its {BUCKETS[-1]}"
    return None


def expert_kernel(config: ModelConfig, dtype: torch.dtype) -> ExpertKernel:
    """The kernel for the form in which the checkpoint stores its experts."""
    gpt_oss = config.family == "gpt_oss"
    limit = config.swiglu_limit if gpt_oss else None
    shape = ExpertShape(config.hidden_size, config.expert_intermediate, gpt_oss, config.swiglu_alpha, limit)
    return Mxfp4Experts(shape) if config.mxfp4_experts else PlainExperts(shape, dtype)


def packed_layout(config: ModelConfig, dtype: torch.dtype) -> ExpertLayout:
    """Of a slot."""
    return ExpertLayout.of(expert_kernel(config, dtype).parts())


def passing_places(config: ModelConfig, slots: dict[int, int], rows: int, prompt_rows: int) -> int:
    """Places beside the slots for experts that pass through a step."""
    if min(slots.values()) == config.num_experts:
        return 0
    passing = staging_slots(config.num_experts, config.experts_per_token, bucket_for(rows))
    return passing + (2 * places_for(config.num_experts, list(slots.values())) if prompt_rows else 0)


def working_nbytes(
    config: ModelConfig,
    draft: DraftConfig | None,
    rows: int,
    prompt_rows: int,
    sequences: int,
    width: int,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Bytes on the device beside weights, slots and KV, by what they are for.

    Args: rows, prompt_rows: most rows of a step and of a long prompt; width: of a sequence in a verify.
    """
    taps = draft.tap_layers if draft else ()
    most, queued = bucket_for(rows), bucket_for(sequences * width)
    buffers = Buffers(config, most, most, taps, dtype, None)
    activations = buffers.nbytes
    if prompt_rows:
        activations += LongBuffers(config, prompt_rows, buffers, taps, dtype, torch.device("meta")).nbytes
    logits = 4 * config.vocab_size * (queued + bucket_for(sequences * width))  # of queued rounds, and of a verify
    # At its peak, judging sampled rows holds five times their logits (spec/sampling.py: both distributions, sorted).
    judged = 5 * 4 * config.vocab_size * min(rows, sequences * width)
    terms = {"activations": activations, "logits": logits, "sampling": judged}
    if draft:
        terms["the drafter's activations"] = drafter_nbytes(draft, rows, sequences, dtype)
        # What tapped layers put out is joined, and the rows that stay are picked from it (spec/observation.py).
        terms["features"] = 2 * max(rows, prompt_rows) * len(taps) * config.hidden_size * dtype.itemsize
    return terms


def build_device(
    parts: Parts, draft: Draft | None, rows: int, prompt_rows: int, width: int, progress: Progress
) -> tuple[DeviceDecoder, DeviceProvider, DeviceTarget, DeviceDrafter | None, float | None]:
    """Decoder, provider, target and drafter for steps of up to `rows` rows, of which a verify has up to `width` of a
    sequence, and for long prompts of up to `prompt_rows`; measured bytes per second of the fetch."""
    config, options, device = parts.checkpoint.config, parts.options, parts.device
    decoder = DeviceDecoder(config, parts.weights, parts.max_context)
    kernel = expert_kernel(config, parts.dtype)
    records = PackedRecords(parts.mapped, kernel, device)
    home = None
    if not parts.resident:
        nbytes = records.layout.record_nbytes
        home = Home(list(parts.slots), config.num_experts, nbytes, pinned=device.type == "cuda")
        home.fill(records, progress)
    provider = DeviceProvider(
        kernel,
        home,
        records.expert_nbytes,
        parts.slots,
        config.num_experts,
        config.experts_per_token,
        bucket_for(rows),
        options.policy,
        device,
    )
    if home is None:
        keys = list(parts.checkpoint.expert_keys())
        total = len(keys) * records.layout.record_nbytes
        for done, nbytes in enumerate(provider.preload((key, records.read(key)) for key in keys), start=1):
            progress("loading experts", done * nbytes, total)
    probed = _probe(provider, home) if home and options.probe_copies and device.type == "cuda" else None
    pages = pages_for(parts.max_context)
    drafter = _drafter(parts, draft, decoder, rows) if draft else None
    target = DeviceTarget(decoder, parts.kv, provider, rows, options.max_batch, pages, drafter, width, prompt_rows)
    return decoder, provider, target, drafter, probed


def _drafter(parts: Parts, draft: Draft, decoder: DeviceDecoder, rows: int) -> DeviceDrafter:
    config, shared = draft
    sequences = parts.options.max_batch
    context = KVStorage(config, parts.kv.pool, parts.dtype, parts.device, more_pages=sequences * block_pages(config))
    return DeviceDrafter(config, *shared(decoder), context, rows, sequences, parts.max_context)


def _probe(provider: DeviceProvider, home: Home) -> float:
    """Bytes per second of the engine's own fetch kernel, the faster of two passes over some experts."""
    keys = list(islice(home.experts(), max(1, _PROBE_BYTES // provider.layout.record_nbytes)))
    best = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        moved = provider.fetch_for_probe(keys)
        torch.cuda.synchronize()
        best = max(best, moved / (time.perf_counter() - started))
    return best
