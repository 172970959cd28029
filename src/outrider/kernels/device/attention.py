"""Attention of a row bucket on paged keys and values: split over the keys, grouped queries, sinks, windows.

Rows of one sequence that follow each other form *units* of a few rows, which read the keys together. Blocks of
`BLOCK` keys lie at fixed absolute positions, and block b belongs to split b mod `SPLITS`; a split takes its blocks in
order, and the splits are merged in order. So a row's bits depend on its position and nothing else: a block that a row
of the unit does not see adds exact zeros to it, as long as its values are finite (0 times infinity is not 0).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

UNIT = 4
"""Rows that read the keys together, of sequences that decode."""
PROMPT_UNIT = 8
"""Of prompts. It decides bits, so a row of a prompt is never computed in the other way."""
BLOCK = 64
SPLITS = 32
_PAGE = 16


@triton.jit
def _partial(
    query, keys, values, tables, unit_first, unit_rows, units, sequences, positions, limits, sums, tops, totals,
    scale, window, table_width,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, UNIT * GROUP)
    d = tl.arange(0, DIM_PAD)
    for unit in range(tl.program_id(2), tl.load(units), tl.num_programs(2)):
        first = tl.load(unit_first + unit)
        number = tl.load(unit_rows + unit)
        row = first + m // GROUP
        head = kv_head * group + m % GROUP
        real = (m // GROUP < number) & (m % GROUP < group)
        q_at = (row.to(tl.int64) * HEADS + head)[:, None] * DIM + d[None, :]
        q = tl.load(query + q_at, mask=real[:, None] & (d[None, :] < DIM), other=0.0)
        position = tl.load(positions + row, mask=real, other=0)
        limit = tl.load(limits + row, mask=real, other=-1)
        start = tl.load(positions + first)
        last = tl.load(limits + first + number - 1)
        table = tables + tl.load(sequences + first).to(tl.int64) * table_width
        lowest = 0
        if window > 0:
            lowest = tl.maximum(start - window + 1, 0) // BLOCK
        top = tl.full((UNIT * GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((UNIT * GROUP,), tl.float32)
        sum_ = tl.zeros((UNIT * GROUP, DIM_PAD), tl.float32)
        for block in range(lowest + (split - lowest % SPLITS + SPLITS) % SPLITS, last // BLOCK + 1, SPLITS):
            at = block * BLOCK + tl.arange(0, BLOCK)
            page = tl.load(table + at // PAGE, mask=at <= last, other=0)
            slot = (page * PAGE + at % PAGE).to(tl.int64)
            kv_at = (slot * KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
            readable = (at <= last)[:, None] & (d[None, :] < DIM)
            k = tl.load(keys + kv_at, mask=readable, other=0.0)
            scores = tl.dot(q, k.T) * scale
            seen = real[:, None] & (at[None, :] <= limit[:, None])
            if window > 0:
                seen = seen & (at[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(top - base)
            v = tl.load(values + kv_at, mask=readable, other=0.0)
            total = total * shrink + tl.sum(weights, axis=1)
            sum_ = sum_ * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            top = new_top
        out = (row.to(tl.int64) * HEADS + head) * SPLITS + split
        tl.store(tops + out, top, mask=real)
        tl.store(totals + out, total, mask=real)
        used = real & (top > float("-inf"))
        tl.store(sums + out[:, None] * DIM + d[None, :], sum_, mask=used[:, None] & (d[None, :] < DIM))


@triton.jit
def _merge(
    sums, tops, totals, sinks, out, count,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(count):
        return
    d = tl.arange(0, DIM_PAD)
    inside = d < DIM
    at = (row.to(tl.int64) * HEADS + head) * SPLITS
    every = tl.load(tops + at + tl.arange(0, SPLITS))
    top = tl.max(every, axis=0)
    total = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
        total = tl.exp(sink - top)
    result = tl.zeros((DIM_PAD,), tl.float32)
    for split in tl.static_range(SPLITS):
        own = tl.load(tops + at + split)
        factor = tl.exp(own - top)
        used = tl.where(own > float("-inf"), DIM, 0)  # nothing was written where no key was seen
        total += factor * tl.load(totals + at + split)
        result += factor * tl.load(sums + (at + split) * DIM + d, mask=d < used, other=0.0)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * DIM + d, (result / total).to(out.dtype.element_ty), mask=inside)


class Scratch(NamedTuple):
    """The splits of a bucket's rows, float32: sums [R, heads, SPLITS, dim], tops and totals [R, heads, SPLITS]."""

    sums: Tensor
    tops: Tensor
    totals: Tensor


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    units: tuple[Tensor, Tensor, Tensor],
    sequences: Tensor,
    positions: Tensor,
    limits: Tensor,
    count: Tensor,
    window: int | None,
    sinks: Tensor | None,
    scratch: Scratch,
    out: Tensor,
    unit: int = UNIT,
) -> None:
    """Every row attends to its sequence up to its limit; keys and values up to there are in their pages.

    Args:
        query, out [R, heads, dim]; keys, values [token slots, kv_heads, dim].
        tables: int32 [sequences, pages], pages of 16 tokens in order.
        units: first row and number of rows of each unit, int32 [R] each, and how many there are, int32 [1]. A unit's
            rows have neighbouring positions in one sequence.
        sequences, positions, limits: int32 [R], the row's line of `tables`, its absolute position, and the last
            position that it sees (its own, or the end of a draft block); limits do not fall within a unit.
        window: how many keys a row sees, itself included; sinks [heads]. unit: most rows of a unit.
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = max(triton.next_power_of_2(heads // kv_heads), 16 // unit)
    pad = max(triton.next_power_of_2(dim), 16)
    _partial[(kv_heads, SPLITS, max(1, rows // 8))](
        query, keys, values, tables, *units, sequences, positions, limits, scratch.sums, scratch.tops, scratch.totals,
        dim**-0.5, window or 0, tables.shape[1], heads, kv_heads, dim, pad, group, unit, BLOCK, SPLITS, _PAGE,
        num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    _merge[(rows, heads)](
        scratch.sums, scratch.tops, scratch.totals, sinks, out, count, heads, dim, pad, SPLITS, sinks is not None,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def reference(
    query: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None, sinks: Tensor | None
) -> Tensor:
    """One row [heads, dim] at `position` over its sequence's keys and values [position + 1, kv_heads, dim], float32."""
    heads, dim = query.shape
    first = 0 if window is None else max(0, position - window + 1)
    group = heads // keys.shape[1]
    k, v = (t[first : position + 1].float().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("hd,thd->ht", query.float(), k) * dim**-0.5
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().unsqueeze(-1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[:, : len(k)]
    return torch.einsum("ht,thd->hd", weights, v)
