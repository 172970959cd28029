"""The device-driven provider means what the host-driven one means: the same hits, misses, victims and bytes."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fake_store import PARTS, FakeStore, make_provider
from outrider.core import Band, ExpertKey, ExpertPart, ExpertWeights, Phase
from outrider.experts.device_provider import DeviceProvider
from outrider.experts.home import Home
from outrider.experts.host_provider import HostProvider
from outrider.kernels.device.work import Work

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="reads slots by address: on a CPU only")

LAYERS, EXPERTS, ROWS, K = 2, 8, 4, 2
CPU = torch.device("cpu")


class Reader:
    """An `ExpertKernel` that computes nothing: it finds out whose bytes lie at each entry's address, and writes the
    expert's number for each of its pairs."""

    def __init__(self, store: FakeStore) -> None:
        self.owner = {bytes(record.tolist()): key.expert for key, record in store.records.items()}
        self.layer: dict[bytes, int] = {bytes(record.tolist()): key.layer for key, record in store.records.items()}

    def parts(self) -> tuple[ExpertPart, ...]:
        return PARTS

    def pack(self, weights: ExpertWeights) -> dict[str, Tensor]:
        return dict(weights)

    def run(
        self, x: Tensor, work: Work, bounds: Tensor, k: int, inner: Tensor, out: Tensor, room: Tensor | None = None
    ) -> None:
        begin, end = bounds.tolist()
        for entry in range(begin, end):
            found = ctypes.string_at(int(work.address[entry]), 768)
            for pair in work.pairs[int(work.start[entry]) : int(work.start[entry + 1])].tolist():
                assert out[pair, 0] == -1, "a pair was computed twice"
                out[pair] = torch.tensor([self.owner[found], self.layer[found]], dtype=torch.float32)


@dataclass(frozen=True)
class Step:
    phase: Phase
    routes: list[list[list[int]]]  # [layers][rows][k]
    kept: list[int]


def open_device(store: FakeStore, slots: int, policy: str = "decayed-lfu", rows: int = ROWS) -> DeviceProvider:
    home = Home(list(range(LAYERS)), EXPERTS, store.layout.record_nbytes, pinned=False)
    for key in home.experts():
        home.record(key).copy_(store.records[key])
    layers = dict.fromkeys(range(LAYERS), slots)
    return DeviceProvider(Reader(store), home, store.expert_nbytes, layers, EXPERTS, K, rows, policy, CPU)  # type: ignore[arg-type]


def run_device(provider: DeviceProvider, step: Step, rows: int = ROWS) -> None:
    """One step; every pair reaches its own expert."""
    number = len(step.routes[0])
    count = torch.tensor([number], dtype=torch.int32)
    ids = torch.full((LAYERS, rows, K), 7, dtype=torch.int32)  # what lies behind `count` must not matter
    ids[:, :number] = torch.tensor(step.routes, dtype=torch.int32)
    provider.begin_step(step.phase)
    for layer in range(LAYERS):
        out = torch.full((rows * K, 2), -1.0)
        provider.run(layer, torch.empty(0), ids[layer], count, torch.empty(0), out)
        expected = [[expert, layer] for row in step.routes[layer] for expert in row]
        assert out[: number * K].tolist() == expected
        assert (out[number * K :] == -1).all()
    kept = torch.zeros(rows, dtype=torch.int32)
    kept[step.kept] = 1
    provider.commit_rows(ids, kept, count)
    provider.count_steps(1)


def run_host(provider: HostProvider, step: Step) -> None:
    provider.begin_step(step.phase)
    for layer, rows in enumerate(step.routes):
        for _ in provider.resolve(layer, torch.tensor(rows)):
            pass
    provider.commit(step.kept)


def occupants(provider: HostProvider) -> list[list[int]]:
    """The expert of each slot, -1 for an empty one."""
    return [[-1 if slot.expert is None else slot.expert for slot in layer.slots] for layer in provider._layers.values()]


def figures(provider: HostProvider | DeviceProvider) -> Mapping[str, object]:
    seen = vars(provider.snapshot())
    return {name: value for name, value in seen.items() if name != "exposed_fetch_seconds"}


@st.composite
def steps(draw: st.DrawFn) -> Step:
    rows = draw(st.integers(1, ROWS))
    row = st.lists(st.integers(0, EXPERTS - 1), min_size=K, max_size=K, unique=True)
    routes = [[draw(row) for _ in range(rows)] for _ in range(LAYERS)]
    kept = draw(st.lists(st.integers(0, rows - 1), unique=True))
    return Step(draw(st.sampled_from([Phase.DECODE, Phase.DECODE, Phase.PREFILL])), routes, sorted(kept))


@settings(max_examples=40, deadline=None)
@given(
    program=st.lists(st.one_of(steps(), st.just("reset")), min_size=1, max_size=8),
    slots=st.integers(2, EXPERTS),
    policy=st.sampled_from(["lru", "decayed-lfu"]),
)
def test_the_same_trace_gives_the_same_cache_and_counts(program: list[Step | str], slots: int, policy: str) -> None:
    store = FakeStore(LAYERS, EXPERTS)
    host, device = make_provider(store, slots, policy=policy), open_device(store, slots, policy)
    for step in program:
        if isinstance(step, str):
            host.reset_cache()
            device.reset_cache()
        else:
            run_host(host, step)
            run_device(device, step)
        assert [state.expert_of.tolist() for state in device._states] == occupants(host)
        assert figures(device) == figures(host)
    assert sorted(device.resident_keys()) == sorted(host.resident_keys())
    host.close()
    device.close()


def test_a_long_trace_ends_with_the_same_worth() -> None:
    """Decay and recency in integers, over steps enough for shifts to matter."""
    store = FakeStore(LAYERS, EXPERTS)
    host, device = make_provider(store, 4), open_device(store, 4)
    random = torch.Generator().manual_seed(0)
    for _ in range(120):
        routes = torch.rand(LAYERS, 2, EXPERTS, generator=random).topk(K).indices
        step = Step(Phase.DECODE, routes.tolist(), [0] if torch.rand(1, generator=random) < 0.5 else [0, 1])
        run_host(host, step)
        run_device(device, step)
    assert device._worth.tolist() == [policy._counts for policy in host._policies.values()]  # type: ignore[attr-defined]
    assert figures(device) == figures(host)
    host.close()
    device.close()


def test_many_pairs_take_the_other_way_to_their_lists() -> None:
    """Above 64 pairs the lists are filled by atomic counters."""
    store = FakeStore(LAYERS, EXPERTS)
    host, device = make_provider(store, 3), open_device(store, 3, rows=256)
    random = torch.Generator().manual_seed(1)
    for rows in (256, 140):
        routes = torch.rand(LAYERS, rows, EXPERTS, generator=random).topk(K).indices
        step = Step(Phase.DECODE, routes.tolist(), list(range(rows)))
        run_host(host, step)
        run_device(device, step, rows=256)
        assert [state.expert_of.tolist() for state in device._states] == occupants(host)
    assert figures(device) == figures(host)
    host.close()
    device.close()


def test_experts_that_pass_with_many_rows_are_copied_outside_the_cache() -> None:
    """More than 16 rows would read host memory more than once; a few rows read it where it lies."""
    store = FakeStore(LAYERS, EXPERTS)
    device = open_device(store, 2, rows=64)
    lies: list[set[str]] = []
    spans = {"stage": device._stages, "slot": device._records}

    class Watching(Reader):
        def run(
            self, x: Tensor, work: Work, bounds: Tensor, k: int, inner: Tensor, out: Tensor, room: Tensor | None = None
        ) -> None:
            super().run(x, work, bounds, k, inner, out)
            for entry in range(*bounds.tolist()):
                at = int(work.address[entry])
                inside = [n for n, t in spans.items() if t.data_ptr() <= at < t.data_ptr() + t.numel()]
                rows = int(work.start[entry + 1] - work.start[entry])
                lies.append({*inside, "many" if rows > 16 else "few"})

    device.kernel = Watching(store)
    routes = [[[0, 1]] * 20 + [[2, 3]] * 20 + [[4, 5]] * 17 + [[6, 7]] * 7] * LAYERS
    run_device(device, Step(Phase.PREFILL, routes, []), rows=64)
    assert {"stage", "many"} in lies and {"few"} not in lies  # the last two experts stay, in slots
    assert lies.count({"stage", "many"}) == 6 * LAYERS
    lies.clear()
    run_device(device, Step(Phase.PREFILL, [[[6, 7]] * 20 + [[0, 1]] * 3 + [[2, 3]] * 3] * LAYERS, []), rows=64)
    assert {"few"} in lies  # read in place
    device.close()


def test_an_uncommitted_step_counts_nothing_and_a_step_without_rows_neither() -> None:
    store = FakeStore(LAYERS, EXPERTS)
    device = open_device(store, 4)
    ids = torch.zeros(LAYERS, ROWS, K, dtype=torch.int32)
    ids[..., 1] = 1
    count = torch.tensor([2], dtype=torch.int32)
    device.begin_step(Phase.DECODE)
    device.run(0, torch.empty(0), ids[0], count, torch.empty(0), torch.full((ROWS * K, 2), -1.0))
    run_device(device, Step(Phase.DECODE, [[[0, 1]], [[2, 3]]], [0]))
    seen = device.snapshot()
    assert (seen.hits, seen.misses, seen.steps) == (2, 2, 1)
    device.begin_step(Phase.DECODE)
    device.commit_rows(ids, torch.ones(ROWS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    assert (device.snapshot().hits, device.snapshot().misses) == (2, 2)
    device.close()


def test_resident_experts_need_no_home_and_are_found_by_their_key() -> None:
    store = FakeStore(LAYERS, EXPERTS)
    layers = dict.fromkeys(range(LAYERS), EXPERTS)
    device = DeviceProvider(Reader(store), None, store.expert_nbytes, layers, EXPERTS, K, ROWS, "lru", CPU)  # type: ignore[arg-type]
    assert sum(device.preload(store.records.items())) == LAYERS * EXPERTS * 768
    assert device.num_offloaded == 0 and device.slots_total == LAYERS * EXPERTS
    run_device(device, Step(Phase.DECODE, [[[5, 1], [0, 5]], [[2, 3], [7, 6]]], [0, 1]))
    assert (device.snapshot().hits, device.snapshot().misses) == (7, 0)
    weights = device.weights_of(ExpertKey(1, 3))
    assert weights is not None
    assert torch.equal(
        weights["matrix"].flatten(), store.layout.view(store.records[ExpertKey(1, 3)])["matrix"].flatten()
    )
    device.reset_cache()  # nothing could bring them back
    assert len(device.resident_keys()) == LAYERS * EXPERTS
    device.close()


LONG = 12
ROUTES = st.lists(st.integers(0, EXPERTS - 1), min_size=K, max_size=K, unique=True)


@settings(max_examples=30, deadline=None)
@given(
    before=st.lists(steps(), max_size=3),
    long=st.lists(st.lists(ROUTES, min_size=LONG, max_size=LONG), min_size=LAYERS, max_size=LAYERS),
    between=st.lists(st.one_of(st.none(), steps()), min_size=LAYERS, max_size=LAYERS),
    slots=st.integers(2, EXPERTS - 1),
)
def test_a_long_prompt_finds_every_expert_and_evicts_none(
    before: list[Step], long: list[list[list[int]]], between: list[Step | None], slots: int
) -> None:
    """Also where decoding steps run between two of its layers and move experts about."""
    store = FakeStore(LAYERS, EXPERTS)
    device = open_device(store, slots)
    streamed = device.streamed(LONG)
    for step in before:
        run_device(device, step)
    ids, count = torch.tensor(long, dtype=torch.int32), torch.tensor([LONG], dtype=torch.int32)
    hits, misses, moved = 0, 0, 0
    start = device.snapshot()
    streamed.fetch_ahead(0, count)
    for layer in range(LAYERS):
        resident = {e for e in device._states[layer].expert_of.tolist() if e >= 0}
        staged = streamed._staging[layer % 2].staged
        brought = {e for e in range(EXPERTS) if staged[e] != 0}
        # What a decoding step evicted since then is neither here nor there, and read where it lies.
        assert resident | brought == set(range(EXPERTS)) or any(between[:layer])
        moved += len(brought)
        streamed.fetch_ahead(layer + 1, count)
        if (step := between[layer]) is not None:
            run_device(device, step)
        held = {e for e in device._states[layer].expert_of.tolist() if e >= 0} - brought
        union = {e for row in long[layer] for e in row}
        hits, misses = hits + len(union & held), misses + len(union - held)
        kept = device._states[layer].expert_of.tolist()
        out = torch.full((LONG * K, 2), -1.0)
        streamed.run(layer, torch.empty(0), ids[layer], count, torch.empty(0), out, torch.empty(0))
        streamed.join()
        assert out.tolist() == [[expert, layer] for row in long[layer] for expert in row]
        assert device._states[layer].expert_of.tolist() == kept
    streamed.commit(ids, count)
    seen = device.snapshot()
    if not any(between):
        assert (seen.prefill_hits - start.prefill_hits, seen.prefill_misses - start.prefill_misses) == (hits, misses)
        assert seen.h2d_bytes[Band.ON_DEMAND] - start.h2d_bytes[Band.ON_DEMAND] == moved * store.layout.record_nbytes
        assert seen.evictions == start.evictions
    assert (seen.prefill_hits + seen.prefill_misses) >= (start.prefill_hits + start.prefill_misses) + hits + misses
    device.close()


def test_a_long_prompt_without_rows_moves_nothing() -> None:
    """As when its graphs are captured."""
    device = open_device(FakeStore(LAYERS, EXPERTS), 3)
    streamed, none = device.streamed(LONG), torch.zeros(1, dtype=torch.int32)
    for layer in range(LAYERS):
        streamed.fetch_ahead(layer, none)
        ids, out = torch.zeros(LONG, K, dtype=torch.int32), torch.full((12 * K, 2), -1.0)
        streamed.run(layer, torch.empty(0), ids, none, torch.empty(0), out, torch.empty(0))
        assert (out == -1).all()
    assert device.resident_keys() == [] and device.snapshot().h2d_bytes[Band.ON_DEMAND] == 0
    device.close()


def test_marks_are_reached_in_order() -> None:
    device = open_device(FakeStore(LAYERS, EXPERTS), 3)
    reached: list[tuple[int, str]] = []
    device.mark = lambda layer, what: reached.append((layer, what))  # type: ignore[method-assign]
    run_device(device, Step(Phase.DECODE, [[[0, 1]]] * LAYERS, [0]))
    order = ["routed", "resolved", "fetch", "fetched", "resident", "joined", "absent"]
    assert reached == [(layer, what) for layer in range(LAYERS) for what in order]
    device.close()
