"""What fits where and how fast decoding can be at best, from a `ModelConfig` alone: `outrider plan`.

Contract: bytes of weights, experts and KV are exact for the stated dtype; working space is an assumption and says so.
Speeds are bounds for one sequence that decodes token by token, from bytes over bandwidth alone: no launch, no
bookkeeping and no arithmetic is counted, so a real engine is slower. No file is opened.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table

from outrider.checkpoint.inventory import ITEMSIZE, dense_tensors, expert_parts, group_nbytes
from outrider.config import ModelConfig, SlotBudget, format_bytes
from outrider.errors import ConfigError
from outrider.experts.budget import slots_per_layer
from outrider.experts.layout import ExpertLayout, torch_dtype
from outrider.kvcache.pages import PAGE_SIZE, pages_for
from outrider.kvcache.storage import kv_bytes_per_token

Place = Literal["GPU", "pinned RAM", "disk"]
Dtype = Literal["bfloat16", "float32"]
RUNTIME_NBYTES = 768 * 2**20
"""Assumed size of the CUDA context, kernels, library workspaces and captured graphs."""
DEFAULT_CONTEXT = 4096
PREFILL_ROWS = 512
"""Rows of the largest step that working space is counted for."""


@dataclass(frozen=True)
class Hardware:
    """Bandwidths in bytes per second: device memory, host to device, disk.

    `origin` says what the figures are; datasheet peaks are never reached, so bounds from them are generous. The disk
    figure is an assumption everywhere: one NVMe drive under page faults.
    """

    hbm_bytes_per_second: float = 4.3e12
    h2d_bytes_per_second: float = 55e9
    disk_bytes_per_second: float = 3e9
    name: str = "H200"
    origin: str = "measured: device copy, DMA from pinned memory; disk assumed"

    def __post_init__(self) -> None:
        if min(self.hbm_bytes_per_second, self.h2d_bytes_per_second, self.disk_bytes_per_second) <= 0:
            raise ConfigError("bandwidths must be above 0 bytes per second")


_PCIE4, _PCIE5 = 31.5e9, 63.0e9  # x16, one direction, after 128b/130b coding
_PEAK = "datasheet peaks; disk assumed"
HARDWARE = {
    "h200": Hardware(),
    "h100": Hardware(3.35e12, _PCIE5, name="H100 SXM", origin=_PEAK),
    "a100": Hardware(2.039e12, _PCIE4, name="A100 SXM 80 GB", origin=_PEAK),
    "rtx5090": Hardware(1.792e12, _PCIE5, name="RTX 5090", origin=_PEAK),
    "rtx4090": Hardware(1.008e12, _PCIE4, name="RTX 4090", origin=_PEAK),
    "rtx3090": Hardware(0.936e12, _PCIE4, name="RTX 3090", origin=_PEAK),
}
"""Presets by name."""


@dataclass(frozen=True)
class Line:
    """One row of the table of bytes."""

    what: str
    where: Place
    nbytes: int


@dataclass(frozen=True)
class Bound:
    """One limit of the decoding speed of one sequence."""

    name: str
    tokens_per_second: float
    formula: str


@dataclass(frozen=True)
class MemoryPlan:
    """The answer of `make_plan`.

    Attributes:
        gpu_nbytes: the sum of the lines on the GPU.
        slots: expert slots by MoE layer; `resident_fraction` is their share of all experts.
        hit_rate: of the cost model; `hit_rate_given` tells whether the caller set it.
        token_nbytes: bytes that a decoded token reads from device memory: dense weights and experts;
            `kv_nbytes_per_token` is what the KV of a full context adds.
        cold_nbytes_per_token: expected bytes of absent experts; `disk_nbytes_per_token` of them come from disk.
        bounds: those that apply: "HBM", "HBM, full context", "PCIe", "disk", "no overlap", "perfect overlap".
        model: the cost model in words, with its formula.
    """

    family: str
    dtype: Dtype
    context: int
    concurrency: int
    hardware: Hardware
    gpu_memory: int | None
    ram: int | None
    lines: tuple[Line, ...]
    gpu_nbytes: int
    expert_record_nbytes: int
    num_experts: int
    slots: dict[int, int]
    resident_fraction: float
    hit_rate: float
    hit_rate_given: bool
    token_nbytes: int
    kv_nbytes_per_token: int
    cold_nbytes_per_token: float
    disk_nbytes_per_token: float
    bounds: tuple[Bound, ...]
    model: str
    assumptions: tuple[str, ...]
    verdict: str

    def bound(self, name: str) -> float | None:
        """Tokens per second of the bound `name`; None if it does not apply."""
        return next((bound.tokens_per_second for bound in self.bounds if bound.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"slots": {str(layer): slots for layer, slots in self.slots.items()}}


def make_plan(
    config: ModelConfig,
    *,
    gpu_memory: int | None = None,
    ram: int | None = None,
    context: int | None = None,
    concurrency: int = 1,
    hardware: Hardware = HARDWARE["h200"],
    dtype: Dtype = "bfloat16",
    hit_rate: float | None = None,
    expert_slots: SlotBudget | None = None,
) -> MemoryPlan:
    """Plan one engine.

    Args:
        gpu_memory, ram: limits in bytes; None is no limit. Slots take what `gpu_memory` leaves after the rest.
        context, concurrency: KV is counted for `concurrency` sequences of `context` tokens (None: what the model was
            made for, at most 4096).
        dtype: of dense weights and KV on the device; experts stay as they are stored.
        hit_rate: of the expert cache, 0 to 1; None takes the resident fraction.
        expert_slots: slots to plan for instead of as many as fit.

    Raises: ConfigError if a value is out of range, or if not even the floor of slots fits, with every term of the sum.
    """
    context = min(config.max_positions, DEFAULT_CONTEXT) if context is None else context
    _check_arguments(config, context, concurrency, hit_rate)
    record = ExpertLayout.of(expert_parts(config)).record_nbytes
    fixed = _fixed_lines(config, context, concurrency, dtype)
    slots = _slots(config, gpu_memory, expert_slots, record, fixed)
    total, resident = len(slots) * config.num_experts, sum(slots.values())
    pinned = total if ram is None else min(total, ram // record)
    placed = [*fixed, Line(f"{_range(slots)} expert slots in {len(slots)} layers", "GPU", resident * record)]
    if resident < total:
        placed.append(Line(f"{pinned} of {total} experts", "pinned RAM", pinned * record))
    if resident < total and pinned < total:
        placed.append(Line(f"{total - pinned} of {total} experts, mapped", "disk", (total - pinned) * record))
    rate = resident / total if hit_rate is None else hit_rate
    read = len(slots) * config.experts_per_token * record
    cold = 0.0 if resident == total else (1 - rate) * read
    from_disk = cold * (total - pinned) / total
    token = _dense_nbytes_per_token(config, dtype) + read
    kv = _kv_nbytes_per_token(config, context, dtype)
    bounds = _bounds(hardware, token, kv, cold, from_disk)
    return MemoryPlan(
        family=config.family,
        dtype=dtype,
        context=context,
        concurrency=concurrency,
        hardware=hardware,
        gpu_memory=gpu_memory,
        ram=ram,
        lines=tuple(placed),
        gpu_nbytes=sum(line.nbytes for line in placed if line.where == "GPU"),
        expert_record_nbytes=record,
        num_experts=config.num_experts,
        slots=slots,
        resident_fraction=resident / total,
        hit_rate=rate,
        hit_rate_given=hit_rate is not None,
        token_nbytes=token,
        kv_nbytes_per_token=kv,
        cold_nbytes_per_token=cold,
        disk_nbytes_per_token=from_disk,
        bounds=bounds,
        model=_model(config, len(slots), record, rate, hit_rate is not None, cold),
        assumptions=_assumptions(config, context, dtype, from_disk),
        verdict=_verdict(config, slots, bounds, from_disk, hardware.name),
    )


def render(plan: MemoryPlan) -> RenderableType:
    """The plan for a terminal: bytes, bounds, what was assumed, one sentence of verdict."""
    sizes = Table("what", "where", "bytes", "", title="Memory", title_justify="left")
    sizes.columns[2].justify = sizes.columns[3].justify = "right"
    for line in plan.lines:
        if line.where == "GPU":
            sizes.add_row(*_cells(line))
    limit = "" if plan.gpu_memory is None else f" of {format_bytes(plan.gpu_memory)}"
    sizes.add_row(*(f"[bold]{cell}[/]" for cell in _cells(Line(f"in all{limit}", "GPU", plan.gpu_nbytes))))
    sizes.add_section()
    for line in plan.lines:
        if line.where != "GPU":
            sizes.add_row(*_cells(line))
    title = f"Bounds for one sequence on {plan.hardware.name} ({plan.hardware.origin})"
    speeds = Table("limit", "tokens/s", "formula", title=title, title_justify="left")
    speeds.columns[1].justify = "right"
    for bound in plan.bounds:
        speeds.add_row(bound.name, f"{bound.tokens_per_second:.1f}", bound.formula)
    notes = [f"Assumed: {text}." for text in plan.assumptions]
    return Group(sizes, "", speeds, f"Cost model: {plan.model}.", *notes, "", f"[bold]{plan.verdict}[/]")


def _cells(line: Line) -> tuple[str, str, str, str]:
    return line.what, line.where, f"{line.nbytes:,}", format_bytes(line.nbytes)


def _check_arguments(config: ModelConfig, context: int, concurrency: int, hit_rate: float | None) -> None:
    if not 1 <= context <= config.max_positions:
        raise ConfigError(f"context is {context}; this model takes 1 to {config.max_positions} tokens")
    if concurrency < 1:
        raise ConfigError(f"concurrency is {concurrency}; it must be at least 1")
    if hit_rate is not None and not 0 <= hit_rate <= 1:
        raise ConfigError(f"hit_rate is {hit_rate}; it must lie between 0 and 1")


def _fixed_lines(config: ModelConfig, context: int, concurrency: int, dtype: Dtype) -> list[Line]:
    """Everything on the GPU but the expert slots."""
    groups = group_nbytes(dense_tensors(config, dtype))
    lines = [Line(f"dense weights: {group}", "GPU", nbytes) for group, nbytes in groups.items() if nbytes]
    kv = concurrency * pages_for(context) * PAGE_SIZE * kv_bytes_per_token(config, torch_dtype(dtype))
    sequences = "1 sequence" if concurrency == 1 else f"{concurrency} sequences"
    lines.append(Line(f"KV of {sequences} of {context} tokens", "GPU", kv))
    widths = 4 * config.hidden_size + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    widths += 3 * config.experts_per_token * config.expert_intermediate
    scratch = 4 * (PREFILL_ROWS * widths + 2 * concurrency * config.vocab_size)
    lines.append(Line("working space (assumed)", "GPU", RUNTIME_NBYTES + scratch))
    return lines


def _slots(
    config: ModelConfig, gpu_memory: int | None, wanted: SlotBudget | None, record: int, fixed: list[Line]
) -> dict[int, int]:
    """Expert slots of every MoE layer. Raises: ConfigError if they do not fit."""
    used = sum(line.nbytes for line in fixed)
    floor = SlotBudget(slots=config.experts_per_token)
    if wanted is None and gpu_memory is not None:
        least = slots_per_layer(config, floor, record)
        wanted = floor if gpu_memory - used < sum(least.values()) * record else SlotBudget(nbytes=gpu_memory - used)
    slots = slots_per_layer(config, wanted or SlotBudget(fraction=1.0), record)
    needed = sum(slots.values()) * record
    if gpu_memory is not None and used + needed > gpu_memory:
        dense = sum(line.nbytes for line in fixed[:-2])
        terms = [("dense weights", dense), *((line.what, line.nbytes) for line in fixed[-2:])]
        terms.append((f"{_range(slots)} expert slots in each of {len(slots)} layers", needed))
        listed = " + ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in terms)
        raise ConfigError(
            f"{format_bytes(gpu_memory)} of GPU memory are too little: {listed} come to {format_bytes(used + needed)}"
        )
    return slots


def _dense_nbytes_per_token(config: ModelConfig, dtype: Dtype) -> int:
    groups = group_nbytes(dense_tensors(config, dtype))
    looked_up = 0 if config.tie_embeddings else groups["embedding"]  # one row of it; a tied one is the head, too
    return sum(groups.values()) - looked_up


def _kv_nbytes_per_token(config: ModelConfig, context: int, dtype: Dtype) -> int:
    """KV that one token reads at a full context; windows are honoured."""
    seen = sum(context if window is None else min(window, context) for window in config.windows)
    return 2 * seen * config.num_kv_heads * config.head_dim * ITEMSIZE[dtype]


def _bounds(hardware: Hardware, token: int, kv: int, cold: float, from_disk: float) -> tuple[Bound, ...]:
    hbm, h2d = hardware.hbm_bytes_per_second, hardware.h2d_bytes_per_second
    disk = hardware.disk_bytes_per_second

    def over(bandwidth: float, nbytes: float, what: str) -> str:
        return f"{format_bytes(bandwidth)}/s / {format_bytes(nbytes)} {what}"

    bounds = [
        Bound("HBM", hbm / token, over(hbm, token, "of dense weights and experts")),
        Bound("HBM, full context", hbm / (token + kv), over(hbm, token + kv, "with the KV of a full context")),
    ]
    times = {"HBM": token / hbm}
    if cold:
        bounds.append(Bound("PCIe", h2d / cold, over(h2d, cold, "of cold experts")))
        times["PCIe"] = cold / h2d
    if from_disk:
        bounds.append(Bound("disk", disk / from_disk, over(disk, from_disk, "of cold experts on disk")))
        times["disk"] = from_disk / disk
    if len(times) == 1:
        return tuple(bounds)
    terms = [f"{seconds * 1e3:.2f} ms {name}" for name, seconds in times.items()]
    bounds.append(Bound("no overlap", 1 / sum(times.values()), f"1 / ({' + '.join(terms)})"))
    bounds.append(Bound("perfect overlap", 1 / max(times.values()), f"1 / max({', '.join(terms)})"))
    return tuple(bounds)


def _model(config: ModelConfig, layers: int, record: int, rate: float, given: bool, cold: float) -> str:
    why = "as given" if given else "the resident share, as if routing were uniform: a lower bound for real routing"
    return (
        f"cold bytes per token = {layers} layers x {config.experts_per_token} experts x (1 - hit rate) x {record:,} B "
        f"= {format_bytes(cold)}, with a hit rate of {rate:.1%} ({why})"
    )


def _assumptions(config: ModelConfig, context: int, dtype: Dtype, from_disk: float) -> tuple[str, ...]:
    texts = [
        f"dense weights and KV in {dtype}, experts as they are stored",
        f"working space of {format_bytes(RUNTIME_NBYTES)} for the runtime, activations of {PREFILL_ROWS} rows in "
        "float32 and two rows of logits a sequence",
        "one sequence at a time in the bounds, and an embedding lookup that reads nothing",
    ]
    if from_disk:
        texts.append("the page cache holds none of the experts that stay on disk")
    if sliding := sum(window is not None for window in config.windows):
        pooled = 2 * config.num_kv_heads * config.head_dim * ITEMSIZE[dtype] * config.num_layers * context
        needed = _kv_nbytes_per_token(config, context, dtype)
        texts.append(
            f"KV at full length in all layers, although the {sliding} sliding ones read their window only "
            f"(a sequence would need {format_bytes(needed)} instead of {format_bytes(pooled)})"
        )
    return tuple(texts)


def _verdict(config: ModelConfig, slots: dict[int, int], bounds: Iterable[Bound], from_disk: float, name: str) -> str:
    speed = {bound.name: bound.tokens_per_second for bound in bounds}
    if all(count == config.num_experts for count in slots.values()):
        return (
            f"All experts fit: at most {_speed(speed['HBM'])} for one sequence on {name}, the limit of device memory."
        )
    resident = f"{_range(slots)} of {config.num_experts} experts a layer are resident"
    tightest = min(("HBM", "PCIe", "disk"), key=lambda limit: speed.get(limit, float("inf")))
    if tightest == "HBM":
        return f"{resident}: at most {_speed(speed['HBM'])} for one sequence on {name}, the limit of device memory."
    return (
        f"{resident}{', some of the others only on disk' if from_disk else ''}: on {name} one sequence gets at most "
        f"{_speed(speed['no overlap'])} without overlap and {_speed(speed['perfect overlap'])} with perfect overlap, "
        f"limited by {tightest}."
    )


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.{0 if tokens_per_second >= 100 else 1}f} tokens/s"


def _range(slots: dict[int, int]) -> str:
    least, most = min(slots.values()), max(slots.values())
    return str(least) if least == most else f"{least} to {most}"
