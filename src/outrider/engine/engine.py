"""One engine: a target, its drafter, its expert memory, its KV pages, and the loop that drives them."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from operator import index
from typing import TYPE_CHECKING

from outrider.checkpoint import Checkpoint
from outrider.config import SamplingParams
from outrider.core import Band, ExpertKey
from outrider.engine.faults import device_faults
from outrider.engine.interrupts import interrupts_deferred
from outrider.engine.runner import Runner
from outrider.errors import RequestError
from outrider.experts.host_provider import HostProvider
from outrider.kvcache.pages import PAGE_SIZE, OutOfPages, PageTable
from outrider.kvcache.storage import KVStorage
from outrider.models.decoder import Decoder
from outrider.route_ahead.statistics import RouteAheadStatistics
from outrider.scheduler.scheduler import Scheduler, StepResult
from outrider.scheduler.sequence import FinishReason
from outrider.spec.session import DraftResult, Rounds, SpecSession, VerifyResult
from outrider.stats import RoundCounters, Stats

if TYPE_CHECKING:
    from outrider.experts.device_provider import DeviceProvider
    from outrider.models.device_decoder import DeviceDecoder


class Engine:
    """Built by `engine.build`. Not thread-safe: one thread submits and steps.

    Attributes:
        at_close: called when the engine is closed.
        note: what its user should know about how it runs (a slower way was taken, and why); None: nothing.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        decoder: "Decoder | DeviceDecoder",
        provider: "HostProvider | DeviceProvider",
        kv: KVStorage,
        rounds: Rounds,
        scheduler: Scheduler[SpecSession],
        max_context: int,
        measured_h2d: float | None,
        route_ahead: RouteAheadStatistics | None,
        note: str | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.decoder = decoder
        self.provider = provider
        self.kv = kv
        self.rounds = rounds
        self.scheduler = scheduler
        self.runner = Runner(rounds)
        self.max_context = max_context
        self.note = note
        self.at_close: Callable[[], None] | None = None
        self._measured_h2d = measured_h2d
        self._route_ahead = route_ahead
        self._ids = count()

    def check(self, prompt_ids: Ids[int], params: SamplingParams) -> list[int]:
        """The prompt as a list, if it can be served.

        Raises: RequestError if it is empty, holds anything but ids that the model has, or does not fit with its
            output into the context.
        """
        try:
            prompt = [index(i) for i in prompt_ids]
        except TypeError as error:
            raise RequestError(f"the prompt holds something that is no token id ({error})") from error
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if wrong := [i for i in prompt if not 0 <= i < self.config.vocab_size]:
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

    def submit(self, prompt_ids: Ids[int], params: SamplingParams) -> SpecSession:
        """Queue a request for `step`. Raises: RequestError as `check` does."""
        session = self._session(prompt_ids, params)
        self.scheduler.add(session)
        return session

    def step(self) -> StepResult[SpecSession] | None:
        """Run one step; None if there is nothing to do. An interrupt waits until the step is over."""
        with interrupts_deferred(), device_faults("running a step"):
            plan = self.scheduler.schedule()
            if plan is None:
                return None
            result = self.runner.execute(plan)
            self.scheduler.update(result)
            return result

    # --- one request by hand: the same rounds that `step` takes -------------------------------------------------------

    def begin_session(
        self, prompt_ids: Ids[int], sampling: SamplingParams | None = None, stop_ids: Ids[int] = ()
    ) -> SpecSession:
        """Prefill a request and emit its first token, the anchor; the caller drives its rounds.

        It is finished at once if the anchor is a stop token or the only token wanted. Its pages are kept until it is
        finished or cancelled.

        Args: `stop_ids` end it beside those of `sampling` and the model's own.

        Raises: RequestError as `check` does, or if there are not enough free pages for its whole length.
        """
        params = sampling or SamplingParams()
        session = self._session(
            prompt_ids, replace(params, stop_token_ids=(*params.stop_token_ids, *stop_ids)) if stop_ids else params
        )
        try:
            self.scheduler.hold(session)
        except OutOfPages as error:
            raise RequestError(f"{error}; finish or cancel other requests first, or raise kv_tokens") from error
        with ExitStack() as undo:
            undo.callback(self.cancel, session)
            while not session.prefilled:
                with interrupts_deferred(), device_faults("running a prompt"):
                    self.rounds.prefill(session, self.scheduler.next_chunk(session))
            undo.pop_all()
        self._retire([session])
        return session

    def draft_round(self, sessions: Ids[SpecSession]) -> list[DraftResult]:
        """One drafter pass for all `sessions`. Raises: RuntimeError in the wrong order (`spec/session.py`)."""
        with interrupts_deferred(), device_faults("drafting"):
            return self.rounds.draft_round(sessions)

    def verify_round(self, sessions: Ids[SpecSession], widths: Ids[int] | None = None) -> list[VerifyResult]:
        """One target step for all `sessions`. Raises: as `Rounds.verify_round`."""
        with interrupts_deferred(), device_faults("verifying"):
            results = self.rounds.verify_round(sessions, widths)
            self._retire(sessions)
            return results

    def prefetch(self, keys: Iterable[ExpertKey], priority: Band = Band.ROUTE_AHEAD) -> int:
        """Fetch experts ahead of the next verify; returns how many were queued, the others being there or under way."""
        with interrupts_deferred():
            queued = self.provider.prefetch(keys, priority)
            if self._route_ahead:
                self._route_ahead.predict(queued)
            return len(queued)

    def cancel(self, session: SpecSession) -> None:
        """Drop a request and free its pages; if it was not finished, it is now, as aborted."""
        with interrupts_deferred():
            session.finish_reason = session.finish_reason or FinishReason.ABORT
            self.scheduler.remove(session)

    def stats(self) -> Stats:
        """What was measured since the last `reset_counters`; reading changes nothing."""
        seen = self.provider.snapshot()
        accesses = seen.hits + seen.misses
        took = self.rounds.counters
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
            kv_occupancy_bytes=sum(storage.occupancy_bytes for storage in self._storages()),
            decode_steps=seen.steps,
            prefill_steps=seen.prefill_steps,
            streamed_prefill_steps=seen.streamed_steps,
            tokens_generated=took.first_tokens + took.tokens,
            decode_tokens=took.tokens,
            decode_seconds=(took.draft_seconds or 0.0) + took.verify_seconds if took.rounds else None,
            draft_seconds=took.draft_seconds if took.rounds and self.rounds.drafter else None,
            rounds=took.rounds,
            mean_acceptance_length=took.mean_tokens,
            drafted_tokens=took.drafted,
            tested_drafts=sum(took.tested),
            accepted_drafts=sum(took.accepted),
            acceptance_by_position=[a / t for a, t in zip(took.accepted, took.tested, strict=True)] or None,
            route_ahead=self._route_ahead.stats() if self._route_ahead else None,
        )

    def reset_counters(self) -> None:
        """Zero all counters; residency, recency and running requests stay as they are."""
        with interrupts_deferred():
            self.provider.reset_counters()
            self.rounds.counters = RoundCounters()
            if self._route_ahead:
                self._route_ahead.reset()

    def reset_cache(self) -> None:
        """Empty all expert slots; the next step starts cold and gives the same tokens."""
        with interrupts_deferred():
            self.provider.reset_cache()

    def close(self) -> None:
        """Stop the copy thread and lift the bound on the device's memory. The engine cannot be used afterwards."""
        self.provider.close()
        if self.at_close:
            self.at_close()

    def _session(self, prompt_ids: Ids[int], params: SamplingParams) -> SpecSession:
        prompt = self.check(prompt_ids, params)
        eos = () if params.ignore_eos else self.config.eos_token_ids
        stops = frozenset(i for i in (*params.stop_token_ids, *eos) if 0 <= i < self.config.vocab_size)
        return SpecSession(next(self._ids), prompt, params, stops, PageTable(self.kv.pool))

    def _retire(self, sessions: Ids[SpecSession]) -> None:
        for session in sessions:
            if session.finished:
                self.scheduler.remove(session)

    def _storages(self) -> list[KVStorage]:
        return [self.kv, *([self.rounds.drafter.context] if self.rounds.drafter else [])]
