"""How much of its blocks a drafter gets right, on text that the target has written greedily.

Contract: `played` is the engine itself, speculating. `simulate` needs no engine: a draft is accepted exactly if it
equals the text, so the rounds are those that the engine would take with these weights, but only rounds whose whole
block lies inside the text are counted. `mean_acceptance_length` includes the bonus token: plain decoding has 1.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import SamplingParams
from outrider.engine.engine import Engine
from outrider.train.draft_data import Sequences, continuations
from outrider.train.draft_loop import Frozen, TrainingSet
from outrider.train.draft_model import DraftModel

_ANCHORS = 64


@dataclass(frozen=True)
class Acceptance:
    """`by_position[k]`: of the rounds that tested draft k + 1, the share in which it and all before it were accepted.

    `identical`: sequences whose tokens are those of plain decoding; None if they were taken from there.
    """

    mean_acceptance_length: float
    by_position: list[float]
    rounds: int
    sequences: int
    identical: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def played(engine: Engine, plain: Sequences, tokens: int) -> Acceptance:
    """Let `engine`, which has a draft, write the texts `plain` again from their prompts.

    Args: `tokens`: most tokens of a continuation, as when `plain` was written.
    """
    parts = np.split(plain.tokens, plain.lengths.cumsum()[:-1])
    wanted = [part.tolist() for part in parts]
    params = SamplingParams(tokens)
    requests = [(ids[:prompt], params) for ids, prompt in zip(wanted, plain.prompts.tolist(), strict=True)]
    written = [ids for ids, _ in continuations(engine, requests)]
    stats = engine.stats()
    return Acceptance(
        mean_acceptance_length=stats.mean_acceptance_length or 1.0,
        by_position=stats.acceptance_by_position or [],
        rounds=stats.rounds,
        sequences=len(plain),
        identical=sum(a == b for a, b in zip(written, wanted, strict=True)),
    )


@torch.no_grad()
def simulate(model: DraftModel, frozen: Frozen, data: TrainingSet) -> Acceptance:
    """Rounds over every sequence of `data`, from the first token behind its prompt to its end."""
    block = model.config.block_size
    accepted: list[int] = []
    for index, start in enumerate(data.sequences.starts.tolist()):
        length, prompt = int(data.sequences.lengths[index]), int(data.sequences.prompts[index])
        tokens = torch.from_numpy(data.sequences.tokens[start : start + length]).long().to(frozen.embedding.device)
        matched = matches(model, frozen, data.features[start : start + length], tokens, prompt)
        anchor = prompt
        while anchor + block <= length:
            accepted.append(matched[anchor - prompt])
            anchor += accepted[-1] + 1
    count = max(1, len(accepted))
    shares = [sum(a > place for a in accepted) / count for place in range(block - 1)]
    return Acceptance(1 + sum(accepted) / count, shares, len(accepted), len(data.sequences))


def matches(model: DraftModel, frozen: Frozen, features: Tensor, tokens: Tensor, first: int) -> list[int]:
    """For each anchor position from `first` on whose block fits: how many drafts equal the text, up to the first miss.

    Args: features [S, taps * H], tokens int64 [S].
    """
    config, device = model.config, tokens.device
    steps = torch.arange(1, config.block_size, device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    context = features.to(device, dtype).unsqueeze(0)
    found: list[int] = []
    for begin in range(first, len(tokens) - config.block_size + 1, _ANCHORS):
        anchors = torch.arange(begin, min(begin + _ANCHORS, len(tokens) - config.block_size + 1), device=device)
        opening = F.embedding(tokens[anchors], frozen.embedding).unsqueeze(0)
        hidden = model(context, anchors.unsqueeze(0), opening, frozen.embedding[config.mask_token_id])[0]
        drafts = F.linear(hidden[:, 1:], frozen.head.to(hidden.dtype)).float().argmax(-1)
        right = drafts == tokens[anchors.unsqueeze(1) + steps]
        found += right.long().cumprod(1).sum(1).tolist()
    return found
