"""From the parts of the fused q, k, v projection to a rotated query and to keys and values in their pages."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.rms_norm import rms_norm
from outrider.kernels.rope import apply_rope


@triton.jit
def _rope_write(
    qkv, bias, q_norm, k_norm, cos, sin, positions, slots, query, keys, values, count, eps, R,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
    BIASED: tl.constexpr, NORMED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(count):
        return
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    at = tl.arange(0, HALF)
    inside = at < DIM // 2
    first = tl.zeros((HALF,), tl.float32)
    second = tl.zeros((HALF,), tl.float32)
    for part in tl.static_range(PARTS):
        own = qkv + (part * R + row).to(tl.int64) * width + head * DIM + at
        first += tl.load(own, mask=inside, other=0.0)
        second += tl.load(own + DIM // 2, mask=inside, other=0.0)
    if BIASED:
        first += tl.load(bias + head * DIM + at, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias + head * DIM + DIM // 2 + at, mask=inside, other=0.0).to(tl.float32)
    dtype = query.dtype.element_ty
    slot = tl.load(slots + row).to(tl.int64)
    if head >= HEADS + KV_HEADS:
        to = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM + at
        tl.store(to, first.to(dtype), mask=inside)
        tl.store(to + DIM // 2, second.to(dtype), mask=inside)
        return
    if NORMED:
        weight = q_norm
        if head >= HEADS:
            weight = k_norm
        scale = tl.rsqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / DIM + eps)
        first *= scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        second *= scale * tl.load(weight + DIM // 2 + at, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(positions + row).to(tl.int64) * (DIM // 2) + at
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    to = query + (row.to(tl.int64) * HEADS + head) * DIM + at
    if head >= HEADS:
        to = keys + (slot * KV_HEADS + head - HEADS) * DIM + at
    tl.store(to, (first * c - second * s).to(dtype), mask=inside)
    tl.store(to + DIM // 2, (second * c + first * s).to(dtype), mask=inside)


def rope_write(
    qkv: Tensor,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
) -> None:
    """Add the parts and the bias, norm q and k by head if asked, rotate them, store the query and the row's page entry.

    Args:
        qkv: float32 [parts, R, (heads + 2 kv_heads) * dim]; bias [the same width] or None.
        norms: weights [dim] of q and k, and eps.
        cos, sin: float32 [positions, dim / 2]; positions, slots int32 [R].
        query [R, heads, dim]; keys, values [token slots, kv_heads, dim].
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    _rope_write[(rows, heads + 2 * kv_heads)](
        qkv, bias, q_norm, k_norm, cos, sin, positions, slots, query, keys, values, count, eps, rows,
        heads, kv_heads, dim, len(qkv), bias is not None, norms is not None, triton.next_power_of_2(dim // 2),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def reference(
    qkv: Tensor,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor, float] | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    heads: int,
    dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(query, keys, values), each float32 [R, heads, dim] of its own number of heads."""
    wide = qkv.sum(0) if bias is None else qkv.sum(0) + bias.float()
    split = wide.unflatten(-1, (-1, dim))
    kv_heads = (split.shape[1] - heads) // 2
    query, keys, values = split.split((heads, kv_heads, kv_heads), dim=1)
    if norms:
        query, keys = rms_norm(query, norms[0], norms[2]), rms_norm(keys, norms[1], norms[2])
    at = positions.long()
    return apply_rope(query, cos[at], sin[at]), apply_rope(keys, cos[at], sin[at]), values.contiguous()


def tables(frequencies: Tensor, factor: float, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, dim / 2], of all positions."""
    angles = torch.arange(positions, device=frequencies.device).float().unsqueeze(-1) * frequencies
    return angles.cos() * factor, angles.sin() * factor
