"""Budgets, layouts, policies and pages: the pure parts of memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fake_store import PARTS
from outrider.config import EngineOptions, SamplingParams, SlotBudget, format_bytes, parse_bytes, parse_slots
from outrider.core import ExpertPart
from outrider.errors import ConfigError, RequestError
from outrider.experts.layout import ALIGNMENT, ExpertLayout
from outrider.experts.policy import LRU, DecayedLFU
from outrider.kvcache.pages import PAGE_SIZE, OutOfPages, PagePool, PageTable, pages_for


def test_sizes_as_people_write_them() -> None:
    assert parse_bytes("6GiB") == 6 << 30
    assert parse_bytes("1.5 MB") == 1_500_000
    assert parse_slots("50%") == SlotBudget(fraction=0.5)
    assert parse_slots("12") == SlotBudget(slots=12)
    assert parse_slots("6gib") == SlotBudget(nbytes=6 << 30)
    assert format_bytes(13_236_480) == "13.24 MB"
    for wrong in ("", "x", "0%", "101%", "-3", "6 Gibbon", "%", "nan%"):
        with pytest.raises(ConfigError):
            parse_slots(wrong)


def test_parameters_out_of_range_are_refused_by_name() -> None:
    for wrong in ({"max_tokens": 0}, {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -1}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            SamplingParams(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_batch"):
        EngineOptions(max_batch=0)


def test_gpt_oss_20b_record() -> None:
    """The published sizes: 13,219,200 bytes of MXFP4 and 17,280 of biases."""
    parts = (
        ExpertPart("gate_up_proj_blocks", "uint8", (5760, 90, 16)),
        ExpertPart("gate_up_proj_scales", "uint8", (5760, 90)),
        ExpertPart("gate_up_proj_bias", "bfloat16", (5760,)),
        ExpertPart("down_proj_blocks", "uint8", (2880, 90, 16)),
        ExpertPart("down_proj_scales", "uint8", (2880, 90)),
        ExpertPart("down_proj_bias", "bfloat16", (2880,)),
    )
    layout = ExpertLayout.of(parts)
    assert layout.payload_nbytes == 13_236_480
    assert layout.record_nbytes % ALIGNMENT == 0
    assert 0 <= layout.record_nbytes - layout.payload_nbytes < len(parts) * ALIGNMENT
    assert all(p.offset % ALIGNMENT == 0 for p in layout.parts)


@given(st.integers(0, 900), st.integers(0, 900))
def test_payload_of_ranges_adds_up(a: int, b: int) -> None:
    layout = ExpertLayout.of(PARTS)
    start, stop = sorted((min(a, layout.record_nbytes), min(b, layout.record_nbytes)))
    pieces = [(0, start), (start, stop), (stop, layout.record_nbytes)]
    assert sum(layout.payload_between(*piece) for piece in pieces) == layout.payload_nbytes


def test_lru_evicts_the_longest_unused() -> None:
    policy = LRU(4)
    for expert in (2, 0, 1, 2):
        policy.touch({expert: 1})
    assert policy.order([(0, 0), (1, 1), (2, 2), (3, 3)]) == [3, 0, 1, 2]
    policy.reset()
    assert policy.order([(1, 2), (0, 1)]) == [0, 1], "ties go by slot"


def test_decayed_lfu_forgets_old_use() -> None:
    policy = DecayedLFU(3)
    for _ in range(3):
        policy.touch({0: 1})
    policy.touch({1: 2})
    assert policy.order([(0, 0), (1, 1), (2, 2)]) == [2, 1, 0], "three uses weigh more than one of two rows"
    for _ in range(200):
        policy.touch({2: 1})
    assert policy.order([(0, 0), (1, 1), (2, 2)])[-1] == 2
    policy.touch({1: 1})
    assert policy.order([(0, 0), (1, 1)]) == [0, 1], "what was used long ago weighs next to nothing"


class Pages(RuleBasedStateMachine):
    """Tables that grow, shrink and go; no page ever has two owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.tables = [PageTable(self.pool) for _ in range(3)]

    @rule(which=st.integers(0, 2), count=st.integers(0, 100))
    def append(self, which: int, count: int) -> None:
        table = self.tables[which]
        before = table.length, list(table.pages)
        try:
            table.append(count)
        except OutOfPages:
            assert (table.length, table.pages) == before
            assert pages_for(table.length + count) - len(table.pages) > self.pool.num_free

    @rule(which=st.integers(0, 2), share=st.floats(0, 1))
    def truncate(self, which: int, share: float) -> None:
        table = self.tables[which]
        kept = table.slots(0, int(table.length * share))
        table.truncate(int(table.length * share))
        assert table.slots(0, table.length) == kept, "what stays must not move"

    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.tables[which].release()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owned = [page for table in self.tables for page in table.pages]
        assert len(owned) == len(set(owned)) == self.pool.num_used
        assert sorted(owned + self.pool._free) == list(range(12))
        for table in self.tables:
            assert len(table.pages) == pages_for(table.length)
            assert len(set(table.slots(0, table.length))) == table.length


TestPages = Pages.TestCase


def test_truncating_to_more_than_there_is_raises() -> None:
    table = PageTable(PagePool(2))
    table.append(PAGE_SIZE)
    with pytest.raises(ValueError, match="cannot truncate"):
        table.truncate(PAGE_SIZE + 1)
