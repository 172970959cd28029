"""`outrider bench residency`: what decoding costs when fewer experts are resident, with a draft and without one, and
whether a token changes.

Each row decodes the same prompt `repeats` times with a warm cache (one run before the first is not counted), greedy,
one sequence. Speed is output tokens of decode steps per second of decode steps: median and spread over the repeats.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from outrider.bench.environment import environment
from outrider.config import SamplingParams, Width, format_bytes
from outrider.core import Progress, no_progress
from outrider.engine.llm import LLM, Prompt
from outrider.errors import ConfigError


@dataclass(frozen=True)
class ResidencyRow:
    """One setting. Bytes and seconds are per decoded token; rates in tokens per second; None: not observed.

    width: rows of a verify, "off" for plain decoding. mean_acceptance_length includes the bonus token.
    """

    expert_slots: str
    policy: str
    width: Width
    mean_acceptance_length: float | None
    tokens_per_second: float
    slowest: float
    fastest: float
    expert_cache_hit_rate: float | None
    cold_bytes_per_token: float
    exposed_fetch_seconds_per_token: float | None
    num_offloaded_experts: int
    measured_h2d_bytes_per_second: float | None
    identical: bool


@dataclass(frozen=True)
class ResidencyResult:
    """All rows with where and how they were taken. `identical` compares token ids with those of the first row."""

    model: str
    draft: str | None
    prompt_tokens: int
    output_tokens: int
    repeats: int
    rows: list[ResidencyRow]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def bench_residency(
    model: str,
    prompt: Prompt,
    slots: Sequence[str] = ("100%", "75%", "50%", "25%"),
    policies: Sequence[str] = ("decayed-lfu", "lru"),
    tokens: int = 128,
    repeats: int = 5,
    progress: Progress = no_progress,
    draft: str | None = None,
    widths: Sequence[Width] = ("off",),
    **options: Any,
) -> ResidencyResult:
    """Measure every residency of `slots` with every policy and width; further options go to `LLM`.

    Raises: ConfigError if there is nothing to measure, OutriderError if a setting cannot be run.
    """
    if tokens < 2 or repeats < 1:
        raise ConfigError("measuring decode steps takes --max-tokens of at least 2 and --repeats of at least 1")
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    if draft is None and any(width != "off" for width in widths):
        raise ConfigError("widths are of a draft's verifies; give --draft")
    settings = [(share, policy, width) for share in slots for policy in policies for width in widths]
    rows: list[ResidencyRow] = []
    expected: list[int] = []
    prompt_tokens = 0
    for done, (share, policy, width) in enumerate(settings, start=1):
        with LLM(model, draft, share, policy, width=width, **options) as llm:  # type: ignore[arg-type]
            row, output, prompt_tokens = _measure(llm, (share, policy, width), prompt, params, repeats, expected)
        rows.append(row)
        expected = expected or output
        progress("settings measured", done, len(settings))
    return ResidencyResult(model, draft, prompt_tokens, tokens, repeats, rows, environment())


def _measure(
    llm: LLM,
    setting: tuple[str, str, Width],
    prompt: Prompt,
    params: SamplingParams,
    repeats: int,
    expected: list[int],
) -> tuple[ResidencyRow, list[int], int]:
    llm.generate([prompt], params)
    llm.reset_counters()
    rates: list[float] = []
    outputs = []
    tokens = seconds = 0.0
    for _ in range(repeats):
        (completion,) = llm.generate([prompt], params)
        stats = llm.stats()
        rates.append((stats.decode_tokens - tokens) / ((stats.decode_seconds or 0.0) - seconds))
        tokens, seconds = stats.decode_tokens, stats.decode_seconds or 0.0
        outputs.append(completion.token_ids)
    stats = llm.stats()
    exposed = stats.exposed_fetch_seconds
    row = ResidencyRow(
        expert_slots=setting[0],
        policy=setting[1],
        width=setting[2],
        mean_acceptance_length=stats.mean_acceptance_length,
        tokens_per_second=median(rates),
        slowest=min(rates),
        fastest=max(rates),
        expert_cache_hit_rate=stats.expert_cache_hit_rate,
        cold_bytes_per_token=stats.cold_bytes / tokens,
        exposed_fetch_seconds_per_token=None if exposed is None else exposed / tokens,
        num_offloaded_experts=stats.num_offloaded_experts,
        measured_h2d_bytes_per_second=stats.measured_h2d_bytes_per_second,
        identical=all(output == (expected or outputs[0]) for output in outputs),
    )
    return row, outputs[0], len(completion.prompt_ids)


def render(result: ResidencyResult) -> Table:
    """The rows for people."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"Decoding {result.model}, one sequence, {result.prompt_tokens} + {result.output_tokens} tokens",
        caption=f"median of {result.repeats} (slowest-fastest), accepted: tokens a verify, the bonus token included, "
        f"same: tokens equal the first row's; {result.environment['device']}, {result.environment['threads']} threads, "
        f"commit {result.environment['commit']}",
    )
    for name in ("slots", "policy", "width", "tokens/s", "accepted", "hit rate", "cold/token", "same"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in result.rows:
        hit_rate = row.expert_cache_hit_rate
        table.add_row(
            row.expert_slots,
            row.policy,
            str(row.width),
            f"{row.tokens_per_second:.1f} ({row.slowest:.1f}-{row.fastest:.1f})",
            "-" if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}",
            "-" if hit_rate is None else f"{hit_rate:.1%}",
            format_bytes(row.cold_bytes_per_token),
            "yes" if row.identical else "NO",
        )
    return table
