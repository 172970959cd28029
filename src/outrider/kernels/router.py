"""Which experts a row goes to, and with what weights."""

import torch
from torch import Tensor


def top_k_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """gpt-oss: the k largest of logits [rows, experts], softmax over those. Returns (weights, int64 ids) [rows, k]."""
    top, ids = torch.topk(logits, k, dim=-1)
    return torch.softmax(top, dim=-1), ids


def softmax_top_k(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Qwen3: float32 softmax over all experts, the k largest, made to sum to one if `normalize`; as above."""
    top, ids = torch.topk(torch.softmax(logits.float(), dim=-1), k, dim=-1)
    if normalize:
        top = top / top.sum(-1, keepdim=True)
    return top.to(logits.dtype), ids
