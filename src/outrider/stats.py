"""S1: what the engine measured. A figure that was not observed is None, never 0.0; reading changes nothing."""

from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.core import Band


@dataclass
class ExpertCounters:
    """Running counts of one expert cache since the last reset. Bytes of experts are exact payload bytes.

    An access is one (layer, expert) of one step's union. `late` is the part of `misses` that was in flight when its
    layer resolved. `h2d_bytes` counts bytes that were moved, padding included. `exposed_fetch_seconds` is None where
    nobody measures it.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    prefill_hits: int = 0
    prefill_misses: int = 0
    cold_bytes: int = 0
    prefill_cold_bytes: int = 0
    prefetched_bytes: int = 0
    wasted_prefetch_bytes: int = 0
    dropped_prefetches: int = 0
    cancelled_prefetches: int = 0
    promotions: int = 0
    evictions: int = 0
    overflow: int = 0
    steps: int = 0
    prefill_steps: int = 0
    streamed_steps: int = 0
    exposed_fetch_seconds: float | None = 0.0
    h2d_bytes: dict[Band, int] = field(default_factory=lambda: dict.fromkeys(Band, 0))


@dataclass
class RoundCounters:
    """Running counts of rounds since the last reset; a round is one verify of one sequence.

    `tested[i]`, `accepted[i]`: rounds that put d_{i+1} to the test, and those in which it and all before it stood.
    draft_seconds: None where some rounds' drafting could not be told from their verifying.
    """

    rounds: int = 0
    first_tokens: int = 0
    tokens: int = 0
    drafted: int = 0
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_seconds: float | None = 0.0
    verify_seconds: float = 0.0

    @property
    def mean_tokens(self) -> float | None:
        """Tokens a round, None before the first."""
        return self.tokens / self.rounds if self.rounds else None

    def add_drafting(self, seconds: float | None) -> None:
        """Time that drafting took; None where nobody could tell, and then the sum is None."""
        known = self.draft_seconds is not None and seconds is not None
        self.draft_seconds = self.draft_seconds + seconds if known else None  # type: ignore[operator]

    def count(self, tested: int, accepted: int, tokens: int) -> None:
        """One round that tested so many drafts, accepted so many and emitted so many tokens."""
        self.rounds += 1
        self.tokens += tokens
        missing = [0] * (tested - len(self.tested))
        self.tested += missing
        self.accepted += missing
        for place in range(tested):
            self.tested[place] += 1
            self.accepted[place] += place < accepted


@dataclass(frozen=True)
class RouteAheadStats:
    """S3: what prefetching ahead of the routers was good for, summed over committed verifies. Experts, then bytes.

    P is what was prefetched for a layer, A the union of the rows that ran, U the union of the rows that were kept:
    predicted |P|, actual |A|, covered |P and A|, kept |P and U|, wasted |P without U|.

    Attributes:
        coverage: covered / actual; None when nothing was observed. waste_ratio: wasted / predicted; None without any.
        route_ahead_predicted_bytes, _kept_bytes, _wasted_bytes: exact stored bytes; None until sizes are known.
    """

    steps: int
    layers_observed: int
    predicted: int
    actual: int
    covered: int
    kept: int
    wasted: int
    coverage: float | None
    waste_ratio: float | None
    route_ahead_predicted_bytes: int | None
    route_ahead_kept_bytes: int | None
    route_ahead_wasted_bytes: int | None


@dataclass(frozen=True)
class Stats:
    """A snapshot of `engine.stats()`.

    Attributes:
        expert_cache_hit_rate: hits / accesses of decode steps; None before the first access.
        expert_accesses, expert_hits, expert_misses: decode counts; hits + misses = accesses.
        expert_late: misses that were already in flight when their layer resolved.
        prefill_hits, prefill_misses, prefill_cold_bytes: the same for prefill, counted apart.
        expert_overflow: experts by which unions exceeded their layer's slots, which were then reused within a step.
        expert_occupancy_bytes: payload bytes of all wholly resident experts.
        expert_slots_total: slots over all layers.
        num_offloaded_experts: experts that do not all fit in slots; 0 means resident.
        cold_bytes: payload bytes that decode steps missed.
        prefetched_bytes, wasted_prefetch_bytes: payload bytes that prefetches brought, and those of them evicted,
            overwritten or cancelled without one use; what came before the last reset is in neither.
        cancelled_prefetches, dropped_prefetches, promotions: prefetches taken back; not queued for want of a slot;
            raised to a higher band by a demand.
        evictions: resident experts that lost their slot to another one.
        h2d_bytes: bytes copied into slots by band, padding included.
        exposed_fetch_seconds: time that the critical path waited for expert bytes (device clock on CUDA); None if no
            step ran, or the device drives (not measured yet).
        measured_h2d_bytes_per_second: probe at start on the engine's own copy path; None if not run.
        kv_occupancy_bytes: bytes of KV pages in use.
        decode_steps, prefill_steps: target forwards; streamed_prefill_steps: those that ran a long prompt, whose
            absent experts pass beside the cache.
        tokens_generated, decode_tokens: output tokens in all, and those of decode steps (prefill gives the first).
        decode_seconds: wall time of rounds; None if none ran. draft_seconds: the part of it before the verify.
        rounds: verifies of one sequence. mean_acceptance_length: tokens of a round, the bonus token included, so that
            plain decoding has 1.0; None before the first round.
        drafted_tokens: tokens that were drafted. tested_drafts, accepted_drafts: drafts put to the test, and accepted.
        acceptance_by_position: for d_1, d_2, ...: of the rounds that tested it, the share in which it and all before it
            stood; None where no draft was tested.
        route_ahead: S3; None if it is not recorded.
    """

    expert_cache_hit_rate: float | None
    expert_accesses: int
    expert_hits: int
    expert_misses: int
    expert_late: int
    expert_overflow: int
    prefill_hits: int
    prefill_misses: int
    prefill_cold_bytes: int
    expert_occupancy_bytes: int
    expert_slots_total: int
    num_offloaded_experts: int
    cold_bytes: int
    prefetched_bytes: int
    wasted_prefetch_bytes: int
    cancelled_prefetches: int
    dropped_prefetches: int
    promotions: int
    evictions: int
    h2d_bytes: dict[str, int]
    exposed_fetch_seconds: float | None
    measured_h2d_bytes_per_second: float | None
    kv_occupancy_bytes: int
    decode_steps: int
    prefill_steps: int
    streamed_prefill_steps: int
    tokens_generated: int
    decode_tokens: int
    decode_seconds: float | None
    draft_seconds: float | None
    rounds: int
    mean_acceptance_length: float | None
    drafted_tokens: int
    tested_drafts: int
    accepted_drafts: int
    acceptance_by_position: list[float] | None
    route_ahead: RouteAheadStats | None

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as plain JSON types."""
        return asdict(self)
