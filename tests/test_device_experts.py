"""Experts, packed MXFP4, commits, and corners of the other device kernels that `test_device_kernels.py` leaves open.

The contract is the same: a kernel equals the reference beside it (or plain Python, or `experts/policy.py`), touches
nothing that does not exist, and gives a row the same bits whatever is beside it. Everything that must not be read holds
NaN, everything that must not be written holds `KEPT`. Here a second head, step, part, page line or unit matters.
"""

import os
import struct
from collections import Counter
from typing import NamedTuple

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.config import PolicyName
from outrider.experts.layout import ExpertLayout
from outrider.experts.policy import LRU, DecayedLFU
from outrider.kernels import mxfp4
from outrider.kernels.device import (
    attention,
    choose,
    commit,
    experts,
    linear,
    mxfp4_packing,
    norm,
    rope_write,
    router,
    swiglu,
)
from outrider.kernels.device.experts import ExpertShape
from outrider.kernels.device.plain import PlainExperts
from outrider.kernels.device.work import Work

GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if GPU else torch.float32  # the interpreter's `dot` has no bfloat16
TOLERANCE = 2e-2 if GPU else 1e-5
NAN, INF = float("nan"), float("inf")
KEPT = 7


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if GPU else "cpu")


def random(device: torch.device, *shape: int, dtype: torch.dtype = DTYPE, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def full(device: torch.device, value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def ints(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def near(got: Tensor, expected: Tensor) -> bool:
    """Relative to the whole; NaN never passes."""
    return bool((got.float() - expected.float()).norm() <= TOLERANCE * expected.float().norm())


@pytest.mark.parametrize(("n", "k", "parts"), [(20, 100, 1), (20, 200, 3), (8, 40, 2)])
@pytest.mark.parametrize("rows", [16, 3, 0])
def test_projections_read_and_write_nothing_else(device: torch.device, n: int, k: int, parts: int, rows: int) -> None:
    """Two parts of one step: the first is empty, and zero."""
    x, weight = full(device, NAN, 48, k + 64, dtype=DTYPE), full(device, NAN, n + 8, k, dtype=DTYPE)
    x[:rows, :k], weight[:n] = random(device, rows, k), random(device, n, k, seed=1)
    out = full(device, KEPT, parts, 48, n)
    linear.project(x, weight[:n], out, ints(device, rows))
    assert near(out[:, :rows], linear.reference(x[:rows, :k], weight[:n], parts))
    assert (out[:, -(-rows // 16) * 16 :] == KEPT).all()


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_a_norm_without_tap_over_two_tiles_of_rows(device: torch.device, size: float) -> None:
    """Of values that are small beside eps, too."""
    x, terms = random(device, 32, 40) * size, random(device, 2, 32, 40, dtype=torch.float32, seed=1) * size
    x[20:], terms[:, 20:] = NAN, NAN
    weight, h = random(device, 40, seed=2), full(device, KEPT, 32, 64, dtype=DTYPE)
    expected_x, expected_h = norm.reference(x, terms, None, weight, 1e-5)
    norm.add_norm(x, terms, None, weight, 1e-5, h, ints(device, 20))
    assert near(x[:20], expected_x[:20]) and near(h[:20, :40], expected_h[:20])
    assert x[20:].isnan().all() and (h[20:] == KEPT).all() and (h[:, 40:] == KEPT).all()


@pytest.mark.parametrize("heads", [4, 0])
def test_two_key_heads_of_an_odd_size_reach_their_slots(device: torch.device, heads: int) -> None:
    """Values that are small beside eps, 32 rows; without query heads as the drafter's context is fed."""
    dim, rows = 24, 18
    qkv = random(device, 3, 32, (heads + 4) * dim, dtype=torch.float32) * 1e-3
    norms = (random(device, dim, seed=1), random(device, dim, seed=2), 1e-5)
    cos, sin = rope_write.tables(torch.logspace(0, -2, dim // 2, device=device), 1.25, 80)
    positions = ints(device, *range(40, 40 + 32))
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:32].to(device, torch.int32)
    query = full(device, KEPT, 32, heads, dim, dtype=DTYPE)
    keys, values = (full(device, KEPT, 64, 2, dim, dtype=DTYPE) for _ in range(2))
    rope_write.rope_write(qkv, None, norms, cos, sin, positions, slots, query, keys, values, ints(device, rows))
    expected = rope_write.reference(qkv, None, norms, cos, sin, positions, heads, dim)
    at = slots[:rows].long()
    for got, want in zip((query[:rows], keys[at], values[at]), expected, strict=True):
        assert near(got, want[:rows])
    others = [slot for slot in range(64) if slot not in at.tolist()]
    assert (query[rows:] == KEPT).all() and (keys[others] == KEPT).all() and (values[others] == KEPT).all()


@pytest.mark.parametrize("over_all", [False, True])
def test_routes_with_ties_and_without_a_number(device: torch.device, over_all: bool) -> None:
    """16 experts fill the kernel's block, so nothing stands in for a NaN; 32 rows, parts that add up to a tie."""
    logits = random(device, 2, 32, 16, dtype=torch.float32)
    logits[:, 0] = 0
    logits[0, 0, [14, 3, 9]], logits[1, 0, [9, 5]] = 2, 2  # 9 first, then 3, 5, 14
    logits[0, 1, 2:15] = NAN
    logits[0, 2], logits[1, 3], logits[0, 4, 0] = NAN, -INF, INF
    ids, mix = full(device, KEPT, 32, 3, dtype=torch.int32), full(device, KEPT, 32, 3)
    router.route(logits, None, over_all, ids, mix, ints(device, 20))
    expected_mix, expected_ids = router.reference(logits, None, over_all, 3)
    assert ids[0].tolist() == [9, 3, 5] and near(mix[0], expected_mix[0])
    assert torch.equal(ids[5:20].long(), expected_ids[5:20]) and near(mix[5:20], expected_mix[5:20])
    left = logits.sum(0)[1, [0, 1, 15]]
    order = left.argsort(descending=True)
    assert ids[1].tolist() == torch.tensor([0, 1, 15], device=device)[order].tolist()
    assert near(mix[1], left[order].softmax(0))
    assert ((ids[:20] >= 0) & (ids[:20] < 16)).all()
    assert (ids[20:] == KEPT).all() and (mix[20:] == KEPT).all()


@pytest.mark.parametrize("vocab", [10, 4096, 8300])
def test_choices_below_zero_with_ties_and_broken_at_the_ends(device: torch.device, vocab: int) -> None:
    logits = -1 - random(device, 8, vocab, dtype=torch.float32).abs()
    tied = sorted({3, 7, vocab - 5, vocab - 2})
    logits[0, tied], logits[1, tied[1:]] = -0.5, -0.5
    logits[2] = -3e38
    logits[3, -1], logits[4, -1], logits[5, 0], logits[6:] = NAN, -INF, INF, NAN
    tokens = full(device, KEPT, 8, dtype=torch.int32)
    choose.choose(logits, tokens, ints(device, 6), choose.Scratch(8, vocab, device))
    assert tokens.tolist() == [3, tied[1], 0, -1, -1, -1, KEPT, KEPT]
    assert tokens[:6].tolist() == choose.reference(logits)[:6].tolist()


class Query(NamedTuple):
    sequence: int
    position: int
    limit: int


class Paged:
    """Sequences in shuffled pages. Page 0 is free, and where no key lies there is NaN, as in what a request left."""

    def __init__(self, device: torch.device, lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int) -> None:
        self.device, self.heads, self.dim = device, heads, dim
        pages = [-(-length // 16) for length in lengths]
        order = (1 + torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))).tolist()
        self.tables = full(device, 0, len(lengths), max(pages) + 1, dtype=torch.int32)
        self.keys, self.values = (full(device, NAN, 16 + 16 * sum(pages), kv_heads, dim, dtype=DTYPE) for _ in range(2))
        self.own: list[tuple[Tensor, Tensor]] = []
        for line, length in enumerate(lengths):
            mine = [order.pop() for _ in range(pages[line])]
            self.tables[line, : pages[line]] = ints(device, *mine)
            at = torch.tensor([mine[p // 16] * 16 + p % 16 for p in range(length)], device=device)
            pair = tuple(random(device, length, kv_heads, dim, seed=2 * line + i) for i in range(2))
            self.keys[at], self.values[at] = pair
            self.own.append((pair[0], pair[1]))

    def query(self, row: Query) -> Tensor:
        return random(self.device, self.heads, self.dim, seed=1000 * row.sequence + row.position)

    def run(self, rows: list[Query], sizes: list[int], window: int | None, sinks: Tensor | None) -> Tensor:
        """Rows in units of `sizes`; scratch and what lies behind the rows is stale."""
        bucket, device = len(rows) + 2, self.device
        splits = (bucket, self.heads, attention.SPLITS)
        scratch = attention.Scratch(full(device, NAN, *splits, self.dim), *(full(device, 1, *splits) for _ in range(2)))
        query = torch.stack([self.query(row) for row in rows] + [self.query(rows[0])] * 2)
        out = full(device, KEPT, *query.shape, dtype=DTYPE)
        stale = [Query(0, 10**6, 10**6)] * 2
        columns = [ints(device, *column) for column in zip(*rows, *stale, strict=True)]
        spare = [0] * (bucket - len(sizes))
        firsts = ints(device, *(sum(sizes[:i]) for i in range(len(sizes))), *spare)
        units = (firsts, ints(device, *sizes, *spare), ints(device, len(sizes)))
        attention.attend(
            query, self.keys, self.values, self.tables, units, *columns, ints(device, len(rows)), window, sinks,
            scratch, out,
        )  # fmt: skip
        assert (out[len(rows) :] == KEPT).all()
        return out[: len(rows)]

    def expected(self, row: Query, window: int | None, sinks: Tensor | None) -> Tensor:
        """A row that sees beyond its position is one at its limit with a window that much wider."""
        wider = None if window is None else window + row.limit - row.position
        keys, values = (part[: row.limit + 1] for part in self.own[row.sequence])
        return attention.reference(self.query(row), keys, values, row.limit, wider, sinks)

    def check(self, rows: list[Query], sizes: list[int], window: int | None, sinks: Tensor | None) -> None:
        together = self.run(rows, sizes, window, sinks)
        for got, row in zip(together, rows, strict=True):
            assert near(got, self.expected(row, window, sinks)), row
        alone = self.run(rows, [1] * len(rows), window, sinks)
        assert torch.equal(together, alone), "the unit that a row is in changed its bits"


@pytest.mark.parametrize("window", [None, 20])
def test_units_across_the_edges_of_blocks(device: torch.device, window: int | None) -> None:
    """Some rows of a unit see a block that others do not: above (62 to 65), or with a window below (81 to 84)."""
    paged = Paged(device, (66, 85), 6, 2, 24)
    rows = [Query(0, p, p) for p in range(62, 66)] + [Query(1, p, p) for p in range(81, 85)]
    paged.check(rows, [4, 4], window, random(device, 6, seed=5))


@pytest.mark.parametrize("window", [None, 5])
def test_rows_of_a_draft_block_see_it_to_its_end(device: torch.device, window: int | None) -> None:
    paged = Paged(device, (67, 20), 2, 1, 8)
    rows = [Query(0, p, 66) for p in range(61, 67)] + [Query(1, p, 19) for p in range(17, 20)]
    paged.check(rows, [4, 2, 3], window, None)


@pytest.mark.parametrize("window", [None, 150, 2173])
def test_more_blocks_than_splits(device: torch.device, window: int | None) -> None:
    """At 2300 a window of 150 starts in block 33, on the second turn; one of 2173 in block 2, at 2299 in block 1."""
    Paged(device, (2301,), 2, 1, 8).check([Query(0, p, p) for p in (2299, 2300)], [2], window, None)


@pytest.mark.parametrize("sink", [150.0, -150.0])
def test_sinks_far_from_every_score(device: torch.device, sink: float) -> None:
    paged, sinks = Paged(device, (9,), 2, 1, 16), torch.tensor([sink, 0.5], device=device, dtype=DTYPE)
    (got,) = paged.run([Query(0, 8, 8)], [1], None, sinks)
    assert torch.isfinite(got).all() and near(got, paged.expected(Query(0, 8, 8), None, sinks))


Dense = dict[int, tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]


def four_experts(device: torch.device, kernel: PlainExperts, biased: bool) -> tuple[Dense, list[Tensor]]:
    """Both K, 200 and 136, are over one step and no multiple of it."""
    layout, dense, records = ExpertLayout.of(kernel.parts()), {}, []
    for e in range(4):
        both, down = random(device, 272, 200, seed=e) / 10, random(device, 200, 136, seed=10 + e) / 10
        bias = (random(device, 272, seed=20 + e), random(device, 200, seed=30 + e)) if biased else (None, None)
        record = full(device, 255, layout.record_nbytes, dtype=torch.uint8)  # NaN wherever there is no weight
        named = {"gate_up": both, "down": down, "gate_up_bias": bias[0], "down_bias": bias[1]}
        for name, part in layout.view(record).items():
            part.copy_(named[name])
        gate, up = both.cpu().chunk(2)
        dense[e] = (gate, up, down.cpu(), *(None if b is None else b.cpu() for b in bias))
        records.append(record)
    return dense, records


def work_of(records: list[Tensor], ids: Tensor, bounds: tuple[int, int, int]) -> Work:
    """Entry e is expert e."""
    work = Work.empty(len(records), ids.numel(), records[0].device)
    work.address.copy_(torch.tensor([record.data_ptr() for record in records]))
    flat = ids.flatten()
    work.start[1:] = flat.bincount(minlength=len(records)).cumsum(0)
    work.pairs.copy_(flat.argsort(stable=True))
    work.bounds.copy_(torch.tensor([*bounds, 0, bounds[-1]]))
    return work


@pytest.mark.parametrize(("biased", "limit"), [(True, 0.5), (False, None), (False, 0.5)])
@pytest.mark.parametrize("k", [1, 3])
def test_plain_experts_of_an_inner_range(device: torch.device, biased: bool, limit: float | None, k: int) -> None:
    """Entries 1 and 2 of four: one of more than two tiles of rows, one of none or few."""
    shape = ExpertShape(200, 136, biased, 1.702, limit)
    kernel = PlainExperts(shape, DTYPE)
    dense, records = four_experts(device, kernel, biased)
    ids = torch.tensor([[1, 0, 3], [1, 2, 0], [1, 3, 0]]).repeat(12, 1)[:35, :k]
    ids[4, 0] = 0 if k == 1 else 1
    x = torch.nn.functional.pad(random(device, 35, 200, seed=40), (0, 56))
    work = work_of(records, ids, (1, 3, 4))
    out, inner = full(device, KEPT, 35 * k, 200), full(device, KEPT, 35 * k, 192, dtype=DTYPE)
    inner[:, 136:] = 0
    kernel.run(x, work, work.resident, k, inner, out)
    wanted = ((ids.flatten() == 1) | (ids.flatten() == 2)).to(device)
    expected = experts.reference(dense, x.cpu(), ids, shape).to(device)
    assert near(out[wanted], expected[wanted])
    assert (out[~wanted] == KEPT).all() and (inner[~wanted, :136] == KEPT).all() and not inner[:, 136:].any()
    for row in (1, 20, 34):
        single = work_of(records, ids[row : row + 1], (1, 3, 4))
        again = full(device, KEPT, k, 200)
        kernel.run(x[row : row + 1], single, single.resident, k, inner[:k].clone(), again)
        assert torch.equal(again, out[k * row : k * row + k]), "the rows beside a row changed its bits"


@settings(max_examples=15, deadline=None)
@given(tiles=st.integers(1, 2), halves=st.integers(1, 3), seed=st.integers(0, 1 << 20))
def test_packed_words_with_their_scales_as_the_kernel_reads_them(tiles: int, halves: int, seed: int) -> None:
    """`project`, `multiply_group` and `fragments` of mxfp4.cu in Python integers, at every place of the matrix."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (16 * tiles, halves, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 129, (16 * tiles, halves), dtype=torch.uint8, generator=generator)
    scales[0, 0], scales[-1, -1] = 1, 128
    packed, spread = (t.flatten().tolist() for t in mxfp4_packing.pack(blocks, scales))
    dense, groups = mxfp4.unpack(blocks, scales).tolist(), mxfp4_packing.groups(32 * halves)
    words = struct.unpack(f"<{len(packed) // 4}I", bytes(packed))
    for unit in range(tiles * groups):
        for lane in range(32):
            at = 2 * (unit * 16 + (lane >> 2) * 2 + ((lane & 3) >> 1))
            even, odd = (bfloat16(spread[at + i] << 7) for i in range(2))
            for step, word in enumerate(words[4 * (unit * 32 + lane) : 4 * (unit * 32 + lane) + 4]):
                for register, bits in enumerate(fragments(word)):
                    row = dense[16 * (unit // groups) + lane // 4 + 8 * (register % 2)]
                    column = 64 * (unit % groups) + 16 * (lane % 4) + 4 * step + 2 * (register // 2)
                    scale = odd if register % 2 else even
                    got = [bfloat16(bits & 0xFFFF) * scale, bfloat16(bits >> 16) * scale]
                    assert got == (row[column : column + 2] or [0.0, 0.0])


def fragments(word: int) -> list[int]:
    mask, turned = 0x81C081C0, (word >> 4 | word << 28) & 0xFFFFFFFF
    return [word << 6 & mask, word << 2 & mask, turned & mask, (word & 0x81808180) | (word >> 8 & 0x00400040)]


def bfloat16(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits << 16))[0])


def test_one_scale_too_large_is_enough() -> None:
    blocks, scales = torch.zeros(32, 3, 16, dtype=torch.uint8), torch.full((32, 3), 128, dtype=torch.uint8)
    assert torch.equal(mxfp4_packing.unpack(*mxfp4_packing.pack(blocks, scales), 96)[1], scales)
    scales[31, 2] = 129
    with pytest.raises(ValueError, match="too large"):
        mxfp4_packing.pack(blocks, scales)


@pytest.mark.parametrize("name", ["lru", "decayed-lfu"])
@pytest.mark.parametrize(("rows", "k"), [(8, 3), (520, 4)])
def test_commits_are_the_policy_and_the_counts(device: torch.device, name: PolicyName, rows: int, k: int) -> None:
    """520 rows of 4 take three turns of the kernel; worths and totals are beyond 32 bits."""
    layers, number, far = 2, 12, 1 << 40
    policies = [(LRU if name == "lru" else DecayedLFU)(number) for _ in range(layers)]
    worth = [[far + e + layer for e in range(number)] for layer in range(layers)]
    for policy, own in zip(policies, worth, strict=True):
        vars(policy).update({"_last": own, "_clock": 3 * own[0]} if name == "lru" else {"_counts": own})
    device_worth = torch.tensor(worth, device=device)
    clock = torch.tensor([3 * own[0] for own in worth], device=device)
    seen, totals = full(device, far, layers, 10, dtype=torch.int64), [[far] * 10 for _ in range(layers)]
    generator = torch.Generator().manual_seed(rows)
    for step in range(12):
        exist = 0 if step == 3 else rows if step == 5 else int(torch.randint(1, rows, (1,), generator=generator))
        ids = torch.rand(layers, rows, number - 1, generator=generator).topk(k).indices.int()
        ids[:, exist:] = number - 1  # stale
        kept = (torch.rand(rows, generator=generator) < (0.0 if step == 7 else 0.5)).int()
        kept[exist:] = 1  # stale
        new = torch.randint(0, 9, (layers, 3), generator=generator).int()
        pending, prefill = new.clone().to(device), step % 4 == 2
        commit.commit(
            ids.to(device), kept.to(device), ints(device, exist), ints(device, int(prefill)), device_worth, clock,
            pending, seen, name, DecayedLFU.SHIFT, DecayedLFU.FRACTION,
        )  # fmt: skip
        assert torch.equal(pending.cpu(), new) if exist == 0 else not pending.any()
        for layer, policy in enumerate(policies):
            for place, more in enumerate(new[layer].tolist() if exist else []):
                totals[layer][place + (5 if prefill else 0)] += more
            used = Counter(ids[layer, :exist][kept[:exist] == 1].flatten().tolist())
            if used and not prefill:
                policy.touch(used)
        assert seen.tolist() == totals
        assert device_worth.tolist() == [vars(p)["_last" if name == "lru" else "_counts"] for p in policies]
    assert clock.tolist() == ([vars(p)["_clock"] for p in policies] if name == "lru" else [3 * own[0] for own in worth])


def test_the_activation_of_a_dense_mlp(device: torch.device) -> None:
    """Two blocks of columns, three parts, a wider output."""
    gate_up, inner = random(device, 3, 20, 2200, dtype=torch.float32), full(device, KEPT, 20, 1152, dtype=DTYPE)
    gate_up[:, 18:] = NAN
    swiglu.swiglu(gate_up, inner, ints(device, 18))
    assert near(inner[:18, :1100], swiglu.reference(gate_up)[:18])
    assert (inner[18:] == KEPT).all() and (inner[:, 1100:] == KEPT).all()
