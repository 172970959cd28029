"""The largest logit of each row: greedy choice on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096


@triton.jit
def _best_of_chunk(logits, best, place, count, VOCAB, CHUNKS, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(count):
        return
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(logits + row.to(tl.int64) * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    finite = tl.abs(value) < float("inf")
    # Anything that is not finite wins and shows: the host refuses the row.
    value = tl.where(finite | (at >= VOCAB), value, float("inf"))
    tl.store(best + row * CHUNKS + chunk, tl.max(value, axis=0))
    tl.store(place + row * CHUNKS + chunk, chunk * CHUNK + tl.argmax(value, axis=0, tie_break_left=True))


@triton.jit
def _best(best, place, tokens, count, CHUNKS, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row >= tl.load(count):
        return
    at = tl.arange(0, BLOCK)
    value = tl.load(best + row * CHUNKS + at, mask=at < CHUNKS, other=float("-inf"))
    token = tl.load(place + row * CHUNKS + tl.argmax(value, axis=0, tie_break_left=True))
    tl.store(tokens + row, tl.where(tl.max(value, axis=0) < float("inf"), token, -1))


class Scratch:
    """Room for the chunks of up to `rows` rows."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.chunks = triton.cdiv(vocab, _CHUNK)
        self.best = torch.empty(rows, self.chunks, dtype=torch.float32, device=device)
        self.place = torch.empty(rows, self.chunks, dtype=torch.int32, device=device)


def choose(logits: Tensor, tokens: Tensor, count: Tensor, scratch: Scratch) -> None:
    """tokens int32 [R] = argmax of logits float32 [R, vocab], the smaller id among equals; -1 for a row with a NaN or
    infinite logit."""
    rows, vocab = logits.shape
    chunks = scratch.chunks
    _best_of_chunk[(rows, chunks)](
        logits, scratch.best, scratch.place, count, vocab, chunks, _CHUNK, num_warps=4, enable_fp_fusion=False
    )
    _best[(rows,)](
        scratch.best, scratch.place, tokens, count, chunks, triton.next_power_of_2(chunks),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def reference(logits: Tensor) -> Tensor:
    """int64 [R]."""
    places = torch.arange(logits.shape[1], device=logits.device)
    best = torch.where(logits == logits.amax(-1, keepdim=True), places, logits.shape[1]).amin(-1)
    return torch.where(torch.isfinite(logits).all(-1), best, -1)
