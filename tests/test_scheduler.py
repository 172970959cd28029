"""Who runs next: arrival order, absolute chunk boundaries, pages reserved for a whole request and not one more."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import SamplingParams
from outrider.core import Phase
from outrider.kvcache.pages import PAGE_SIZE, OutOfPages, PagePool, PageTable, pages_for
from outrider.scheduler.scheduler import Plan, Scheduler, StepResult
from outrider.scheduler.sequence import FinishReason, Sequence


def sequence(pool: PagePool, number: int, prompt: int, tokens: int, stops: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(number, [1] * prompt, SamplingParams(max_tokens=tokens), stops, PageTable(pool))


def run(scheduler: Scheduler[Sequence], plan: Plan[Sequence], token: int = 5, width: int = 1) -> None:
    """Do what a runner does to tables, and hand out `token`, `width` times in a round as far as there is room."""
    tokens = []
    for s in plan.sequences:
        rows = plan.count or min(width, s.remaining)
        s.table.append(rows)
        tokens.append(tuple(s.extend([token] * (1 if plan.count else rows)) if s.prefilled else ()))
        if s.output:
            s.table.truncate(len(s.prompt) + len(s.output) - 1)
    scheduler.update(StepResult(plan, tuple(tokens)))


def drain(scheduler: Scheduler[Sequence]) -> list[Plan[Sequence]]:
    plans = []
    while (plan := scheduler.schedule()) is not None:
        plans.append(plan)
        run(scheduler, plan)
    return plans


def test_prompt_chunks_end_at_absolute_boundaries() -> None:
    pool = PagePool(100)
    scheduler = Scheduler[Sequence](pool, max_batch=4, prefill_chunk=32)
    scheduler.add(sequence(pool, 0, prompt=75, tokens=2))
    first, second, third, decode = drain(scheduler)
    assert [p.count for p in (first, second, third)] == [32, 32, 11]
    assert decode.phase is Phase.DECODE and pool.num_used == 0


def test_a_chunk_after_a_shorter_one_still_ends_at_the_boundary() -> None:
    """What was run before (a reused prefix, say) must not shift the boundaries."""
    pool = PagePool(100)
    scheduler = Scheduler[Sequence](pool, max_batch=4, prefill_chunk=32)
    late = sequence(pool, 0, prompt=75, tokens=1)
    late.table.append(20)
    scheduler.add(late)
    assert [p.count for p in drain(scheduler)] == [12, 32, 11]


def test_a_request_that_exactly_fits_runs_and_the_next_waits() -> None:
    pool = PagePool(2)
    scheduler = Scheduler[Sequence](pool, max_batch=4, prefill_chunk=512)
    # 33 tokens in all, but the last is never fed back: 32 in two pages.
    first, second = sequence(pool, 0, prompt=30, tokens=3), sequence(pool, 1, prompt=1, tokens=1)
    scheduler.add(first)
    scheduler.add(second)
    plans = drain(scheduler)
    assert [p.sequences for p in plans] == [(first,), (first,), (first,), (second,)]
    assert first.finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_a_sequence_at_once() -> None:
    pool = PagePool(4)
    scheduler = Scheduler[Sequence](pool, max_batch=4, prefill_chunk=512)
    only = sequence(pool, 0, prompt=3, tokens=9, stops=frozenset([5]))
    scheduler.add(only)
    assert len(drain(scheduler)) == 1
    assert only.finish_reason is FinishReason.STOP and only.output == [5] and not scheduler.has_work


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(5, 12),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 8),
)
def test_everything_finishes_in_order_of_arrival(
    sizes: list[tuple[int, int]], pages: int, batch: int, chunk: int, width: int
) -> None:
    pool = PagePool(pages)
    scheduler = Scheduler[Sequence](pool, batch, chunk)
    sequences = [sequence(pool, n, prompt, tokens) for n, (prompt, tokens) in enumerate(sizes)]
    for s in sequences:
        assert pages_for(len(s.prompt) + s.params.max_tokens) <= pages
        scheduler.add(s)
    started: list[int] = []
    while (plan := scheduler.schedule()) is not None:
        assert len(plan.sequences) <= batch
        started += [s.id for s in plan.sequences if s.table.length == 0]
        for s in plan.sequences:
            assert (s.table.length + plan.count) % chunk == 0 or s.table.length + plan.count >= len(s.prompt)
        run(scheduler, plan, width=width)  # raises OutOfPages if more was promised than there is
    assert started == sorted(started) == [s.id for s in sequences]
    assert all(len(s.output) == s.params.max_tokens for s in sequences)
    assert pool.num_used == 0 and PAGE_SIZE == 16


def test_pages_of_a_session_that_is_run_by_hand_are_kept() -> None:
    pool = PagePool(4)
    scheduler = Scheduler[Sequence](pool, max_batch=4, prefill_chunk=512)
    by_hand, waiting = sequence(pool, 0, prompt=17, tokens=16), sequence(pool, 1, prompt=40, tokens=1)
    scheduler.hold(by_hand)
    scheduler.add(waiting)
    assert scheduler.schedule() is None and scheduler.has_work, "three pages are wanted and two are left"
    with pytest.raises(OutOfPages, match="3 KV pages was asked for and 2"):
        scheduler.hold(sequence(pool, 2, prompt=33, tokens=1))
    scheduler.remove(by_hand)
    assert len(drain(scheduler)) == 1 and waiting.finished and pool.num_used == 0


def test_tokens_behind_the_end_are_not_taken() -> None:
    pool = PagePool(4)
    stopped = sequence(pool, 0, prompt=3, tokens=4, stops=frozenset([9]))
    assert stopped.until_end([5, 9, 5]) == [5, 9] and stopped.output == []
    assert stopped.extend([5, 9, 5]) == [5, 9] and stopped.finish_reason is FinishReason.STOP
    assert stopped.extend([1]) == [] and stopped.finish_reason is FinishReason.STOP
    full = sequence(pool, 0, prompt=3, tokens=2)
    assert full.extend([5, 6, 7]) == [5, 6] and full.finish_reason is FinishReason.LENGTH and full.remaining == 0
