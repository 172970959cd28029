"""Each kernel of a captured round against its reference: compiled where there is a GPU, else in Triton's interpreter.

Outputs start poisoned, so that a row or column that should stay untouched shows when it does not. The interpreter's
`dot` has no bfloat16: there, everything is float32.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.bench.kernels import GPT_OSS, QWEN3_CODER
from outrider.bench.synthetic import random_record
from outrider.core import ExpertWeights
from outrider.experts.layout import ExpertLayout
from outrider.kernels import mxfp4
from outrider.kernels.device import (
    attention,
    choose,
    embed,
    experts,
    interleave,
    linear,
    mxfp4_packing,
    norm,
    rope_write,
    router,
)
from outrider.kernels.device.experts import ExpertShape
from outrider.kernels.device.fetch import fetch
from outrider.kernels.device.mxfp4 import Mxfp4Experts
from outrider.kernels.device.plain import PlainExperts
from outrider.kernels.device.work import Work
from outrider.models.rows import BUCKETS

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
TOLERANCE = 2e-2 if GPU else 1e-5
POISON = float("nan")


def random(*shape: int, dtype: torch.dtype = DTYPE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, POISON if dtype.is_floating_point else -7, dtype=dtype, device=DEVICE)


def count(rows: int) -> Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def near(got: Tensor, expected: Tensor) -> bool:
    """Relative to the whole; NaN never passes."""
    return bool((got.float() - expected.float()).norm() <= TOLERANCE * expected.float().norm())


@pytest.mark.parametrize(("n", "k", "parts"), [(80, 192, 1), (80, 200, 3), (300, 130, 2), (8, 64, 1)])
def test_projections_of_every_shape(n: int, k: int, parts: int) -> None:
    x, weight, out = random(48, k + 8)[:, :k], random(n, k), poisoned(parts, 48, n)
    linear.project(x, weight, out, count(5))
    assert near(out[:, :5], linear.reference(x, weight, parts)[:, :5])
    assert out[:, 16:].isnan().all()  # a tile of rows that do not exist


def test_the_bits_of_a_row_depend_on_the_row_alone() -> None:
    x, weight = random(48, 256), random(96, 256)
    parts = linear.parts_for(96, 256)
    whole, alone = poisoned(parts, 48, 96), poisoned(parts, 16, 96)
    linear.project(x, weight, whole, count(48))
    for row in (0, 17, 47):
        linear.project(x[row : row + 1].expand(16, -1).contiguous() * 0 + x[row], weight, alone, count(1))
        assert torch.equal(alone[:, 0], whole[:, row])


@pytest.mark.parametrize("form", ["none", "parts", "experts"])
@pytest.mark.parametrize("biased", [False, True])
def test_add_and_norm(form: str, biased: bool) -> None:
    x, weight, tap = random(16, 80), random(80, seed=1), poisoned(16, 80, dtype=DTYPE)
    h = torch.zeros(16, 128, dtype=DTYPE, device=DEVICE)
    h[:, 80:] = 3
    bias = random(80, seed=2) if biased else None
    terms = {
        "none": None,
        "parts": random(3, 16, 80, dtype=torch.float32),
        "experts": random(64, 80, dtype=torch.float32),
    }
    mix = random(16, 4, dtype=torch.float32) if form == "experts" else None
    expected_x, expected_h = norm.reference(x, terms[form], bias, weight, 1e-5, mix)
    before = x.clone()
    norm.add_norm(x, terms[form], bias, weight, 1e-5, h, count(9), mix, tap)
    assert near(x[:9], expected_x[:9]) and near(h[:9, :80], expected_h[:9]) and torch.equal(tap[:9], x[:9])
    assert torch.equal(x[9:], before[9:]) and (h[9:, :80] == 0).all() and tap[9:].isnan().all()
    assert (h[:, 80:] == 3).all()


def test_embedding_rows() -> None:
    table, x = random(50, 24), poisoned(16, 24, dtype=DTYPE)
    ids = ints([49, 0, 7] + [0] * 13)
    embed.embed(ids, table, x, count(3))
    assert torch.equal(x[:3], embed.reference(ids[:3], table)) and x[3:].isnan().all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_pages(biased: bool, normed: bool) -> None:
    heads, kv_heads, dim = 3, 1, 16
    width = (heads + 2 * kv_heads) * dim
    qkv = random(2, 16, width, dtype=torch.float32)
    bias = random(width) if biased else None
    norms = (random(dim, seed=1), random(dim, seed=2), 1e-6) if normed else None
    cos, sin = rope_write.tables(random(dim // 2, dtype=torch.float32).abs(), 1.25, 64)
    positions, slots = ints([5, 6, 63] + [0] * 13), ints([20, 3, 11] + [0] * 13)
    query = poisoned(16, heads, dim, dtype=DTYPE)
    keys, values = poisoned(32, kv_heads, dim, dtype=DTYPE), poisoned(32, kv_heads, dim, dtype=DTYPE)
    rope_write.rope_write(qkv, bias, norms, cos, sin, positions, slots, query, keys, values, count(3))
    expected = rope_write.reference(qkv, bias, norms, cos, sin, positions, heads, dim)
    at = slots[:3].long()
    for got, want in zip((query[:3], keys[at], values[at]), expected, strict=True):
        assert near(got, want[:3])
    assert query[3:].isnan().all() and int(keys.isnan().any(-1).sum()) == 29 == int(values.isnan().any(-1).sum())


@pytest.mark.parametrize("over_all", [False, True])
def test_routes(over_all: bool) -> None:
    logits, bias = random(2, 16, 12, dtype=torch.float32), random(12)
    ids, mix = poisoned(16, 3, dtype=torch.int32), poisoned(16, 3)
    router.route(logits, bias, over_all, ids, mix, count(7))
    expected_mix, expected_ids = router.reference(logits, bias, over_all, 3)
    assert torch.equal(ids[:7].long(), expected_ids[:7].long()) and near(mix[:7], expected_mix[:7])
    assert (ids[7:] == -7).all() and mix[7:].isnan().all()


def test_routes_of_equal_and_of_broken_logits_stay_in_range() -> None:
    logits = torch.zeros(1, 16, 12, device=DEVICE)
    logits[0, 1, 4:] = POISON
    logits[0, 2] = POISON
    ids, mix = poisoned(16, 3, dtype=torch.int32), poisoned(16, 3)
    router.route(logits, None, False, ids, mix, count(3))
    assert ids[0].tolist() == [0, 1, 2] == ids[1].tolist()
    assert ((ids[:3] >= 0) & (ids[:3] < 12)).all()


def test_choices() -> None:
    logits = random(16, 9000, dtype=torch.float32)
    logits[1, [8000, 40, 5000]] = 99.0
    logits[2, 17], logits[3, 8999], logits[4, 1] = POISON, float("inf"), -float("inf")
    tokens = poisoned(16, dtype=torch.int32)
    choose.choose(logits, tokens, count(6), choose.Scratch(16, 9000, DEVICE))
    assert tokens[:6].tolist() == choose.reference(logits)[:6].tolist()
    assert tokens[1:5].tolist() == [40, -1, -1, -1] and (tokens[6:] == -7).all()


class Paged:
    """Two sequences whose pages lie in disorder, with NaN wherever no key of theirs is."""

    def __init__(self, lengths: tuple[int, int], heads: int, kv_heads: int, dim: int) -> None:
        pages = [-(-length // 16) for length in lengths]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).tolist()
        self.tables = torch.zeros(2, max(pages), dtype=torch.int32, device=DEVICE)
        self.keys, self.values = (poisoned(16 * sum(pages), kv_heads, dim, dtype=DTYPE) for _ in range(2))
        self.parts = []
        for line, length in enumerate(lengths):
            own = order[line * pages[0] :][: pages[line]]
            self.tables[line, : pages[line]] = ints(own)
            k, v = random(length, kv_heads, dim, seed=line), random(length, kv_heads, dim, seed=9 + line)
            at = torch.tensor([own[p // 16] * 16 + p % 16 for p in range(length)], device=DEVICE)
            self.keys[at], self.values[at] = k, v
            self.parts.append((k, v))
        self.heads, self.dim = heads, dim

    def run(
        self, rows: list[tuple[int, int]], units: list[tuple[int, int]], window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """rows of (sequence, position)."""
        bucket, heads, dim = 16, self.heads, self.dim
        out = poisoned(bucket, heads, dim, dtype=DTYPE)
        pad = [0] * (bucket - len(rows))
        scratch = attention.Scratch(
            poisoned(bucket, heads, attention.SPLITS, dim),
            poisoned(bucket, heads, attention.SPLITS),
            poisoned(bucket, heads, attention.SPLITS),
        )
        query = torch.cat([random(1, heads, dim, seed=100 * s + p) for s, p in rows])
        self.query = torch.cat((query, poisoned(len(pad), heads, dim, dtype=DTYPE)))
        lists = tuple(ints([u[i] for u in units] + [0] * (bucket - len(units))) for i in range(2))
        attention.attend(
            self.query, self.keys, self.values, self.tables, (*lists, ints([len(units)])),
            ints([s for s, _ in rows] + pad), ints([p for _, p in rows] + pad), ints([p for _, p in rows] + pad),
            count(len(rows)), window, sinks, scratch, out,
        )  # fmt: skip
        assert out[len(rows) :].isnan().all()
        return out[: len(rows)]


@pytest.mark.parametrize(("window", "sunk"), [(None, True), (20, False), (70, True)])
def test_attention_of_two_sequences(window: int | None, sunk: bool) -> None:
    paged = Paged((133, 47), 4, 2, 16)
    sinks = random(4, seed=5) if sunk else None
    rows = [(0, 129), (0, 130), (0, 131), (0, 132), (1, 46), (0, 3)]
    together = paged.run(rows, [(0, 4), (4, 1), (5, 1)], window, sinks)
    for row, (sequence, position) in enumerate(rows):
        keys, values = (part[: position + 1] for part in paged.parts[sequence])
        assert near(together[row], attention.reference(paged.query[row], keys, values, position, window, sinks))
    alone = paged.run(rows, [(row, 1) for row in range(len(rows))], window, sinks)
    assert torch.equal(together, alone), "the unit that a row is in changed its bits"


def test_attention_beyond_one_turn_of_the_splits() -> None:
    """More than 32 blocks of 64 keys: splits take a second block."""
    paged = Paged((2200, 17), 2, 1, 16)
    (got,) = paged.run([(0, 2199)], [(0, 1)], None, None)
    assert near(got, attention.reference(paged.query[0], *paged.parts[0], 2199, None, None))


def test_fetch_copies_what_it_is_told() -> None:
    if GPU:
        source = torch.randint(0, 256, (3, 66048), dtype=torch.uint8).pin_memory()
    else:
        source = torch.randint(0, 256, (3, 66048), dtype=torch.uint8)
    target = torch.zeros(3, 66048, dtype=torch.uint8, device=DEVICE)
    tables = [torch.tensor([r.data_ptr() for r in t], device=DEVICE) for t in (source, target)]
    fetch(tables[0][[2, 0, 1]], tables[1], count(2), 66048)
    assert torch.equal(target.cpu()[:2], source[[2, 0]]) and (target[2] == 0).all()


@pytest.mark.parametrize("biased", [False, True])
def test_plain_experts(biased: bool) -> None:
    shape = ExpertShape(72, 40, biased, 1.702, 7.0 if biased else None)
    kernel = PlainExperts(shape, DTYPE)
    dense = {
        e: [random(*s, seed=10 * e + i) / 4 for i, s in enumerate([(40, 72), (40, 72), (72, 40)])] for e in range(3)
    }
    biases = {e: (random(80, seed=e), random(72, seed=e)) if biased else (None, None) for e in range(3)}
    records = [pack_plain(kernel, dense[e], biases[e]) for e in range(3)]
    x = torch.zeros(24, 128, dtype=DTYPE, device=DEVICE)
    x[:, :72] = random(24, 72)
    ids = torch.stack((torch.zeros(24, dtype=torch.int64), torch.arange(24) % 2 + 1), dim=1)
    work = work_of(records, ids)
    inner, out = torch.zeros(48, 64, dtype=DTYPE, device=DEVICE), poisoned(48, 72)
    kernel.run(x, work, work.resident, 2, inner, out)
    first = [pair for pair in range(48) if ids.flatten()[pair] == 0]
    assert out[[p for p in range(48) if p not in first]].isnan().all()  # entries beyond the bounds
    kernel.run(x, work, work.absent, 2, inner, out)
    expected = experts.reference(
        {e: (*(t.cpu() for t in dense[e]), *(None if b is None else b.cpu() for b in biases[e])) for e in range(3)},  # type: ignore[misc]
        x.cpu(),
        ids,
        shape,
    )
    assert near(out.cpu(), expected)
    single, again = work_of(records, ids[5:6]), poisoned(2, 72)
    kernel.run(x[5:6], single, single.resident, 2, inner, again)
    kernel.run(x[5:6], single, single.absent, 2, inner, again)
    assert torch.equal(again, out[10:12]), "the rows beside a row changed its bits"
    wide = poisoned(48, 72)
    kernel.run(x, work, work.every, 2, inner, wide, room=torch.zeros_like(x))
    assert torch.equal(wide, out) if GPU else near(wide, out)


def pack_plain(kernel: PlainExperts, dense: list[Tensor], biases: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """A record of an expert given as gate, up, down, written the way its family stores it."""
    gate, up, down = dense
    stored: ExpertWeights
    if biases[0] is not None and biases[1] is not None:
        both = torch.stack((gate, up), dim=1).flatten(0, 1).T
        bias = torch.stack((biases[0][:40], biases[0][40:]), dim=1).flatten()
        stored = {"gate_up_proj": both, "gate_up_proj_bias": bias, "down_proj": down.T, "down_proj_bias": biases[1]}
    else:
        stored = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
    layout = ExpertLayout.of(kernel.parts())
    record = torch.zeros(layout.record_nbytes, dtype=torch.uint8, device=DEVICE)
    packed = kernel.pack(stored)
    for name, part in layout.view(record).items():
        part.copy_(packed[name])
    return record


def work_of(records: list[Tensor], ids: Tensor) -> Work:
    """Entry e is expert e; the first is resident, the others are not."""
    flat = ids.flatten().tolist()
    work = Work.empty(len(records), len(flat), DEVICE)
    pairs = [[pair for pair, expert in enumerate(flat) if expert == e] for e in range(len(records))]
    work.address.copy_(torch.tensor([record.data_ptr() for record in records]))
    work.start.copy_(torch.tensor([sum(map(len, pairs[:e])) for e in range(len(records) + 1)]))
    work.pairs.copy_(torch.tensor([pair for own in pairs for pair in own]))
    work.bounds.copy_(torch.tensor([0, 1, len(records), 0, len(records)]))
    return work


@pytest.mark.skipif(not GPU, reason="CUDA C++")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 4])
def test_mxfp4_experts(biased: bool, columns: int) -> None:
    """K of 96 and 160: a group of 64 columns is not full. 1 to 40 rows an expert, and records in host memory, too."""
    hidden, inner_size, rows = 96, 160, 41
    shape = ExpertShape(hidden, inner_size, biased, 1.702, 7.0 if biased else None)
    kernel = Mxfp4Experts(shape, columns)
    dense, records = {}, []
    for e in range(3):
        generator = torch.Generator().manual_seed(e)
        both, down = (
            (
                torch.randint(0, 256, (n, k // 32, 16), dtype=torch.uint8, generator=generator),
                torch.randint(118, 122, (n, k // 32), dtype=torch.uint8, generator=generator),
            )
            for n, k in ((2 * inner_size, hidden), (hidden, inner_size))
        )
        bias = (random(2 * inner_size, seed=e).cpu(), random(hidden, seed=e).cpu()) if biased else (None, None)
        stored = {"gate_up_proj_blocks": both[0], "gate_up_proj_scales": both[1]}
        stored |= {"down_proj_blocks": down[0], "down_proj_scales": down[1]}
        stored |= {"gate_up_proj_bias": bias[0], "down_proj_bias": bias[1]} if biased else {}  # type: ignore[dict-item]
        gate_up = mxfp4.unpack(*both)
        own = None if bias[0] is None else torch.cat((bias[0][0::2], bias[0][1::2]))
        dense[e] = (gate_up[0::2], gate_up[1::2], mxfp4.unpack(*down), own, bias[1])
        layout = ExpertLayout.of(kernel.parts())
        record = torch.zeros(layout.record_nbytes, dtype=torch.uint8)
        for name, part in layout.view(record).items():
            part.copy_(kernel.pack(stored)[name])
        records.append(record.pin_memory() if e == 1 else record.to(DEVICE))
    ids = torch.stack((torch.zeros(rows, dtype=torch.int64), (torch.arange(rows) == 7) + 1), dim=1)
    x = torch.zeros(rows, 128, dtype=DTYPE, device=DEVICE)
    x[:, :hidden] = random(rows, hidden)
    work = work_of(records, ids)
    inner, out = torch.zeros(2 * rows, 192, dtype=DTYPE, device=DEVICE), poisoned(2 * rows, hidden)
    kernel.run(x, work, work.resident, 2, inner, out)
    assert out[1::2].isnan().all()
    kernel.run(x, work, work.absent, 2, inner, out)
    assert near(out.cpu(), experts.reference(dense, x.cpu(), ids, shape))
    single, again = work_of(records, ids[9:10]), poisoned(2, hidden)
    for bounds in (single.resident, single.absent):
        kernel.run(x[9:10], single, bounds, 2, inner, again)
    assert torch.equal(again, out[18:20]), "the rows beside a row changed its bits"
    for most in (3 * 32, 3 * 32 + 1):  # pairs for either kernel of many rows
        wide, inner = poisoned(2 * rows, hidden), torch.zeros(2 * rows, 192, dtype=DTYPE, device=DEVICE)
        kernel.run(x, replace(work, pairs=work.pairs.resize_(most)), work.every, 2, inner, wide, torch.zeros_like(x))
        assert torch.equal(wide, out), "many rows at once gave other bits"


@pytest.mark.skipif(not GPU, reason="CUDA C++")
@pytest.mark.parametrize("shape", [GPT_OSS, QWEN3_CODER], ids=["gpt-oss", "qwen3"])
def test_many_rows_of_full_size_experts_give_the_bits_of_few(shape: ExpertShape) -> None:
    """1 to 139 rows an expert, which are several passes and end within one."""
    kernel, k = Mxfp4Experts(shape), 4
    layout = ExpertLayout.of(kernel.parts())
    generator = torch.Generator(DEVICE).manual_seed(0)
    records = [random_record(kernel, layout, generator) for _ in range(6)]
    ids = torch.tensor([e for e, rows in enumerate((1, 15, 139, 64, 32, 33)) for _ in range(rows)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].view(-1, k)
    work, x = work_of(records, ids), random(len(ids), shape.hidden)
    few, many = poisoned(ids.numel(), shape.hidden), poisoned(ids.numel(), shape.hidden)
    inner = torch.zeros(ids.numel(), shape.inner, dtype=DTYPE, device=DEVICE)
    kernel.run(x, work, work.every, k, inner, few)
    assert torch.isfinite(few).all() and few.std() > 0
    for most in (ids.numel(), 6 * 32):
        kernel.run(x, replace(work, pairs=work.pairs.resize_(most)), work.every, k, inner, many, torch.zeros_like(x))
        assert torch.equal(many, few)


@pytest.mark.skipif(not GPU, reason="tiles of the tensor cores")
@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (2880, 4096), (32, 2880), (2048, 4096), (80, 200)])
def test_projections_have_the_same_bits_in_every_bucket(n: int, k: int) -> None:
    x, weight, parts = random(512, k + k % 64)[:, :k], random(n, k), linear.parts_for(n, k)
    outs = []
    for bucket in BUCKETS:
        outs.append(poisoned(parts, bucket, n))
        linear.project(x[:bucket], weight, outs[-1], count(bucket))
    for out in outs[:-1]:
        assert torch.equal(out, outs[-1][:, : out.shape[1]])


def test_columns_are_interleaved() -> None:
    x = random(3, 192)
    out = poisoned(3, 192, dtype=DTYPE)
    interleave.interleave(x, out)
    assert torch.equal(out, interleave.reference(x))
    assert sorted(interleave.reference(torch.arange(64).view(1, 64)).flatten().tolist()) == list(range(64))


@settings(max_examples=30, deadline=None)
@given(tiles=st.integers(1, 3), halves=st.integers(1, 5), seed=st.integers(0, 1 << 20))
def test_packed_mxfp4_is_what_was_packed(tiles: int, halves: int, seed: int) -> None:
    """Also as the CUDA kernel reads it: `fragments` of mxfp4.cu in Python integers."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (16 * tiles, halves, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(
        0, mxfp4_packing.MOST_SCALE + 1, (16 * tiles, halves), dtype=torch.uint8, generator=generator
    )
    words, spread = mxfp4_packing.pack(blocks, scales)
    again = mxfp4_packing.unpack(words, spread, 32 * halves)
    assert torch.equal(again[0], blocks) and torch.equal(again[1], scales)
    dense = mxfp4.unpack(blocks, torch.full_like(scales, 127))
    tile, group, lane, step = (
        int(torch.randint(0, n, (1,), generator=generator)) for n in (tiles, words.shape[1], 32, 4)
    )
    word = int(words.view(torch.int32).view(tiles, -1, 32, 4)[tile, group, lane, step]) & 0xFFFFFFFF
    for register, bits in enumerate(fragments(word)):
        for parity in range(2):
            row = 16 * tile + lane // 4 + 8 * (register % 2)
            column = 64 * group + 16 * (lane % 4) + 4 * step + 2 * (register // 2) + parity
            expected = float(dense[row, column]) if column < 32 * halves else 0.0
            assert bfloat16((bits >> 16 * parity) & 0xFFFF) * 2.0**126 == expected


def fragments(word: int) -> list[int]:
    mask, turned = 0x81C081C0, (word >> 4) | (word << 28)
    return [word << 6 & mask, word << 2 & mask, turned & mask, (word & 0x81808180) | (word >> 8 & 0x00400040)]


def bfloat16(bits: int) -> float:
    return float(torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16).float())


def test_a_scale_too_large_is_refused_and_gated_rows_pair_up() -> None:
    blocks, scales = torch.zeros(16, 2, 16, dtype=torch.uint8), torch.full((16, 2), 129, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scale of 2\^2 is too large"):
        mxfp4_packing.pack(blocks, scales)
    assert mxfp4_packing.gated_rows(16).tolist() == [
        *range(0, 16, 2), *range(1, 16, 2), *range(16, 32, 2), *range(17, 32, 2)
    ]  # fmt: skip
