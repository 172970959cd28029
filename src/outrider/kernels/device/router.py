"""The k experts of each row and their weights, from the parts of the router's projection."""

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.router import softmax_top_k, top_k_softmax


@triton.jit
def _route(
    logits, bias, ids, mix, count, R,
    EXPERTS: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, OVER_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(count):
        return
    at = tl.arange(0, BLOCK)
    inside = at < EXPERTS
    value = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(logits + (part * R + row).to(tl.int64) * EXPERTS + at, mask=inside, other=0.0)
    if BIASED:
        value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(inside & (value == value), value, float("-inf"))  # a NaN must not choose an address
    top = tl.max(value, axis=0)
    total = 0.0
    if OVER_ALL:
        total = tl.sum(tl.exp(value - top), axis=0)
    left = value
    for rank in tl.static_range(K):
        chosen = tl.argmax(left, axis=0, tie_break_left=True)
        tl.store(ids + row * K + rank, tl.minimum(chosen, EXPERTS - 1))
        if not OVER_ALL:
            total += tl.exp(tl.max(left, axis=0) - top)
        left = tl.where(at == chosen, float("-inf"), left)
    left = value
    for rank in tl.static_range(K):
        chosen = tl.argmax(left, axis=0, tie_break_left=True)
        tl.store(mix + row * K + rank, tl.exp(tl.max(left, axis=0) - top) / total)
        left = tl.where(at == chosen, float("-inf"), left)


def route(logits: Tensor, bias: Tensor | None, over_all: bool, ids: Tensor, mix: Tensor, count: Tensor) -> None:
    """The k largest of each row, the smaller id first among equals, and their softmax.

    Args:
        logits: float32 [parts, R, experts]; bias [experts] or None.
        over_all: the softmax runs over all experts instead of the k (Qwen3 without `norm_topk_prob`; with it the two
            are the same).
        ids: int32 [R, k]; mix: float32 [R, k].
    """
    parts, rows, experts = logits.shape
    _route[(rows,)](
        logits, bias, ids, mix, count, rows, experts, ids.shape[1], parts, bias is not None, over_all,
        triton.next_power_of_2(experts), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def reference(logits: Tensor, bias: Tensor | None, over_all: bool, k: int) -> tuple[Tensor, Tensor]:
    """(mix, ids)."""
    wide = logits.sum(0) if bias is None else logits.sum(0) + bias.float()
    return softmax_top_k(wide, k, normalize=False) if over_all else top_k_softmax(wide, k)
