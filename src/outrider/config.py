"""What a model is and how it is to be run: frozen dataclasses, free of torch.

Contract: a `ModelConfig` says everything that the forward pass and the memory plan need; it is made only by
`outrider.checkpoint` (from a checked `config.json`). Sizes are in elements unless a name says bytes.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from outrider.errors import ConfigError, RequestError

Family = Literal["gpt_oss", "qwen3_moe"]
PolicyName = Literal["decayed-lfu", "lru"]
DeviceName = Literal["auto", "cpu", "cuda"]
DriverName = Literal["auto", "host", "device"]
DtypeName = Literal["auto", "float32", "bfloat16"]
Width = int | Literal["auto", "off"]
_CHOICES = {
    "policy": get_args(PolicyName),
    "device": get_args(DeviceName),
    "dtype": get_args(DtypeName),
    "driver": get_args(DriverName),
}


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (Peng et al. 2023, arXiv 2309.00071), fields as in HF `rope_parameters`."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only MoE target. `windows[l]` is None for full attention, `is_moe[l]` False for a dense MLP."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_intermediate: int
    dense_intermediate: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    dtype: str
    windows: tuple[int | None, ...]
    is_moe: tuple[bool, ...]
    attention_bias: bool
    tie_embeddings: bool
    mxfp4_experts: bool
    yarn: Yarn | None = None
    normalize_top_k: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    eos_token_ids: tuple[int, ...] = ()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts."""
        return tuple(layer for layer, moe in enumerate(self.is_moe) if moe)


@dataclass(frozen=True)
class DraftConfig:
    """One DFlash drafter (arXiv 2602.06036) for a target of `target_layers` layers.

    tap_layers: target layers whose output (residual stream, before any final norm) the drafter reads, in this order.
    windows, causal: a draft layer's sliding window (None: full attention) and whether a block row sees only the
        block rows up to itself.
    draft_vocab_size: `vocab_size` (the target's) unless the drafter has a head of its own over fewer tokens.
    sample_from_anchor: block row k predicts the token after its position (there are `block_size` drafts) instead of
        the one at it (row 0 predicts nothing, `block_size` - 1 drafts).
    """

    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    target_layers: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    rms_norm_eps: float
    rope_theta: float
    dtype: str
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    attention_bias: bool = False
    sample_from_anchor: bool = False
    yarn: Yarn | None = None

    @property
    def num_drafts(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_draft_row(self) -> int:
        """The block row whose logits give the first draft."""
        return 0 if self.sample_from_anchor else 1


@dataclass(frozen=True)
class SlotBudget:
    """How much of the experts may be resident: exactly one of a fraction, bytes in all, or slots per layer."""

    fraction: float | None = None
    nbytes: int | None = None
    slots: int | None = None


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)", re.IGNORECASE)
_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}


def parse_bytes(text: str) -> int:
    """`"6GiB"`, `"500MB"` to bytes.

    Raises: ConfigError if `text` is not a number with a unit.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"'{text}' is not an amount of memory; write it as 6GiB, 500MB or the like")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(nbytes: float) -> str:
    """Bytes as people read them: `"1.27 GB"` (powers of 1000, as files and bandwidths are quoted)."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def parse_slots(text: str) -> SlotBudget:
    """`"50%"` of the experts, `"6GiB"` of expert slots in all, or `"12"` slots a layer.

    Raises: ConfigError if `text` is none of them.
    """
    text = text.strip()
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = -1.0
        if not 0 < percent <= 100:
            raise ConfigError(f"'{text}' is not a share of the experts; write a number from 0 to 100, such as 50%")
        return SlotBudget(fraction=percent / 100)
    if text.isdecimal():
        return SlotBudget(slots=int(text))
    return SlotBudget(nbytes=parse_bytes(text))


@dataclass(frozen=True)
class SamplingParams:
    """How tokens of one request are chosen.

    temperature 0 is greedy. Otherwise the warp is temperature, then top-k (0: off), then top-p, which keeps the token
    that crosses p. One seed gives one output for one prompt, whatever else runs beside it.

    Raises: RequestError for a value outside its range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature is {self.temperature}; it must be a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; it must be at least 0 (0 turns it off)")


def parse_width(text: str) -> Width:
    """`"auto"`, `"off"`, or a number of rows.

    Raises: ConfigError if `text` is none of them.
    """
    if text in ("auto", "off"):
        return text  # type: ignore[return-value]
    if not text.isdecimal():
        raise ConfigError(f"'{text}' is no width; write auto, off, or how many rows a verify may have")
    return int(text)


@dataclass(frozen=True)
class EngineOptions:
    """How one engine is run.

    expert_slots: experts that may be resident; None: as many as `gpu_memory` leaves room for, all without it.
    gpu_memory: bytes of device memory that this process may use, 768 MiB for CUDA itself included; None: all.
    ram: bytes of host memory that may be pinned; experts that need more are read from the checkpoint's files by the
        host-driven provider, which is slower and is said (`Engine.note`). None: all.
    draft: a DFlash drafter (`demo`, a folder or a hub id); None decodes plainly.
    width: rows of a verify, the anchor included: "auto" is the draft's whole block, "off" ignores the draft.
    route_ahead_stats: record S3 (`stats().route_ahead`).

    driver: who decides about experts: "host" (Python and a copy thread, on any device) or "device" (kernels in a
        captured graph); "auto": the device on CUDA in bfloat16.
    stream_chunk: where the device drives, prompts longer than `prefill_chunk` run in chunks of so many tokens, a
        multiple of 512, whose absent experts pass beside the cache; 0: never.
    max_context: longest prompt + output; None: what the model allows, at most 4096.
    kv_tokens: tokens that the KV pages hold in all; None: four times `max_context`.
    threads: compute threads of this process on a CPU; None leaves torch's choice, which for a small model on a busy
        machine can be far too many (its threads spin while they wait for each other).
    """

    expert_slots: SlotBudget | None = None
    policy: PolicyName = "decayed-lfu"
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    max_context: int | None = None
    kv_tokens: int | None = None
    max_batch: int = 16
    prefill_chunk: int = 512
    stream_chunk: int = 4096
    gpu_memory: int | None = None
    ram: int | None = None
    probe_copies: bool = True
    threads: int | None = None
    driver: DriverName = "auto"
    draft: str | None = None
    width: Width = "auto"
    route_ahead_stats: bool = False

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        for name in ("max_context", "kv_tokens", "max_batch", "prefill_chunk", "threads", "gpu_memory", "ram"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.stream_chunk < 0 or self.stream_chunk % 512:
            raise ConfigError(f"stream_chunk is {self.stream_chunk}; it must be a multiple of 512, or 0 for none")
        if self.width not in ("auto", "off") and (not isinstance(self.width, int) or self.width < 1):
            raise ConfigError(f"width is {self.width!r}; it must be 'auto', 'off' or at least 1")
