"""One engine: a target, its expert memory, its KV pages, and the loop that drives them."""

import time
from collections.abc import Sequence as Ids
from itertools import count

from outrider.checkpoint import Checkpoint
from outrider.config import SamplingParams
from outrider.core import Phase
from outrider.engine.interrupts import interrupts_deferred
from outrider.engine.runner import Runner
from outrider.errors import RequestError
from outrider.experts.host_provider import HostProvider
from outrider.kvcache.pages import PAGE_SIZE, PageTable
from outrider.kvcache.storage import KVStorage
from outrider.models.decoder import Decoder
from outrider.scheduler.scheduler import Scheduler, StepResult
from outrider.scheduler.sequence import Sequence
from outrider.stats import Stats


class Engine:
    """Built by `engine.build`. Not thread-safe: one thread submits and steps."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        decoder: Decoder,
        provider: HostProvider,
        kv: KVStorage,
        scheduler: Scheduler,
        runner: Runner,
        max_context: int,
        measured_h2d: float | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.decoder = decoder
        self.provider = provider
        self.kv = kv
        self.scheduler = scheduler
        self.runner = runner
        self.max_context = max_context
        self._measured_h2d = measured_h2d
        self._ids = count()
        self._tokens = self._decode_tokens = 0
        self._decode_seconds = 0.0

    def check(self, prompt_ids: Ids[int], params: SamplingParams) -> list[int]:
        """The prompt as a list, if it can be served.

        Raises: RequestError if it is empty, holds anything but ids that the model has, or does not fit with its
            output into the context.
        """
        prompt = list(prompt_ids)
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if wrong := [i for i in prompt if not isinstance(i, int) or not 0 <= i < self.config.vocab_size]:
            raise RequestError(f"the prompt holds token id {wrong[0]}; ids go from 0 to {self.config.vocab_size - 1}")
        total = len(prompt) + params.max_tokens
        room = min(self.max_context, self.kv.pool.num_pages * PAGE_SIZE)
        if total > room:
            advice = ", lower max_tokens or raise the context" if room < self.config.max_positions else " or max_tokens"
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, with max_tokens {params.max_tokens} that is {total}; "
                f"the context holds {room}: shorten the prompt{advice}"
            )
        return prompt

    def submit(self, prompt_ids: Ids[int], params: SamplingParams) -> Sequence:
        """Queue a request. Raises: RequestError as `check` does."""
        prompt = self.check(prompt_ids, params)
        eos = () if params.ignore_eos else self.config.eos_token_ids
        stops = frozenset((*params.stop_token_ids, *eos))
        sequence = Sequence(next(self._ids), prompt, params, stops, PageTable(self.kv.pool))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepResult | None:
        """Run one step; None if there is nothing to do. An interrupt waits until the step is over."""
        with interrupts_deferred():
            plan = self.scheduler.schedule()
            if plan is None:
                return None
            started = time.perf_counter()
            result = self.runner.execute(plan)
            self.scheduler.update(result)
            self._count(result, time.perf_counter() - started)
            return result

    def cancel(self, sequence: Sequence) -> None:
        """Drop a request, finished or not, and free its pages."""
        self.scheduler.remove(sequence)

    def stats(self) -> Stats:
        """What was measured since the last `reset_counters`; reading changes nothing."""
        seen = self.provider.snapshot()
        accesses = seen.hits + seen.misses
        return Stats(
            expert_cache_hit_rate=seen.hits / accesses if accesses else None,
            expert_accesses=accesses,
            expert_hits=seen.hits,
            expert_misses=seen.misses,
            expert_late=seen.late,
            expert_overflow=seen.overflow,
            prefill_hits=seen.prefill_hits,
            prefill_misses=seen.prefill_misses,
            prefill_cold_bytes=seen.prefill_cold_bytes,
            expert_occupancy_bytes=self.provider.occupancy_bytes,
            expert_slots_total=self.provider.slots_total,
            num_offloaded_experts=self.provider.num_offloaded,
            cold_bytes=seen.cold_bytes,
            prefetched_bytes=seen.prefetched_bytes,
            wasted_prefetch_bytes=seen.wasted_prefetch_bytes,
            cancelled_prefetches=seen.cancelled_prefetches,
            dropped_prefetches=seen.dropped_prefetches,
            promotions=seen.promotions,
            evictions=seen.evictions,
            h2d_bytes={band.name: moved for band, moved in seen.h2d_bytes.items()},
            exposed_fetch_seconds=seen.exposed_fetch_seconds if seen.steps + seen.prefill_steps else None,
            measured_h2d_bytes_per_second=self._measured_h2d,
            kv_occupancy_bytes=self.kv.occupancy_bytes,
            decode_steps=seen.steps,
            prefill_steps=seen.prefill_steps,
            tokens_generated=self._tokens,
            decode_tokens=self._decode_tokens,
            decode_seconds=self._decode_seconds if seen.steps else None,
        )

    def reset_counters(self) -> None:
        """Zero all counters; residency, recency and running requests stay as they are."""
        with interrupts_deferred():
            self.provider.reset_counters()
        self._tokens = self._decode_tokens = 0
        self._decode_seconds = 0.0

    def reset_cache(self) -> None:
        """Empty all expert slots; the next step starts cold and gives the same tokens."""
        with interrupts_deferred():
            self.provider.reset_cache()

    def close(self) -> None:
        """Stop the copy thread. The engine cannot be used afterwards."""
        self.provider.close()

    def _count(self, result: StepResult, seconds: float) -> None:
        tokens = sum(token is not None for token in result.tokens)
        self._tokens += tokens
        if result.plan.phase is Phase.DECODE:
            self._decode_tokens += tokens
            self._decode_seconds += seconds
