"""What an expert cache would hit on recorded routing, by policy and size: the engine's policies beside the optimum.

Contract: a replay is a pure function of trace and arguments. One run of the trace is one sequence that decodes one
token a step, and each layer has its own slots: `round(fraction * experts)`, at least k and at most all. At each step
the layer's k experts are looked up at once; absent ones go to free slots, lowest first, and then to the victims of the
policy's `order`, in ascending id; no expert of the step is a victim. Then the policy is told with `touch`, as
`commit` tells it in the engine. LRU and decayed LFU are the engine's own classes.

Every run starts with an empty cache and a policy that knows nothing, and its first `warmup` tokens are replayed but
not counted. `keep_cache=True` joins the runs instead: what a server sees that keeps its experts from one request to
the next. There counts that never decay go stale, and LFU can fall behind LRU.

Two optima, both with full knowledge of the run (or of the joined runs), both exact for the tokens that are counted:

* `belady`: every expert of a step must be in a slot, as it is with the other policies: their upper bound.
* `belady-bypass`: an absent expert may be used without keeping it (streamed through, or read in place), so it also
  bounds caches that choose what to admit.

What it does not know: batches, rejected rows, prefill, prefetch and time. An access is one (layer, expert) of a token.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from rich.table import Table

from outrider.bench.traces import RoutingTrace
from outrider.errors import ConfigError
from outrider.experts.policy import LRU, CachePolicy, DecayedLFU
from outrider.figure import new_figure, save_figure

SimPolicy = Literal["lru", "lfu", "decayed-lfu", "belady", "belady-bypass"]
SIM_POLICIES: tuple[SimPolicy, ...] = get_args(SimPolicy)

Steps = Sequence[Mapping[int, int]]
"""One layer's experts of every token in ascending order, each with the rows that use it (always 1 here)."""


class LFU:
    """Evict the expert with the fewest uses since the start of the run, resident or not; nothing decays."""

    def __init__(self, num_experts: int) -> None:
        self._counts = [0] * num_experts

    def touch(self, rows_of_expert: Mapping[int, int]) -> None:
        for expert, rows in rows_of_expert.items():
            self._counts[expert] += rows

    def order(self, candidates: Iterable[tuple[int, int]]) -> list[int]:
        return [slot for slot, _ in sorted(candidates, key=lambda c: (self._counts[c[1]], c[0]))]

    def reset(self) -> None:
        self._counts = [0] * len(self._counts)


class Belady:
    """Evict the expert whose next use is furthest away (Belady 1966), with unit-size pages needed a set at a time.

    `steps` is all that will be touched, in order. Misses of the first `warmup` steps are free, so during them the cache
    is prepared for the steps that count: uses before `warmup` are ignored, and so are, until its turn, the experts of
    the last free step, which come for nothing then.
    """

    def __init__(self, num_experts: int, steps: Steps, warmup: int = 0) -> None:
        self._steps, self._warmup = steps, warmup
        self._last_free = steps[warmup - 1] if 0 < warmup <= len(steps) else {}
        self._uses: list[list[int]] = [[] for _ in range(num_experts)]
        self.reset()

    def touch(self, rows_of_expert: Mapping[int, int]) -> None:
        if self._clock >= self._warmup:
            for expert in rows_of_expert:
                self._uses[expert].pop()
        self._clock += 1

    def order(self, candidates: Iterable[tuple[int, int]]) -> list[int]:
        return [slot for slot, _ in sorted(candidates, key=lambda c: (-self._next_use(c[1]), c[0]))]

    def reset(self) -> None:
        self._clock = 0
        for uses in self._uses:
            uses.clear()
        for step in range(len(self._steps) - 1, self._warmup - 1, -1):
            for expert in self._steps[step]:
                self._uses[expert].append(step)

    def _next_use(self, expert: int) -> float:
        """The first step after the current one that needs `expert`."""
        if self._clock < self._warmup - 1 and expert in self._last_free:
            return math.inf
        uses = self._uses[expert]
        position = -2 if uses and uses[-1] == self._clock else -1
        return uses[position] if len(uses) >= -position else math.inf


class Slots:
    """One layer's slots. `bypass` lets absent experts, and those in use, compete for them like all others."""

    def __init__(self, capacity: int, bypass: bool = False) -> None:
        self._capacity, self._bypass = capacity, bypass
        self._held: list[int] = []
        self._resident: set[int] = set()

    def step(self, union: Mapping[int, int], policy: CachePolicy) -> int:
        """Make `union` (at most as many experts as slots) resident; returns how many already were."""
        absent = [expert for expert in union if expert not in self._resident]
        if absent:
            room = self._capacity - len(self._held)
            self._held += absent[:room]
            self._resident.update(absent[:room])
            if len(absent) > room:
                self._replace(absent[room:], union, policy)
        return len(union) - len(absent)

    def _replace(self, absent: list[int], union: Mapping[int, int], policy: CachePolicy) -> None:
        candidates = [(slot, held) for slot, held in enumerate(self._held) if self._bypass or held not in union]
        if self._bypass:
            candidates += enumerate(absent, start=self._capacity)
        leaving = policy.order(candidates)[: len(absent)]
        admitted = [expert for slot, expert in enumerate(absent, start=self._capacity) if slot not in leaving]
        for slot, expert in zip((slot for slot in leaving if slot < self._capacity), admitted, strict=True):
            self._resident.remove(self._held[slot])
            self._resident.add(expert)
            self._held[slot] = expert


@dataclass(frozen=True)
class CacheSimRow:
    """One cell: `hits` of `accesses` at `slots` per layer, which is what `fraction` of the experts came to."""

    fraction: float
    policy: SimPolicy
    hit_rate: float
    hits: int
    accesses: int
    slots: int


@dataclass(frozen=True)
class CacheSimResult:
    """`rows` go by fraction, then by policy, as they were asked for. `tokens` were replayed, of `trace_tokens`."""

    trace: str
    num_layers: int
    num_experts: int
    experts_per_token: int
    runs: int
    tokens: int
    trace_tokens: int
    warmup: int
    keep_cache: bool
    rows: list[CacheSimRow]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def simulate(
    trace: RoutingTrace,
    fractions: Sequence[float] = (0.25, 0.5, 0.75),
    policies: Sequence[SimPolicy] = SIM_POLICIES,
    *,
    warmup: int = 32,
    max_tokens: int | None = 4000,
    keep_cache: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> CacheSimResult:
    """Replay `trace` at every fraction through every policy.

    `max_tokens` bounds the replay to the longest runs (the earlier of two equals), in trace order, the last one taken
    cut short; None replays everything. Long runs come first because what a cache does in the long run is asked; they
    hit up to a point or two more than a trace's average run. `progress` is called with (tokens done, tokens in all).

    Raises: ConfigError for an argument out of range, and if no run is longer than `warmup`.
    """
    _check(fractions, policies, warmup, max_tokens)
    runs = _longest(trace.runs, max_tokens)
    sequences = [np.concatenate(runs)] if keep_cache else runs
    tokens = sum(len(run) for run in runs)
    counted = sum(max(0, len(sequence) - warmup) for sequence in sequences)
    if not counted:
        raise ConfigError(f"no run of {trace.name} is longer than the warm-up of {warmup} tokens; set a shorter one")
    slots = [slots_for(fraction, trace) for fraction in fractions]
    hits = np.zeros((len(fractions), len(policies)), dtype=np.int64)
    done = 0
    for sequence in sequences:
        for layer in range(trace.num_layers):
            steps = [dict.fromkeys(sorted(row), 1) for row in sequence[:, layer].tolist()]
            for column, policy in enumerate(policies):
                hits[:, column] += _replay(steps, trace.num_experts, policy, slots, warmup)
            if progress is not None:
                progress(done + len(sequence) * (layer + 1) // trace.num_layers, tokens)
        done += len(sequence)
    accesses = counted * trace.num_layers * trace.experts_per_token
    return CacheSimResult(
        trace=trace.name,
        num_layers=trace.num_layers,
        num_experts=trace.num_experts,
        experts_per_token=trace.experts_per_token,
        runs=len(runs),
        tokens=tokens,
        trace_tokens=trace.num_tokens,
        warmup=warmup,
        keep_cache=keep_cache,
        rows=[
            CacheSimRow(fraction, policy, int(hits[i, j]) / accesses, int(hits[i, j]), accesses, slots[i])
            for i, fraction in enumerate(fractions)
            for j, policy in enumerate(policies)
        ],
    )


def slots_for(fraction: float, trace: RoutingTrace) -> int:
    """Slots per layer of that share of the experts: never fewer than one token needs."""
    return max(round(fraction * trace.num_experts), trace.experts_per_token)


def _check(fractions: Sequence[float], policies: Sequence[SimPolicy], warmup: int, max_tokens: int | None) -> None:
    if not fractions or not policies:
        raise ConfigError("there is nothing to replay; name at least one slot fraction and one policy")
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise ConfigError(f"slot fraction {fraction:g} is out of range; it must be above 0 and at most 1")
    for policy in policies:
        if policy not in SIM_POLICIES:
            raise ConfigError(f"'{policy}' is not a cache policy; choose from {', '.join(SIM_POLICIES)}")
    if warmup < 0:
        raise ConfigError(f"the warm-up is {warmup} tokens; it must be at least 0")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens is {max_tokens}; it must be at least 1")


def _longest(runs: list[npt.NDArray[np.uint16]], max_tokens: int | None) -> list[npt.NDArray[np.uint16]]:
    if max_tokens is None:
        return runs
    taken: dict[int, int] = {}
    for index in sorted(range(len(runs)), key=lambda i: -len(runs[i])):
        if max_tokens > 0:
            taken[index] = min(max_tokens, len(runs[index]))
            max_tokens -= taken[index]
    return [runs[index][: taken[index]] for index in sorted(taken)]


def _make(policy: SimPolicy, num_experts: int, steps: Steps, warmup: int) -> CachePolicy:
    match policy:
        case "lru":
            return LRU(num_experts)
        case "lfu":
            return LFU(num_experts)
        case "decayed-lfu":
            return DecayedLFU(num_experts)
        case "belady" | "belady-bypass":
            return Belady(num_experts, steps, warmup)


def _replay(steps: Steps, num_experts: int, policy: SimPolicy, slots: Sequence[int], warmup: int) -> list[int]:
    """Counted hits of one layer at each slot count.

    All slot counts share one policy object: what it knows comes from `touch` alone, never from what is resident.
    """
    shared = _make(policy, num_experts, steps, warmup)
    caches = [Slots(capacity, bypass=policy == "belady-bypass") for capacity in slots]
    hits = [0] * len(caches)
    for index, union in enumerate(steps):
        for which, cache in enumerate(caches):
            found = cache.step(union, shared)
            if index >= warmup:
                hits[which] += found
        shared.touch(union)
    return hits


def _basis(result: CacheSimResult, separator: str) -> str:
    """What the figures stand on."""
    share = "" if result.tokens == result.trace_tokens else f" of {result.trace_tokens:,}"
    start = "the first" if result.keep_cache or result.runs == 1 else "each run's first"
    return separator.join(
        (
            f"{result.experts_per_token} of {result.num_experts} experts, {result.num_layers} layers",
            f"{result.tokens:,}{share} tokens in {result.runs} run{'s' * (result.runs != 1)}"
            f"{', cache kept between runs' * result.keep_cache}",
            f"{start} {result.warmup} tokens not counted",
        )
    )


def render(result: CacheSimResult) -> Table:
    """Hit rates in percent: one line a fraction, one column a policy."""
    policies = list(dict.fromkeys(row.policy for row in result.rows))
    table = Table(title=f"Expert cache hit rate, {result.trace}", caption=_basis(result, "\n"))
    table.add_column("slots", justify="right")
    table.add_column("share", justify="right")
    for policy in policies:
        table.add_column(policy, justify="right")
    for start in range(0, len(result.rows), len(policies)):
        rows = result.rows[start : start + len(policies)]
        table.add_row(
            f"{rows[0].slots} of {result.num_experts}",
            f"{rows[0].slots / result.num_experts:.0%}",
            *(f"{100 * row.hit_rate:.1f}" for row in rows),
        )
    return table


def plot(result: CacheSimResult, path: str | Path) -> None:
    """Write hit rate (percent) against the share of experts that have a slot (percent), one line a policy, to `path`.

    Raises: ConfigError if matplotlib is not installed, or if `path` cannot be written.
    """
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    styles = {"belady": ("black", "--"), "belady-bypass": ("gray", ":")}
    for policy in dict.fromkeys(row.policy for row in result.rows):
        rows = sorted((row for row in result.rows if row.policy == policy), key=lambda row: row.slots)
        color, line = styles.get(policy, (None, "-"))
        shares = [100 * row.slots / result.num_experts for row in rows]
        axes.plot(shares, [100 * row.hit_rate for row in rows], line, color=color, marker="o", ms=4, label=policy)
    figure.suptitle(f"Expert cache hit rate, {result.trace}")
    axes.set_title(_basis(result, "; "), fontsize=8)
    axes.set_xlabel("experts that have a slot, % of each layer")
    axes.set_ylabel("hit rate, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    save_figure(figure, path)
