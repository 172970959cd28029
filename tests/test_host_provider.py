"""The host-driven provider: right bytes, exact counts, bands that mean something."""

import threading
import time
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_store import FakeStore, make_provider, same_bytes
from outrider.core import Band, ExpertKey, Phase
from outrider.errors import OutriderError
from outrider.experts.host_provider import HostProvider
from outrider.experts.slots import LayerSlots

PAYLOAD = 314


def run_step(
    provider: HostProvider,
    routes: dict[int, list[list[int]]],
    kept: Iterable[int] | None = None,
    phase: Phase = Phase.DECODE,
) -> dict[int, list[int]]:
    """One step; the experts of each layer in the order in which they came. Bytes are checked while in use."""
    provider.begin_step(phase)
    came: dict[int, list[int]] = {}
    for layer, rows in routes.items():
        came[layer] = []
        for expert, weights in provider.resolve(layer, torch.tensor(rows)):
            assert same_bytes(provider.store, ExpertKey(layer, expert), weights)  # type: ignore[arg-type]
            came[layer].append(expert)
    rows_in_step = len(next(iter(routes.values())))
    provider.commit(list(range(rows_in_step)) if kept is None else list(kept))
    return came


def finish_fetches(provider: HostProvider) -> None:
    """Wait until nothing is under way."""
    deadline = time.monotonic() + 10
    while any(s.fetch and not s.fetch.done for slots in provider._layers.values() for s in slots.slots):
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- counts ----------------------------------------------------------------------------------------------------------


def test_hits_misses_and_bytes_are_exact() -> None:
    store = FakeStore(2, 8)
    provider = make_provider(store, 4)
    run_step(provider, {0: [[0, 1]], 1: [[2, 3]]})
    run_step(provider, {0: [[1, 2]], 1: [[2, 3]]})
    seen = provider.snapshot()
    assert (seen.hits, seen.misses, seen.late, seen.overflow, seen.steps) == (3, 5, 0, 0, 2)
    assert seen.cold_bytes == 5 * PAYLOAD
    assert seen.h2d_bytes == {Band.ON_DEMAND: 5 * 768, Band.ROUTE_AHEAD: 0, Band.BACKGROUND: 0}
    assert seen.evictions == 0
    assert provider.occupancy_bytes == 5 * PAYLOAD
    assert provider.num_offloaded == 16 and provider.slots_total == 8


def test_everything_fits_means_nothing_is_offloaded() -> None:
    provider = make_provider(FakeStore(2, 4), 4)
    assert provider.num_offloaded == 0


def test_prefill_is_counted_apart_and_leaves_recency_alone() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    for _ in range(3):
        run_step(provider, {0: [[0, 1]]})
    run_step(provider, {0: [[e] for e in range(8)]}, phase=Phase.PREFILL)
    seen = provider.snapshot()
    assert (seen.prefill_hits, seen.prefill_misses, seen.prefill_cold_bytes) == (2, 6, 6 * PAYLOAD)
    assert (seen.hits, seen.misses) == (4, 2)
    run_step(provider, {0: [[0, 1]]})
    assert provider.snapshot().hits == 6, "a prompt that touched all experts evicted decode's own"


def test_rejected_rows_count_as_accesses_but_not_as_use() -> None:
    """Row 0 keeps {0, 1}; the rejected row brings {2, 3}, which must be the first to go."""
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    run_step(provider, {0: [[0, 1], [2, 3]]}, kept=[0])
    assert provider.snapshot().misses == 4
    run_step(provider, {0: [[4, 5]]})
    assert {k.expert for k in provider.resident_keys()} == {0, 1, 4, 5}


def test_a_step_without_commit_counts_nothing() -> None:
    provider = make_provider(FakeStore(1, 8), 4)
    provider.begin_step(Phase.DECODE)
    list(provider.resolve(0, torch.tensor([[0, 1]])))
    run_step(provider, {0: [[2, 3]]})
    seen = provider.snapshot()
    assert (seen.hits, seen.misses, seen.steps) == (0, 2, 1)


def test_calls_out_of_order_are_errors() -> None:
    provider = make_provider(FakeStore(1, 8), 4)
    with pytest.raises(RuntimeError, match="begin_step"):
        next(provider.resolve(0, torch.tensor([[0]])))
    with pytest.raises(RuntimeError, match="begin_step"):
        provider.commit([0])
    provider.begin_step(Phase.DECODE)
    list(provider.resolve(0, torch.tensor([[0]])))
    with pytest.raises(RuntimeError, match="already resolved"):
        next(provider.resolve(0, torch.tensor([[0]])))


# --- unions larger than the slots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_waves_serve_any_union(slots: int) -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, slots)
    for _ in range(2):
        assert sorted(run_step(provider, {0: [[e] for e in range(8)]})[0]) == list(range(8))
    seen = provider.snapshot()
    assert seen.hits + seen.misses == 16
    assert seen.overflow > 0
    assert len(store.log) == 3 * seen.misses, "one copy of three chunks for each miss"
    assert provider.occupancy_bytes == slots * PAYLOAD


def test_resident_experts_come_first() -> None:
    provider = make_provider(FakeStore(1, 8), 4)
    run_step(provider, {0: [[5, 6]]})
    assert run_step(provider, {0: [[1, 5], [6, 0]]})[0] == [5, 6, 0, 1]


# --- bands -----------------------------------------------------------------------------------------------------------


def test_demand_waits_for_one_chunk_not_for_an_expert() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 6)
    store.gate.clear()
    provider.prefetch([ExpertKey(0, e) for e in (0, 1, 2)], Band.BACKGROUND)
    assert store.entered.acquire(timeout=5)  # the first chunk of expert 0 is being copied
    provider.prefetch([ExpertKey(0, 3)], Band.ROUTE_AHEAD)
    provider.begin_step(Phase.DECODE)
    resolving = provider.resolve(0, torch.tensor([[7]]))
    threading.Timer(0.05, store.gate.set).start()
    next(resolving)
    finish_fetches(provider)
    order = [key.expert for key, _, _ in store.log]
    assert order == [0, 7, 7, 7, 3, 3, 3, 0, 0, 1, 1, 1, 2, 2, 2]


def test_demand_promotes_a_half_copied_prefetch_and_copies_nothing_twice() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    store.gate.clear()
    provider.prefetch([ExpertKey(0, 0), ExpertKey(0, 1)], Band.BACKGROUND)
    assert store.entered.acquire(timeout=5)
    threading.Timer(0.05, store.gate.set).start()
    run_step(provider, {0: [[1]]})
    finish_fetches(provider)
    spans = [(start, stop) for key, start, stop in store.log if key.expert == 1]
    assert spans == [(0, 256), (256, 512), (512, 768)]
    seen = provider.snapshot()
    assert (seen.hits, seen.misses, seen.late, seen.promotions) == (0, 1, 1, 1)
    assert [key.expert for key, _, _ in store.log] == [0, 1, 1, 1, 0, 0]
    assert seen.h2d_bytes == {Band.ON_DEMAND: 768, Band.ROUTE_AHEAD: 0, Band.BACKGROUND: 768}
    assert seen.prefetched_bytes == PAYLOAD


def test_a_more_urgent_prefetch_promotes_a_queued_one() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    store.gate.clear()
    provider.prefetch([ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(0, 2)], Band.BACKGROUND)
    assert store.entered.acquire(timeout=5)
    assert len(provider.prefetch([ExpertKey(0, 2)], Band.ROUTE_AHEAD)) == 0
    store.gate.set()
    finish_fetches(provider)
    assert [key.expert for key, _, _ in store.log] == [0, 2, 2, 2, 0, 0, 1, 1, 1]


def test_a_prefetched_expert_is_a_hit() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    assert len(provider.prefetch([ExpertKey(0, 3)])) == 1
    assert len(provider.prefetch([ExpertKey(0, 3)])) == 0
    finish_fetches(provider)
    run_step(provider, {0: [[3]]})
    seen = provider.snapshot()
    assert (seen.hits, seen.misses, seen.cold_bytes) == (1, 0, 0)
    assert (seen.prefetched_bytes, seen.wasted_prefetch_bytes) == (PAYLOAD, 0)


def test_waste_is_what_was_prefetched_and_never_used() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 2)
    provider.prefetch([ExpertKey(0, 0), ExpertKey(0, 1)])
    finish_fetches(provider)
    run_step(provider, {0: [[0]]})
    run_step(provider, {0: [[2, 3]]})  # evicts the used 0 and the unused 1
    assert provider.snapshot().wasted_prefetch_bytes == PAYLOAD
    run_step(provider, {0: [[4, 5]]})
    assert provider.snapshot().wasted_prefetch_bytes == PAYLOAD
    assert provider.snapshot().cancelled_prefetches == 0, "both had arrived"


def test_prefetch_never_takes_the_running_layer_s_experts_nor_another_prefetch() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 2)
    run_step(provider, {0: [[0, 1]]})
    provider.begin_step(Phase.DECODE)
    resolving = provider.resolve(0, torch.tensor([[0, 1]]))
    next(resolving)
    assert len(provider.prefetch([ExpertKey(0, 5)])) == 0
    assert provider.snapshot().dropped_prefetches == 1
    list(resolving)
    provider.commit([0])
    assert len(provider.prefetch([ExpertKey(0, 5), ExpertKey(0, 6), ExpertKey(0, 7)])) == 2
    assert provider.snapshot().dropped_prefetches == 2


def test_cancelled_prefetches_give_their_slots_back() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    store.gate.clear()
    provider.prefetch([ExpertKey(0, e) for e in range(4)], Band.BACKGROUND)
    assert store.entered.acquire(timeout=5)
    threading.Timer(0.05, store.gate.set).start()
    assert provider.cancel_prefetches() == 4
    seen = provider.snapshot()
    assert seen.cancelled_prefetches == 4
    assert seen.wasted_prefetch_bytes == 256, "the first chunk was payload of expert 0"
    assert provider.resident_keys() == [] and provider.occupancy_bytes == 0
    run_step(provider, {0: [[0, 1, 2, 3]]})
    assert provider.snapshot().misses == 4


def test_demand_takes_slots_from_prefetches_when_there_are_no_others() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 2)
    store.gate.clear()
    provider.prefetch([ExpertKey(0, 0), ExpertKey(0, 1)], Band.BACKGROUND)
    assert store.entered.acquire(timeout=5)
    threading.Timer(0.05, store.gate.set).start()
    run_step(provider, {0: [[6, 7]]})
    assert {k.expert for k in provider.resident_keys()} == {6, 7}
    assert provider.snapshot().cancelled_prefetches == 2


# --- resets and failures ---------------------------------------------------------------------------------------------


def test_resets_leave_a_working_provider() -> None:
    provider = make_provider(FakeStore(2, 8), 4)
    for _ in range(100):
        run_step(provider, {0: [[0, 1]], 1: [[6, 7]]})
        provider.reset_cache()
        assert provider.occupancy_bytes == 0
        run_step(provider, {0: [[0, 1]], 1: [[6, 7]]})
        provider.reset_counters()
        seen = provider.snapshot()
        assert (seen.hits, seen.misses, sum(seen.h2d_bytes.values()), seen.exposed_fetch_seconds) == (0, 0, 0, 0)


def test_an_unreadable_expert_is_an_error_and_not_a_hang() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    store.fail = True
    for _ in range(2):
        with pytest.raises(OutriderError, match=r"expert \(0, 3\) could not be copied: the disk is gone"):
            run_step(provider, {0: [[3]]})


def test_exposed_time_is_measured() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    store.gate.clear()
    threading.Timer(0.1, store.gate.set).start()
    run_step(provider, {0: [[0]]})
    exposed = provider.snapshot().exposed_fetch_seconds
    assert 0.05 < exposed < 5
    run_step(provider, {0: [[0]]})
    assert provider.snapshot().exposed_fetch_seconds == exposed


# --- anything at all -------------------------------------------------------------------------------------------------

LAYERS, EXPERTS = 2, 6
route = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=2, max_size=2, unique=True), min_size=1, max_size=5)
step = st.tuples(st.just("step"), route, route, st.sampled_from(Phase), st.integers(0, 5))
keys = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), max_size=6)
prefetch = st.tuples(st.just("prefetch"), keys, st.sampled_from([Band.ROUTE_AHEAD, Band.BACKGROUND]))
other = st.tuples(st.sampled_from(["cancel", "reset_cache", "wait", "abandon"]))
program = st.lists(st.one_of(step, step, prefetch, other), max_size=25)


def abandon(provider: HostProvider) -> None:
    """A step that dies in the middle of a layer."""
    provider.begin_step(Phase.DECODE)
    next(provider.resolve(0, torch.tensor([[0, 3], [1, 4]])))


@settings(deadline=None, max_examples=400)
@given(program, st.integers(1, EXPERTS), st.sampled_from([64, 300, 4096]), st.sampled_from(["lru", "decayed-lfu"]))
def test_random_programs(commands: list[tuple], slots: int, chunk: int, policy: str) -> None:
    store = FakeStore(LAYERS, EXPERTS)
    provider = make_provider(store, slots, policy=policy, chunk=chunk)
    release = LayerSlots.release

    def spy(self: LayerSlots, slot: object) -> None:
        if slot.expert is not None:  # type: ignore[attr-defined]
            store.log.append((ExpertKey(self.layer, slot.expert), -1, -1))  # type: ignore[attr-defined]
        release(self, slot)  # type: ignore[arg-type]

    LayerSlots.release = spy  # type: ignore[method-assign]
    try:
        accesses: Counter[Phase] = Counter()
        for command in commands:
            match command:
                case ("step", first, second, phase, kept):
                    rows = min(len(first), len(second))
                    routes = {0: first[:rows], 1: second[:rows]}
                    came = run_step(provider, routes, range(min(kept, rows)), phase)
                    for layer, route_rows in routes.items():
                        union = {e for row in route_rows for e in row}
                        assert sorted(came[layer]) == sorted(union), "each expert of the union exactly once"
                        accesses[phase] += len(union)
                case ("prefetch", wanted, band):
                    provider.prefetch([ExpertKey(*key) for key in wanted], band)
                case ("cancel",):
                    provider.cancel_prefetches()
                case ("reset_cache",):
                    provider.reset_cache()
                case ("wait",):
                    finish_fetches(provider)
                case ("abandon",):
                    abandon(provider)
        finish_fetches(provider)
    finally:
        LayerSlots.release = release  # type: ignore[method-assign]
    check_log(store)
    seen = provider.snapshot()
    assert seen.hits + seen.misses == accesses[Phase.DECODE]
    assert seen.prefill_hits + seen.prefill_misses == accesses[Phase.PREFILL]
    assert 0 <= seen.late <= seen.misses
    assert seen.cold_bytes == seen.misses * PAYLOAD
    assert sum(seen.h2d_bytes.values()) == sum(stop - start for _, start, stop in store.log if stop > 0)
    assert seen.wasted_prefetch_bytes <= seen.prefetched_bytes
    resident = provider.resident_keys()
    assert provider.occupancy_bytes == sum(store.expert_nbytes[key] for key in resident)
    for key in resident:
        weights = provider.weights_of(key)
        assert weights is not None and same_bytes(store, key, weights)
    provider.close()


def check_log(store: FakeStore) -> None:
    """No byte of an expert is copied twice while it holds a slot (a release is logged as (key, -1, -1))."""
    copied: Counter[ExpertKey] = Counter()
    for key, start, stop in store.log:
        if stop == -1:
            copied[key] = 0
        else:
            assert start == copied[key], f"{key}: bytes from {start} after {copied[key]} were there"
            copied[key] = stop


# --- what a review broke without a test noticing ----------------------------------------------------------------------


def stopped_after_one_chunk(store: FakeStore, provider: HostProvider) -> None:
    """Expert 0, a background prefetch, has one of its three chunks; expert 5, a later one, is being copied."""
    store.gate.clear()
    provider.prefetch([ExpertKey(0, 0)], Band.BACKGROUND)
    assert store.entered.acquire(timeout=5)
    provider.prefetch([ExpertKey(0, 5)], Band.ROUTE_AHEAD)
    store.step()
    assert store.entered.acquire(timeout=5)


def test_a_promoted_fetch_keeps_the_bytes_it_has() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    stopped_after_one_chunk(store, provider)
    threading.Timer(0.05, store.gate.set).start()
    run_step(provider, {0: [[0]]})
    finish_fetches(provider)
    assert [(start, stop) for key, start, stop in store.log if key.expert == 0] == [(0, 256), (256, 512), (512, 768)]
    assert [key.expert for key, _, _ in store.log] == [0, 5, 0, 0, 5, 5]
    seen = provider.snapshot()
    assert seen.h2d_bytes == {Band.ON_DEMAND: 512, Band.ROUTE_AHEAD: 768, Band.BACKGROUND: 256}
    assert seen.prefetched_bytes == 256 + PAYLOAD, "one chunk of payload of expert 0, all of expert 5"


def test_bytes_count_for_the_band_in_which_they_were_copied() -> None:
    """The chunk under way when its fetch is promoted was started as background."""
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    store.gate.clear()
    provider.prefetch([ExpertKey(0, 0)], Band.BACKGROUND)
    assert store.entered.acquire(timeout=5)
    threading.Timer(0.05, store.gate.set).start()
    run_step(provider, {0: [[0]]})
    seen = provider.snapshot()
    assert seen.h2d_bytes == {Band.ON_DEMAND: 512, Band.ROUTE_AHEAD: 0, Band.BACKGROUND: 256}


def test_a_prefetch_is_one_in_any_band() -> None:
    """An ablation may put prefetches into the on-demand band; they stay prefetches in every count."""
    store = FakeStore(1, 8)
    provider = make_provider(store, 2)
    provider.prefetch([ExpertKey(0, 0), ExpertKey(0, 1)], Band.ON_DEMAND)
    finish_fetches(provider)
    run_step(provider, {0: [[2, 3]]})
    seen = provider.snapshot()
    assert (seen.prefetched_bytes, seen.wasted_prefetch_bytes) == (2 * PAYLOAD, 2 * PAYLOAD)
    store.gate.clear()
    provider.reset_cache()
    provider.prefetch([ExpertKey(0, 4)], Band.ON_DEMAND)
    threading.Timer(0.05, store.gate.set).start()
    assert provider.cancel_prefetches() == 1


def test_overflow_is_what_a_union_has_beyond_its_slots() -> None:
    for warm in ([], [[0, 1]]):
        provider = make_provider(FakeStore(1, 8), 2)
        if warm:
            run_step(provider, {0: warm})
        run_step(provider, {0: [[0], [1], [2]]})
        assert provider.snapshot().overflow == 1


def test_evictions_are_of_resident_experts() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 2)
    run_step(provider, {0: [[0, 1]]})
    run_step(provider, {0: [[2, 3]]})
    assert provider.snapshot().evictions == 2
    provider.reset_cache()
    provider.reset_counters()
    store.gate.clear()
    provider.prefetch([ExpertKey(0, 0), ExpertKey(0, 1)])
    threading.Timer(0.05, store.gate.set).start()
    run_step(provider, {0: [[6, 7]]})
    assert (provider.snapshot().evictions, provider.snapshot().cancelled_prefetches) == (0, 2)


def test_an_expert_on_its_way_is_not_resident() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4)
    stopped_after_one_chunk(store, provider)
    assert provider.occupancy_bytes == 0 and provider.resident_keys() == []
    assert provider.weights_of(ExpertKey(0, 0)) is None
    store.gate.set()
    finish_fetches(provider)
    assert provider.occupancy_bytes == 2 * PAYLOAD


def test_a_fetch_cancelled_in_its_last_chunk_is_not_done() -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 4, chunk=4096)
    store.gate.clear()
    provider.prefetch([ExpertKey(0, 0)])
    assert store.entered.acquire(timeout=5)
    threading.Timer(0.05, store.gate.set).start()
    assert provider.cancel_prefetches() == 1
    assert provider.occupancy_bytes == 0
    run_step(provider, {0: [[0]]})
    assert provider.snapshot().misses == 1


def test_cancelling_leaves_what_is_done() -> None:
    provider = make_provider(FakeStore(1, 8), 4)
    provider.prefetch([ExpertKey(0, 0)])
    finish_fetches(provider)
    assert provider.cancel_prefetches() == 0
    assert provider.resident_keys() == [ExpertKey(0, 0)]


def test_a_prefetch_does_not_push_out_another_unused_one() -> None:
    provider = make_provider(FakeStore(1, 8), 2)
    assert len(provider.prefetch([ExpertKey(0, 0), ExpertKey(0, 1)])) == 2
    finish_fetches(provider)
    assert len(provider.prefetch([ExpertKey(0, 2)])) == 0
    assert {key.expert for key in provider.resident_keys()} == {0, 1}


def test_prefill_takes_two_of_decode_s_slots_and_touches_nothing() -> None:
    """Six of eight slots hold experts that the prompt does not need; it may displace two of them, the least used."""
    provider = make_provider(FakeStore(1, 16), 8)
    for expert in range(8):
        for _ in range(expert + 1):
            run_step(provider, {0: [[expert]]})
    run_step(provider, {0: [[e] for e in [8, 9, 10, 11] + [12, 13] * 20]}, phase=Phase.PREFILL)
    kept = {key.expert for key in provider.resident_keys()}
    assert {2, 3, 4, 5, 6, 7} <= kept
    # Had the prompt counted as use, its 12 and 13, which came last and 20 times each, would now outlive 2.
    run_step(provider, {0: [[14, 15]]})
    assert {2, 3, 4, 5, 6, 7} <= {key.expert for key in provider.resident_keys()}


def test_an_emptied_cache_has_forgotten_its_recency() -> None:
    provider = make_provider(FakeStore(1, 8), 2)
    for _ in range(5):
        run_step(provider, {0: [[0]]})
    provider.reset_cache()
    run_step(provider, {0: [[0]]})
    run_step(provider, {0: [[1]]})
    run_step(provider, {0: [[2]]})
    assert {key.expert for key in provider.resident_keys()} == {1, 2}, "0 and 1 were used once each; 0 longer ago"


def test_waste_never_exceeds_what_was_prefetched_since_the_reset() -> None:
    provider = make_provider(FakeStore(1, 8), 2)
    provider.prefetch([ExpertKey(0, 0), ExpertKey(0, 1)])
    finish_fetches(provider)
    provider.reset_counters()
    run_step(provider, {0: [[4, 5]]})
    assert (provider.snapshot().prefetched_bytes, provider.snapshot().wasted_prefetch_bytes) == (0, 0)


def test_an_unknown_expert_is_refused_and_harms_nothing() -> None:
    provider = make_provider(FakeStore(1, 8), 2)
    for wrong in (ExpertKey(0, 99), ExpertKey(7, 0)):
        with pytest.raises(ValueError, match="no expert"):
            provider.prefetch([wrong])
    run_step(provider, {0: [[0, 1]]})


def test_any_failure_of_the_copy_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore(1, 8)
    provider = make_provider(store, 2)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def broken(*_: object) -> int:
        raise KeyError("what nobody foresaw")

    store.copy_range = broken  # type: ignore[method-assign]
    with pytest.raises(OutriderError, match="what nobody foresaw"):
        run_step(provider, {0: [[0]]})
