"""S1: what the engine measured. A figure that was not observed is None, never 0.0; reading changes nothing."""

from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.core import Band


@dataclass
class ExpertCounters:
    """Running counts of one expert cache since the last reset. Bytes of experts are exact payload bytes.

    An access is one (layer, expert) of one step's union. `late` is the part of `misses` that was in flight when its
    layer resolved. `h2d_bytes` counts bytes that were moved, padding included.
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
    exposed_fetch_seconds: float = 0.0
    h2d_bytes: dict[Band, int] = field(default_factory=lambda: dict.fromkeys(Band, 0))


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
            step ran.
        measured_h2d_bytes_per_second: probe at start on the engine's own copy path; None if not run.
        kv_occupancy_bytes: bytes of KV pages in use.
        decode_steps, prefill_steps: target forwards.
        tokens_generated, decode_tokens: output tokens in all, and those of decode steps (prefill gives the first).
        decode_seconds: wall time of decode steps; None if none ran.
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
    tokens_generated: int
    decode_tokens: int
    decode_seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as plain JSON types."""
        return asdict(self)
