"""What the demo target is judged by: held-out bits per byte, routing statistics, greedy samples.

Contract: nothing here changes the model. Bits per byte: each held-out file by itself, from an end-of-text token to the
closing end-of-text token, in windows of the model's context that advance by half of it; every token is counted once,
with at least half a context before it where the file has that much.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.train.prepare import Ids
from outrider.train.target_model import Routing, TargetModel
from outrider.train.tokenizer import Vocabulary

PROMPTS = (
    "def fibonacci(n):\n",
    'class Stack:\n    """A stack."""\n\n    def __init__(self):\n',
    "import argparse\n\n\ndef main():\n",
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n",
)
CHAT_PROMPTS = ("Return the larger of two numbers.",)


@dataclass(frozen=True)
class Windows:
    """Rows for the model: `inputs` and `targets` int64 [R, S]; `counted` bool [R, S] marks each target once."""

    inputs: Tensor
    targets: Tensor
    counted: Tensor


@dataclass(frozen=True)
class LayerRouting:
    """One layer over the held-out tokens.

    `smallest_share`, `largest_share`: of all (token, slot) pairs, times the number of experts (1 = uniform).
    `entropy`: of the shares, over log(E). `token_entropy`: mean entropy of a token's router softmax, over log(E).
    `overlap`: mean share of a token's experts that the token before it also chose; `overlap_by_chance`: the same for
    two unrelated tokens of this layer.
    """

    smallest_share: float
    largest_share: float
    entropy: float
    token_entropy: float
    overlap: float
    overlap_by_chance: float


@dataclass(frozen=True)
class Evaluation:
    bits_per_byte: float
    routing: list[LayerRouting]


def windows(files: Sequence[Ids], context: int, end_of_text: int) -> Windows:
    """Cut every file into windows of `context` tokens; short ones are padded with end-of-text, uncounted."""
    inputs, targets, counted = [], [], []
    stride = context // 2
    for ids in files:
        whole = torch.tensor([end_of_text, *ids.tolist(), end_of_text])
        scored = 0
        start = 0
        while scored < len(whole) - 1:
            piece = whole[start : start + context + 1]
            pad = context + 1 - len(piece)
            row = F.pad(piece, (0, pad), value=end_of_text)
            position = torch.arange(start, start + context)
            inputs.append(row[:-1])
            targets.append(row[1:])
            counted.append((position >= scored) & (position < len(whole) - 1))
            scored = min(start + context, len(whole) - 1)
            start += stride
    return Windows(torch.stack(inputs), torch.stack(targets), torch.stack(counted))


@torch.no_grad()
def evaluate(model: TargetModel, rows: Windows, total_bytes: int, batch: int = 16) -> Evaluation:
    """Bits per byte and routing over all counted positions, with the model's weights as they are."""
    device = model.embed_tokens.weight.device
    rows = _filled(rows, batch)
    nats = 0.0
    tallies = [_Tally(model.config.experts, model.config.top_k, device) for _ in range(model.config.layers)]
    for start in range(0, len(rows.inputs), batch):
        part = slice(start, start + batch)
        counted = rows.counted[part].to(device)
        hidden, routings = model(rows.inputs[part].to(device))
        logits = model.logits(hidden).float().flatten(0, 1)
        loss = F.cross_entropy(logits, rows.targets[part].to(device).flatten(), reduction="none")
        nats += float(loss.double()[counted.flatten()].sum())
        for tally, routing in zip(tallies, routings, strict=True):
            tally.add(routing, counted)
    return Evaluation(nats / math.log(2) / total_bytes, [tally.result() for tally in tallies])


def _filled(rows: Windows, batch: int) -> Windows:
    """Uncounted rows added up to a multiple of `batch`: one shape, one compilation."""
    extra = (0, 0, 0, -len(rows.inputs) % batch)
    return Windows(F.pad(rows.inputs, extra), F.pad(rows.targets, extra), F.pad(rows.counted, extra))


class _Tally:
    def __init__(self, experts: int, top_k: int, device: torch.device) -> None:
        self.top_k = top_k
        self.counts = torch.zeros(experts, dtype=torch.float64, device=device)
        self.entropy = 0.0
        self.tokens = 0
        self.shared = 0.0
        self.neighbours = 0

    def add(self, routing: Routing, counted: Tensor) -> None:
        keep = counted.flatten()
        chosen = F.one_hot(routing.chosen, len(self.counts)).sum(1)  # [T, E] of 0 and 1
        self.counts += chosen[keep].sum(0)
        logs = routing.logits[keep].float().log_softmax(-1)
        self.entropy -= float((logs.exp() * logs).sum())
        self.tokens += int(keep.sum())
        sets = chosen.view(*counted.shape, -1)
        both = counted[:, 1:] & counted[:, :-1]
        self.shared += float(((sets[:, 1:] * sets[:, :-1]).sum(-1) * both).sum()) / self.top_k
        self.neighbours += int(both.sum())

    def result(self) -> LayerRouting:
        experts = len(self.counts)
        share = self.counts / self.counts.sum()
        inclusion = self.counts / self.tokens
        entropy = -float((share * share.clamp(min=1e-12).log()).sum()) / math.log(experts)
        return LayerRouting(
            smallest_share=float(share.min()) * experts,
            largest_share=float(share.max()) * experts,
            entropy=entropy,
            token_entropy=self.entropy / self.tokens / math.log(experts),
            overlap=self.shared / self.neighbours,
            overlap_by_chance=float(inclusion.square().sum()) / self.top_k,
        )


@torch.no_grad()
def greedy(model: TargetModel, prompt: Sequence[int], count: int, stops: Sequence[int]) -> list[int]:
    """Up to `count` new ids, each the most likely one; ends before a stop id. Recomputes the prefix every time."""
    device = model.embed_tokens.weight.device
    ids = list(prompt)
    for _ in range(count):
        hidden, _ = model(torch.tensor([ids], device=device))
        best = int(model.logits(hidden[0, -1].float()).argmax())
        if best in stops:
            break
        ids.append(best)
    return ids[len(prompt) :]


def samples(model: TargetModel, words: Vocabulary, count: int = 160) -> list[tuple[str, str]]:
    """(prompt, greedy continuation) for `PROMPTS`, then for `CHAT_PROMPTS` in the chat form."""
    stops = (words.end_of_text, words.end)
    prompts = [(prompt, [words.end_of_text, *words.encode([prompt])[0]]) for prompt in PROMPTS]
    for request in CHAT_PROMPTS:
        asked = words.encode_chat([(request, "")])[0][:-1]
        prompts.append((words.decode(asked), [words.end_of_text, *asked]))
    return [(text, words.decode(greedy(model, ids, count, stops))) for text, ids in prompts]
