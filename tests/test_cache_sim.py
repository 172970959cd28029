"""Routing traces are read whole or refused in one sentence; replays give the hits that can be worked out by hand."""

import gzip
import io
import itertools
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fake_store import FakeStore, make_provider
from outrider.bench.cache_sim import SIM_POLICIES, SimPolicy, plot, render, simulate, slots_for
from outrider.bench.traces import RoutingTrace, read_trace
from outrider.config import PolicyName
from outrider.core import Phase
from outrider.errors import CheckpointError, ConfigError, OutriderError
from outrider.experts.policy import LRU, DecayedLFU

# Making traces


def make_trace(*runs: Sequence[Any], num_experts: int = 4) -> RoutingTrace:
    """Runs of one layer: each token an expert, or a tuple of experts."""
    arrays = []
    for run in runs:
        rows = [token if isinstance(token, tuple) else (token,) for token in run]
        arrays.append(np.array(rows, dtype=np.uint16)[:, None, :])
    return RoutingTrace("made", 1, num_experts, arrays[0].shape[2], arrays)


def hits(trace: RoutingTrace, policy: SimPolicy, slots: int, warmup: int = 0, **options: Any) -> int:
    result = simulate(trace, [slots / trace.num_experts], [policy], warmup=warmup, **options)
    assert result.rows[0].slots == slots
    return result.rows[0].hits


def npz_bytes(**changes: Any) -> bytes:
    """Two runs of 3 and 2 tokens, 2 layers, 2 of 8 experts, and between them one that is marked as repetition."""
    ids = np.arange(7 * 2 * 2).reshape(7, 2, 2) % 7
    arrays: dict[str, Any] = {
        "ids": ids.astype(np.uint8),
        "offset": np.array([0, 3, 5]),
        "tokens": np.array([3, 2, 2], dtype=np.int32),
        "repetition": np.array([False, True, False]),
    }
    arrays.update(changes)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: array for name, array in arrays.items() if array is not None})
    return buffer.getvalue()


JSONL = '{"tok": 1, "layers": [[0, 5], [1, 2]]}\n\n{"tok": 2, "layers": [[3, 5], [6, 2]]}\n'

HEADER = "turn,phase,step,layer,slot,expert,weight"


def csv_text(tokens: Sequence[tuple[int, int, int]] = ((0, 0, 0), (0, 1, 1), (0, 1, 2), (1, 1, 1))) -> str:
    """Layers 1 and 3, 2 of 10 experts, for each (turn, phase, step); the expert says where it comes from."""
    lines = ["# route_trace v1", "# arch=made n_layer=4 n_expert=10 n_expert_used=2", HEADER]
    for turn, phase, step in tokens:
        lines += [
            f"{turn},{phase},{step},{layer},{slot},{4 * turn + step + layer * slot},0.5"
            for layer in (1, 3)
            for slot in (0, 1)
        ]
    return "\n".join(lines) + "\n"


# Readers


def test_npz_leaves_runs_marked_as_repetition_out(tmp_path: Path) -> None:
    path = tmp_path / "ids.npz"
    path.write_bytes(npz_bytes())
    trace = read_trace(path)
    assert (trace.num_layers, trace.num_experts, trace.experts_per_token) == (2, 8, 2)
    assert [run.tolist() for run in trace.runs] == [
        [[[0, 1], [2, 3]], [[4, 5], [6, 0]], [[1, 2], [3, 4]]],
        [[[6, 0], [1, 2]], [[3, 4], [5, 6]]],
    ]
    assert all(run.dtype == np.uint16 for run in trace.runs)
    assert trace.num_tokens == 5
    assert trace.name == f"{tmp_path.name}/ids.npz"


@pytest.mark.parametrize("packed", [False, True])
def test_jsonl_is_one_run(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "warp.jsonl"
    path.write_bytes(gzip.compress(JSONL.encode()) if packed else JSONL.encode())
    trace = read_trace(path)
    assert [run.tolist() for run in trace.runs] == [[[[0, 5], [1, 2]], [[3, 5], [6, 2]]]]
    assert (trace.num_layers, trace.num_experts, trace.experts_per_token) == (2, 8, 2)


@pytest.mark.parametrize("packed", [False, True])
def test_csv_reads_decode_rows_of_every_turn(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "route.csv"
    path.write_bytes(gzip.compress(csv_text().encode()) if packed else csv_text().encode())
    trace = read_trace(path)
    assert [run.tolist() for run in trace.runs] == [[[[1, 2], [1, 4]], [[2, 3], [2, 5]]], [[[5, 6], [5, 8]]]]
    assert (trace.num_layers, trace.num_experts, trace.experts_per_token) == (2, 10, 2)


def test_csv_rows_may_come_in_any_order(tmp_path: Path) -> None:
    lines = csv_text().splitlines()
    (tmp_path / "a.csv").write_text(csv_text())
    (tmp_path / "b.csv").write_text("\r\n".join([*lines[:3], *reversed(lines[3:])]))
    first, second = read_trace(tmp_path / "a.csv"), read_trace(tmp_path / "b.csv")
    assert [run.tolist() for run in first.runs] == [run.tolist() for run in second.runs]


def test_the_number_of_experts_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "warp.jsonl"
    path.write_text(JSONL)
    assert read_trace(path, num_experts=60).num_experts == 60
    with pytest.raises(ConfigError, match="routes to expert 6, but num_experts is 6; it must be at least 7"):
        read_trace(path, num_experts=6)
    path.write_text(csv_text())
    assert read_trace(path, num_experts=10).num_experts == 10
    with pytest.raises(ConfigError, match="says that it has 10 experts a layer, but num_experts is 12"):
        read_trace(path, num_experts=12)
    path.write_text(csv_text().replace("n_expert=10", "n_expert=8"))
    with pytest.raises(ConfigError, match="routes to expert 8, but its header says 8"):
        read_trace(path)
    path.write_text("\n".join(csv_text().splitlines()[2:]))
    assert read_trace(path).num_experts == 16


def test_a_power_of_two_as_the_largest_id_needs_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "warp.jsonl"
    path.write_text('{"layers": [[8, 0]]}')
    assert read_trace(path).num_experts == 16


BAD_JSONL = {
    "truncated": (JSONL[:-9], "line 3 is not a whole JSON object .*cut short"),
    "not an object": ('{"layers": [[1]]}\n[1]', "line 2 has no field 'layers'"),
    "no layers": ('{"tok": 1}', "line 1 has no field 'layers'"),
    "no experts": ('{"layers": [[1], []]}', "line 1 has no field 'layers' that lists"),
    "fewer layers": ('{"layers": [[1], [2]]}\n{"layers": [[1]]}', "line 2: 'layers' has 1 layers, .* have 2"),
    "ragged experts": ('{"layers": [[1, 2], [2]]}', "line 1: layer 1 of 'layers' names 1 experts, .* names 2"),
    "ragged tokens": ('{"layers": [[1, 2]]}\n{"layers": [[1]]}', "line 2: layer 0 of 'layers' names 1 experts"),
    "not a number": ('{"layers": [[1, "a"]]}', "line 1: layer 0 of 'layers' holds 'a', which is no expert id"),
    "a boolean": ('{"layers": [[1, true]]}', "line 1: layer 0 of 'layers' holds 'True', which is no expert id"),
    "negative": ('{"layers": [[1, -1]]}', "line 1: layer 0 of 'layers' holds '-1', which is no expert id"),
    "too large": ('{"layers": [[1, 65536]]}', "holds '65536', which is no expert id from 0 to 65535"),
    "nested": ('{"layers": ' + "[" * 100_000, "line 1 is not a whole JSON object"),
    "twice": ('{"layers": [[1, 2], [3, 3]]}', "run 0, token 0, layer 1 names expert 3 twice"),
}

BAD_CSV = {
    "truncated": (csv_text()[:-6], "line 19 has 6 fields, its header has 7; the file may be cut short"),
    "missing column": (csv_text().replace("expert,", "exprt,"), "line 3 has no column 'expert'; it names turn, phase"),
    "only comments": ("# route_trace v1\n#\n", "is not a routing trace that is known here"),
    "only a header": (HEADER, "has no decode rows"),
    "no decode": (csv_text([(0, 0, 0), (0, 0, 1)]), "has no decode rows: none has 'phase' 1"),
    "not a number": (csv_text().replace("0,1,2,3,1,5", "0,1,2,3,1,x"), "line 15: 'expert' is 'x', which is no whole"),
    "negative": (csv_text().replace("0,1,2,3,1,5", "0,1,2,3,1,-5"), "line 15: 'expert' is '-5'"),
    "too large": (csv_text().replace("0,1,2,3,1,5", "0,1,2,3,1,65536"), "line 15: 'expert' is '65536'.* 0 to 65535"),
    "missing rank": (
        "\n".join(csv_text().splitlines()[:-1]),
        "line 18: turn 1, step 1, layer 3 has 1 rows; it must have one for each 'slot' from 0 to 1",
    ),
    "rank twice": (csv_text().replace("0,1,1,3,1,", "0,1,1,3,0,"), "line 10: turn 0, step 1, layer 3 has 2 rows"),
    "missing layer": ("\n".join(csv_text().splitlines()[:-2]), "line 16: turn 1, step 1 lacks a 'layer'"),
    "layers of two steps": (
        # Step 1 of turn 0 without layer 3 and step 2 without layer 1: together they would look like one whole step.
        "\n".join(csv_text().splitlines()[:9] + csv_text().splitlines()[13:]),
        "line 8: turn 0, step 1 lacks a 'layer'; every step must have all 2 layers",
    ),
}

BAD_NPZ: dict[str, tuple[bytes, str]] = {
    "truncated": (npz_bytes()[:-40], "is a truncated or damaged .npz file"),
    "head only": (npz_bytes()[:20], "is a truncated or damaged .npz file"),
    "no ids": (npz_bytes(ids=None), "has no array 'ids'"),
    "no repetition": (npz_bytes(repetition=None), "has no array 'repetition'"),
    "pickled": (npz_bytes(offset=np.array([None, {}, 3], dtype=object)), "damaged .npz file .*allow_pickle"),
    "flat ids": (npz_bytes(ids=np.zeros((7, 4), dtype=np.uint8)), r"'ids' is uint8 \[7, 4\]; it must hold"),
    "float ids": (npz_bytes(ids=np.zeros((7, 2, 2))), r"'ids' is float64 \[7, 2, 2\]"),
    "no tokens": (npz_bytes(ids=np.zeros((0, 2, 2), dtype=np.uint8)), r"'ids' is uint8 \[0, 2, 2\]"),
    "negative": (npz_bytes(ids=np.full((7, 2, 2), -1)), "'ids' has values outside 0 to 65535"),
    "short offset": (npz_bytes(tokens=np.array([1])), r"'tokens' is int64 \[1\]; it must hold one whole number a run"),
    "out of range": (npz_bytes(tokens=np.array([3, 2, 3])), "run 2 takes tokens 5 to 8, but 'ids' has 7 tokens"),
    "all repeat": (npz_bytes(repetition=np.ones(3, dtype=bool)), "has no run left"),
    "twice": (npz_bytes(ids=np.zeros((7, 2, 2), dtype=np.uint8)), "run 0, token 0, layer 0 names expert 0 twice"),
}

BAD_FILES: dict[str, tuple[bytes, str]] = {
    **{f"jsonl {name}": (text.encode(), match) for name, (text, match) in BAD_JSONL.items()},
    **{f"csv {name}": (text.encode(), match) for name, (text, match) in BAD_CSV.items()},
    **{f"npz {name}": case for name, case in BAD_NPZ.items()},
    "empty": (b"", "is empty"),
    "blank": (b" \n\n", "is empty"),
    "unknown text": (b"hello\n", "is not a routing trace that is known here"),
    "binary": (b"\x93NUMPY\xff\xfe", "is neither text nor an .npz file"),
    "truncated gzip": (gzip.compress(csv_text().encode())[:-12], "is a truncated or damaged gzip file"),
    "damaged gzip": (b"\x1f\x8b\x08" + b"x" * 40, "is a truncated or damaged gzip file"),
    "empty gzip": (gzip.compress(b""), "is empty"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    data, match = BAD_FILES[case]
    path = tmp_path / "bad"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=match) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.npz", tmp_path):
        with pytest.raises(CheckpointError, match=r"cannot be read as a routing trace: (No such file|Is a directory)"):
            read_trace(path)


@given(st.binary(max_size=60), st.sampled_from([b"", b"PK\x03\x04", b"\x1f\x8b\x08\x00", b'{"layers":', b"a,b\n"]))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, data: bytes, head: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(head + data)
    with pytest.raises(OutriderError):
        read_trace(path)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_npz_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, place: int, value: int) -> None:
    data = bytearray(npz_bytes())
    data[place] = value
    path = tmp_path_factory.getbasetemp() / "noise.npz"
    path.write_bytes(data)
    try:
        trace = read_trace(path)
    except OutriderError:
        return
    assert trace.num_layers == 2


# Worked by hand: 4 experts, one a token, no warm-up


def test_lru_evicts_what_was_used_longest_ago_and_lfu_what_was_used_least() -> None:
    # Two slots. At expert 2, LRU gives up 0 (and misses it next), the others give up 1.
    trace = make_trace([0, 0, 1, 2, 0])
    assert hits(trace, "lru", 2) == 1
    assert hits(trace, "lfu", 2) == 2
    assert hits(trace, "decayed-lfu", 2) == 2
    assert hits(trace, "belady", 2) == 2


def test_lru_goes_by_the_last_use_not_the_first() -> None:
    assert hits(make_trace([0, 1, 0, 2, 0]), "lru", 2) == 2


def test_decay_forgets_old_uses() -> None:
    # Three slots hold 0 (3 uses), 1 (60), 2 (2). At expert 3, LFU gives up 2 (2 < 3); with decay the three uses of 0
    # are worth 3 (63/64)^62 = 1.1 by then, so 0 goes and the 2 that follows hits.
    trace = make_trace([0] * 3 + [1] * 60 + [2] * 2 + [3, 2])
    assert hits(trace, "lfu", 3) == 2 + 59 + 1
    assert hits(trace, "decayed-lfu", 3) == 2 + 59 + 1 + 1


def test_lfu_remembers_experts_that_are_not_resident() -> None:
    # Two slots: at 2, 1 goes (1 < 2); it comes back with a count of 2 in place of 2, whose count is 1; at 2 then both
    # residents have a count of 2 and slot 0 (expert 0) goes.
    assert hits(make_trace([0, 0, 1, 2, 1, 2, 1]), "lfu", 2) == 2


def test_belady_evicts_what_is_needed_last() -> None:
    # Belady's textbook string on three of six slots' worth of pages: 7 misses of 12.
    trace = make_trace([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5], num_experts=6)
    assert hits(trace, "belady", 3) == 12 - 7
    assert hits(trace, "lru", 3) == 12 - 10


def test_belady_prepares_the_counted_steps_during_the_warm_up() -> None:
    # Two slots, four free steps: 1 comes for nothing at the last of them, so 2 may replace it and 0 stays.
    assert hits(make_trace([0, 1, 2, 1, 1, 0]), "belady", 2, warmup=4) == 2


def test_bypass_keeps_what_is_worth_more_than_the_newcomer() -> None:
    # One slot: every policy that must admit misses all; keeping 0 hits it twice.
    trace = make_trace([0, 1, 0, 1, 0])
    assert [hits(trace, policy, 1) for policy in SIM_POLICIES] == [0, 0, 0, 0, 2]


def test_ties_go_by_slot_and_absent_experts_enter_in_ascending_order() -> None:
    # Three slots: 0, 1 and then 2 fill them; 3 has to replace 0 or 1, used equally, and the lower slot goes.
    trace = make_trace([(1, 0), (3, 2), (1, 2)])
    assert hits(trace, "lru", 3) == hits(trace, "lfu", 3) == hits(trace, "decayed-lfu", 3) == 2


def test_no_expert_of_the_step_is_evicted() -> None:
    # Two slots, two experts a token: 1 is the older one at the third token, but in use.
    assert hits(make_trace([(0, 1), (0, 2), (1, 2), (1, 3), (1, 3)]), "lru", 2) == 0 + 1 + 1 + 1 + 2


def test_warm_up_is_left_out_of_every_run_and_each_run_starts_empty() -> None:
    trace = make_trace([0, 0, 0], [0, 0, 0, 0])
    apart = simulate(trace, [0.5], ["lru"], warmup=1).rows[0]
    assert (apart.hits, apart.accesses, apart.hit_rate) == (5, 5, 1.0)
    assert hits(trace, "lru", 2) == 2 + 3
    joined = simulate(trace, [0.5], ["lru"], warmup=0, keep_cache=True).rows[0]
    assert (joined.hits, joined.accesses) == (6, 7)


@pytest.mark.parametrize("policy", SIM_POLICIES)
def test_a_run_no_longer_than_the_warm_up_counts_for_nothing(policy: SimPolicy) -> None:
    short, long = [0, 1], [0, 1, 2, 0]
    both = simulate(make_trace(short, long), [0.5], [policy], warmup=2).rows
    assert both == simulate(make_trace(long), [0.5], [policy], warmup=2).rows
    with pytest.raises(ConfigError, match="no run of made is longer than the warm-up of 4 tokens"):
        simulate(make_trace(short, long), [0.5], [policy], warmup=4)


def test_max_tokens_takes_the_longest_runs_first() -> None:
    trace = make_trace([0, 1], [2, 2, 2, 2], [3, 3, 3], [0, 0, 0])
    result = simulate(trace, [0.5], ["lru"], warmup=0, max_tokens=6)  # the 4 of run 1 and 2 of run 2
    assert (result.runs, result.tokens, result.trace_tokens) == (2, 6, 12)
    assert (result.rows[0].hits, result.rows[0].accesses) == (3 + 1, 6)
    assert simulate(trace, [0.5], ["lru"], warmup=0, max_tokens=None).tokens == 12


def test_layers_have_their_own_slots() -> None:
    run = np.array([[[0], [1]], [[1], [1]], [[0], [1]]], dtype=np.uint16)
    result = simulate(RoutingTrace("two layers", 2, 4, 1, [run]), [0.25], ["lru"], warmup=0)
    assert (result.rows[0].hits, result.rows[0].accesses) == (0 + 2, 6)


def test_slots_are_rounded_but_hold_one_token() -> None:
    trace = make_trace([(0, 1)], num_experts=32)
    assert [slots_for(fraction, trace) for fraction in (0.01, 0.25, 0.3, 1.0)] == [2, 8, 10, 32]


def test_the_policies_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, dict[int, int]]] = []
    for policy in (LRU, DecayedLFU):
        name = policy.__name__
        monkeypatch.setattr(policy, "touch", lambda _, union, name=name: told.append((name, dict(union))))
    simulate(make_trace([(1, 0), (2, 3)]), [0.5], ["lru", "decayed-lfu"], warmup=0)
    steps = [{0: 1, 1: 1}, {2: 1, 3: 1}]
    assert told == [(name, step) for name in ("LRU", "DecayedLFU") for step in steps]


@pytest.mark.parametrize("policy", ["lru", "decayed-lfu"])
@pytest.mark.parametrize("slots", [2, 4, 8])
def test_the_engine_counts_the_hits_that_the_replay_counts(policy: PolicyName, slots: int) -> None:
    random = np.random.default_rng(0)
    run = np.array([[random.permutation(8)[:2] for _ in range(2)] for _ in range(200)], dtype=np.uint16)
    trace = RoutingTrace("random", 2, 8, 2, [run])
    provider = make_provider(FakeStore(2, 8), slots, policy=policy)
    for token in torch.from_numpy(run.astype(np.int64)):
        provider.begin_step(Phase.DECODE)
        for layer in range(2):
            list(provider.resolve(layer, token[layer : layer + 1]))
        provider.commit([0])
    counted = provider.snapshot()
    provider.close()
    row = simulate(trace, [slots / 8], [policy], warmup=0).rows[0]
    assert (counted.hits, counted.hits + counted.misses) == (row.hits, row.accesses)


# Properties


@st.composite
def traces(draw: st.DrawFn, max_experts: int = 8, max_tokens: int = 25, max_runs: int = 2) -> RoutingTrace:
    num_experts = draw(st.integers(2, max_experts))
    k = draw(st.integers(1, min(3, num_experts)))
    layers = draw(st.integers(1, 2))
    row = st.permutations(range(num_experts)).map(lambda order: order[:k])
    token = st.lists(row, min_size=layers, max_size=layers)
    runs = draw(st.lists(st.lists(token, min_size=4, max_size=max_tokens), min_size=1, max_size=max_runs))
    return RoutingTrace("random", layers, num_experts, k, [np.array(run, dtype=np.uint16) for run in runs])


@settings(deadline=None)
@given(traces(), st.floats(0.05, 1), st.integers(0, 3), st.booleans())
def test_nothing_beats_belady_and_bypass_beats_belady(
    trace: RoutingTrace, fraction: float, warmup: int, keep_cache: bool
) -> None:
    rows = simulate(trace, [fraction], warmup=warmup, keep_cache=keep_cache).rows
    by_policy = {row.policy: row.hits for row in rows}
    assert by_policy["belady-bypass"] >= by_policy["belady"]
    assert by_policy["belady"] == max(count for policy, count in by_policy.items() if policy != "belady-bypass")
    counted = sum(max(0, len(run) - warmup) for run in trace.runs)
    if keep_cache:
        counted = trace.num_tokens - warmup
    for row in rows:
        assert row.accesses == counted * trace.num_layers * trace.experts_per_token
        assert 0 <= row.hits <= row.accesses
        assert row.hit_rate == row.hits / row.accesses


@settings(deadline=None)
@given(traces())
def test_with_a_slot_for_every_expert_only_first_uses_miss(trace: RoutingTrace) -> None:
    firsts = sum(len(np.unique(run[:, layer])) for run in trace.runs for layer in range(trace.num_layers))
    for row in simulate(trace, [1.0], warmup=0).rows:
        assert row.hits + firsts == row.accesses


@settings(deadline=None)
@given(traces(), st.lists(st.floats(0.05, 1), min_size=2, max_size=3))
def test_fractions_and_policies_replayed_together_or_apart_give_the_same(
    trace: RoutingTrace, fractions: list[float]
) -> None:
    together = simulate(trace, fractions, warmup=1).rows
    apart = [simulate(trace, [f], [p], warmup=1).rows[0] for f in fractions for p in SIM_POLICIES]
    assert together == apart


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=15, max_size=60), st.integers(1, 6))
def test_lru_equals_an_ordered_dict(experts: list[int], slots: int) -> None:
    cache: OrderedDict[int, None] = OrderedDict()
    found = missed = 0
    for expert in experts:
        if expert in cache:
            found += 1
            cache.move_to_end(expert)
            continue
        missed += 1
        if len(cache) == slots:
            cache.popitem(last=False)
        cache[expert] = None
    row = simulate(make_trace(experts, num_experts=6), [slots / 6], ["lru"], warmup=0).rows[0]
    assert (row.hits, row.accesses) == (found, found + missed)


def most_hits(steps: list[frozenset[int]], slots: int, warmup: int, bypass: bool) -> int:
    """The best of all ways to choose what stays, by trying every content of the cache."""
    best = {frozenset[int](): 0}
    for index, union in enumerate(steps):
        after: dict[frozenset[int], int] = {}
        for held, score in best.items():
            score += len(held & union) if index >= warmup else 0
            must = frozenset[int]() if bypass else union
            may = (held | union) - must
            size = min(slots - len(must), len(may))
            for extra in itertools.combinations(sorted(may), size):
                content = must | frozenset(extra)
                after[content] = max(score, after.get(content, 0))
        best = after
    return max(best.values())


@settings(deadline=None, max_examples=150)
@given(traces(max_experts=5, max_tokens=8, max_runs=1), st.integers(1, 5), st.integers(0, 3))
def test_belady_equals_the_best_of_all_choices(trace: RoutingTrace, slots: int, warmup: int) -> None:
    fraction = min(slots, trace.num_experts) / trace.num_experts
    forced, bypass = simulate(trace, [fraction], ["belady", "belady-bypass"], warmup=warmup).rows
    per_layer = [[frozenset(row) for row in trace.runs[0][:, layer].tolist()] for layer in range(trace.num_layers)]
    assert forced.hits == sum(most_hits(steps, forced.slots, warmup, bypass=False) for steps in per_layer)
    assert bypass.hits == sum(most_hits(steps, forced.slots, warmup, bypass=True) for steps in per_layer)


# Arguments, table, plot


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fractions": []}, "nothing to replay"),
        ({"policies": []}, "nothing to replay"),
        ({"fractions": [0.0]}, "slot fraction 0 is out of range"),
        ({"fractions": [0.5, 1.5]}, "slot fraction 1.5 is out of range"),
        ({"fractions": [float("nan")]}, "slot fraction nan is out of range"),
        ({"policies": ["fifo"]}, "'fifo' is not a cache policy; choose from lru, lfu"),
        ({"warmup": -1}, "the warm-up is -1 tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        simulate(make_trace([0, 1, 2]), **{"warmup": 0, **options})


def test_progress_ends_at_the_number_of_tokens() -> None:
    seen: list[tuple[int, int]] = []
    trace = make_trace([0, 1, 2], [0, 1])
    simulate(trace, warmup=0, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 5), (5, 5)]


def test_the_table_shows_slots_and_percent() -> None:
    result = simulate(make_trace([0, 0, 1, 2, 0]), [0.25, 0.5], ["lru", "belady"], warmup=0)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(result))
    lines = [line.split() for line in console.export_text().replace("│", " ").splitlines()]
    assert ["1", "of", "4", "25%", "20.0", "20.0"] in lines
    assert ["2", "of", "4", "50%", "20.0", "40.0"] in lines
    assert "Expert cache hit rate, made" in [" ".join(line) for line in lines]
    assert "5 tokens in 1 run" in [" ".join(line) for line in lines]


def test_the_table_says_what_was_replayed() -> None:
    result = replace(simulate(make_trace([0, 0], [1, 1, 1]), warmup=1, max_tokens=4), trace_tokens=5000)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(result))
    text = console.export_text()
    assert "4 of 5,000 tokens in 2 runs" in text
    assert "each run's first 1 tokens not counted" in text


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    result = simulate(make_trace([0, 0, 1, 2, 0]), [0.75, 0.25, 0.5], warmup=0)
    plot(result, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"the plot cannot be written to .*none"):
        plot(result, tmp_path / "none" / "out.png")
    with pytest.raises(ConfigError, match="the plot cannot be written to"):
        plot(result, tmp_path / "out.unknown")


def test_without_matplotlib_the_plot_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        plot(simulate(make_trace([0, 1]), warmup=0), tmp_path / "out.png")


def test_rows_go_into_json() -> None:
    rows = simulate(make_trace([0, 1]), warmup=0).rows
    assert json.loads(json.dumps([vars(row) for row in rows]))[0]["policy"] == "lru"
