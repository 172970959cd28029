"""After training: give experts that text like the held-out files hardly reaches their least share of it.

Contract: router biases alone change, and training files alone (the probe) decide how. The layers are balanced in
order, each on what the layers before it now produce. Biases stay exact in bfloat16.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.train.export import read_target, save_tensors
from outrider.train.prepare import Ids
from outrider.train.target_model import TargetModel, rope_table

_STEP = 0.05  # logits
_MOST_STEPS = 400
_ROWS = 32


def wake_exported(folder: Path, probe: Ids, floor: float) -> int:
    """Wake the experts of an exported model and rewrite its router biases; returns how many were raised."""
    model = read_target(folder)
    raised = wake_experts(model, probe_rows(probe, model.config.context), floor)
    tensors = load_file(folder / "model.safetensors")
    for index, block in enumerate(model.blocks()):
        tensors[f"model.layers.{index}.mlp.router.bias"] = block.mlp.router.bias.detach().to(torch.bfloat16)
    save_tensors(tensors, folder)
    return raised


def probe_rows(probe: Ids, context: int) -> Tensor:
    """Up to 32 windows spread over the probe, int64 [R, context]."""
    ids = torch.from_numpy(probe.astype("int64"))
    count = max(1, min(_ROWS, len(ids) // context))
    starts = torch.linspace(0, max(0, len(ids) - context), count).long()
    return torch.stack([ids[s : s + context] for s in starts.tolist()])


@torch.no_grad()
def wake_experts(model: TargetModel, probe: Tensor, floor: float, batch: int = 2) -> int:
    """Raise biases until every expert has `floor` of a uniform share of `probe` int64 [R, S].

    Returns: how many biases were raised.
    """
    raised = 0
    rope = rope_table(model.config, probe.shape[1], probe.device)
    states = [model.embed_tokens(rows).to(model.dtype) for rows in probe.split(batch)]
    for index, block in enumerate(model.blocks()):
        mask = model.mask(probe.shape[1], index, probe.device)
        states = [block.attend(x, rope, mask) for x in states]
        logits = torch.cat([block.router_logits(x) for x in states])
        bias = block.mlp.router.bias
        woken = raise_to_floor(logits, bias, block.mlp.router.top_k, floor)
        raised += int((woken > bias).sum())
        bias.copy_(woken)
        weights = block.mlp.experts.weights(model.dtype, quantized=False)
        states = [block.feed(x, weights)[0] for x in states]
    return raised


def raise_to_floor(logits: Tensor, bias: Tensor, top_k: int, floor: float) -> Tensor:
    """`bias` float32 [E] raised so that each expert is among the top k of `floor` * k / E of the rows or more.

    Args: `logits` float32 [T, E], `bias` already in them.
    """
    experts = logits.shape[1]
    rise = torch.zeros_like(bias)
    for _ in range(_MOST_STEPS):
        woken = torch.where(rise > 0, (bias + rise).bfloat16().float(), bias)
        chosen = (logits + (woken - bias)).topk(top_k, dim=-1).indices
        shares = torch.bincount(chosen.flatten(), minlength=experts) * experts / chosen.numel()
        starved = shares < floor
        if not bool(starved.any()):
            break
        rise += _STEP * starved
    return woken
