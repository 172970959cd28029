"""`outrider bench step`: decoding steps of a full-size synthetic target with fewer and fewer experts resident.

One sequence, plain greedy rounds queued on the device. Every row says what it should take: the resident step of the
same run plus its cold bytes over what the copy engine moves, which is what a cache without cost and without overlap
would give.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Tensor

from outrider.bench.environment import environment
from outrider.bench.kernels import device_copy, dma
from outrider.bench.synthetic import SyntheticTarget
from outrider.bench.tables import STEP_HEADER, step_cells
from outrider.bench.timing import Times
from outrider.bench.traces import read_trace
from outrider.checkpoint.inventory import dense_tensors
from outrider.checkpoint.presets import load_config
from outrider.config import ModelConfig, PolicyName, parse_slots
from outrider.core import Progress, no_progress
from outrider.errors import ConfigError
from outrider.experts.home import Home

ROUNDS = 16
_BURSTS = 4
"""A repeat is this many bursts of `ROUNDS` rounds."""
_WARM_UP = 8
_RUNS = 8
"""Longest runs of a trace that are replayed, one after the other."""


@dataclass(frozen=True)
class Setting:
    """One way to run: routing is "own" (the random router's), "uniform" (drawn), or the path of a trace."""

    expert_slots: str
    context: int
    routing: str
    policy: PolicyName = "decayed-lfu"
    overlap: bool = True
    graphs: bool = True


@dataclass(frozen=True)
class StepRow:
    """One setting. Times are of one step, a token.

    hbm_bytes: weights and keys that a step reads from device memory; hbm_share: of the device copy's rate.
    expected: resident step at this context + cold bytes / DMA; None without a resident row.
    """

    setting: Setting
    tokens_per_second: float
    step: Times
    hit_rate: float
    cold_bytes: float
    hbm_bytes: float
    hbm_share: float
    expected: float | None


@dataclass(frozen=True)
class StepResult:
    """All rows with where and how they were taken."""

    model: str
    copy_bytes_per_second: float
    dma_bytes_per_second: float
    rows: list[StepRow]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def bench_step(
    model: str, settings: Sequence[Setting], repeats: int = 7, progress: Progress = no_progress
) -> StepResult:
    """Measure `settings` of the preset or config `model` on the current GPU.

    Raises: ConfigError if there is no GPU, or a trace is not of this model.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench step measures a CUDA GPU, and none is usable here")
    config = load_config(model)
    traces = {routing: routes_of(routing, config) for routing in {s.routing for s in settings}}
    copy, copied = dma(repeats), device_copy(repeats)
    rows: list[StepRow] = []
    home: Home | None = None
    resident: dict[tuple[int, bool], float] = {}
    for done, setting in enumerate(settings, start=1):
        target = SyntheticTarget(
            config,
            parse_slots(setting.expert_slots),
            setting.policy,
            setting.context,
            overlap=setting.overlap,
            graphs=setting.graphs,
            home=home,
            trace=traces[setting.routing],
        )
        target.provider.close.detach()  # the next setting reads the same home
        home = home or target.home
        rows.append(_measure(target, setting, repeats, copied, copy, resident))
        del target
        torch.cuda.empty_cache()
        progress("settings measured", done, len(settings))
    if home:
        home.close()
    return StepResult(model, copied, copy, rows, environment())


def _measure(
    target: SyntheticTarget,
    setting: Setting,
    repeats: int,
    copied: float,
    copy: float,
    resident: dict[tuple[int, bool], float],
) -> StepRow:
    for _ in range(_WARM_UP):
        target.decode(ROUNDS)
    target.provider.reset_counters()
    seconds = []
    for _ in range(repeats):
        began = perf_counter()
        for _ in range(_BURSTS):
            target.decode(ROUNDS)
        seconds.append(perf_counter() - began)
    step = Times.of(seconds, ROUNDS * _BURSTS)
    seen = target.provider.snapshot()
    cold = seen.cold_bytes / seen.steps
    hbm = step_nbytes(target.config, setting.context, target.provider.layout.payload_nbytes)
    at = (setting.context, setting.graphs)
    if seen.misses == 0:
        resident.setdefault(at, step.median)
    expected = resident[at] + cold / copy if at in resident else None
    return StepRow(
        setting,
        1 / step.median,
        step,
        seen.hits / (seen.hits + seen.misses),
        cold,
        hbm,
        hbm / step.median / copied,
        expected,
    )


def step_nbytes(config: ModelConfig, context: int, expert_nbytes: int) -> float:
    """Bytes that one token must read from device memory: dense weights, its experts, its keys and values."""
    dense = sum(
        stored.nbytes for name, stored in dense_tensors(config, "bfloat16").items() if "embed_tokens" not in name
    )
    if config.tie_embeddings:
        dense += dense_tensors(config, "bfloat16")["model.embed_tokens.weight"].nbytes
    experts = len(config.moe_layers) * config.experts_per_token * expert_nbytes
    seen = sum(context if window is None else min(window, context) for window in config.windows)
    return dense + experts + 2 * 2 * seen * config.num_kv_heads * config.head_dim


def render(result: StepResult) -> Table:
    """The rows for people."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"Steps of synthetic {result.model}, one sequence",
        caption=f"expected: resident step + cold bytes / {result.dma_bytes_per_second / 1e9:.1f} GB/s (copy engine); "
        f"HBM: share of {result.copy_bytes_per_second / 1e12:.2f} TB/s; {result.environment['device']}, "
        f"commit {result.environment['commit']}",
    )
    for name in STEP_HEADER:
        table.add_column(name, justify="left" if name in ("routing", "how") else "right", no_wrap=True)
    for row in result.to_dict()["rows"]:
        table.add_row(*step_cells(row))
    return table


def uniform_trace(config: ModelConfig, tokens: int = 4096) -> Tensor:
    """Routes drawn at random, uint8 [tokens, layers, k] on the GPU."""
    shape = (tokens, len(config.moe_layers), config.num_experts)
    random = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return random.topk(config.experts_per_token).indices.to(device="cuda", dtype=torch.uint8)


def routes_of(routing: str, config: ModelConfig) -> Tensor | None:
    """uint8 [tokens, layers, k] on the GPU; None: the router decides.

    Raises: ConfigError if a trace is not of this model.
    """
    if routing == "own":
        return None
    if routing == "uniform":
        return uniform_trace(config)
    trace = read_trace(Path(routing), config.num_experts)
    if (trace.num_layers, trace.experts_per_token) != (len(config.moe_layers), config.experts_per_token):
        raise ConfigError(f"{routing} is of {trace.num_layers} layers with {trace.experts_per_token} experts a token")
    longest = sorted(trace.runs, key=len, reverse=True)[:_RUNS]
    return torch.from_numpy(np.concatenate(longest).astype(np.uint8)).cuda()
