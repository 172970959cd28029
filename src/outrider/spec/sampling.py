"""From logits to tokens for a batch of requests, greedy and sampled side by side: drafting and judging.

Random numbers are keyed by the request's seed, how many tokens it had emitted when the round began, and the place in
the round. Each key is used once, so a draft that was thrown away leaves no trace in later draws, and nothing depends
on who else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.config import SamplingParams
from outrider.errors import RequestError
from outrider.kernels.warp import draw, uniform, warp
from outrider.spec.acceptance import NOTHING, accept_greedy, accept_sampled


@dataclass(frozen=True)
class Drafted:
    """A drafted block: tokens d_1 .. d_n, their probabilities, and what they were drawn from.

    `probs`: float [n, vocab] for a sampled request, None for a greedy one or where nothing was drafted.
    """

    tokens: tuple[int, ...]
    token_probs: tuple[float, ...]
    probs: Tensor | None

    @classmethod
    def nothing(cls) -> "Drafted":
        """No draft at all."""
        return cls((), (), None)


@dataclass(frozen=True)
class Trial:
    """A block before the target: `logits` [width, vocab] of its rows, the first of them at `position`.

    `emitted` counts the request's tokens when the round began.
    """

    logits: Tensor
    drafted: Drafted
    params: SamplingParams
    emitted: int
    position: int

    @property
    def width(self) -> int:
        """Rows that were verified."""
        return len(self.logits)


@dataclass(frozen=True)
class Verdict:
    """`tokens` that a verify gives, the first `accepted` of them drafts."""

    tokens: list[int]
    accepted: int


def draft_tokens(logits: Tensor, asked: Sequence[tuple[SamplingParams, int]]) -> list[Drafted]:
    """Choose each request's drafts from `logits` float32 [requests, n, vocab]; `asked`: its parameters, tokens emitted.

    Raises: RequestError for logits that are NaN or infinite (-inf marks a token that cannot be drafted).
    """
    top = logits.amax(-1)
    if not bool(torch.isfinite(top).all()):
        raise draft_not_finite()
    drafted = []
    for own, (params, emitted) in zip(logits, asked, strict=True):
        if params.temperature == 0:
            tokens, probs = own.argmax(-1), None
            token_probs = torch.exp(own.amax(-1) - own.logsumexp(-1))
        else:
            probs = warp(own, params)
            tokens = draw(probs, _uniforms(params.seed, emitted, "draft", len(own), own.device))
            token_probs = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        drafted.append(Drafted(tuple(tokens.tolist()), tuple(token_probs.tolist()), probs))
    return drafted


def judge(trials: Sequence[Trial]) -> list[Verdict]:
    """Settle every block against the target's rows.

    Raises: RequestError for logits that are not finite.
    """
    for trial in trials:
        if not bool(torch.isfinite(trial.logits).all()):
            raise not_finite(trial.position)
    verdicts: dict[int, Verdict] = {}
    for greedy in (True, False):
        mine = [i for i, trial in enumerate(trials) if (trial.params.temperature == 0) == greedy]
        if mine:
            group = [trials[i] for i in mine]
            verdicts |= zip(mine, (_judge_greedy if greedy else _judge_sampled)(group), strict=True)
    return [verdicts[i] for i in range(len(trials))]


def draft_not_finite() -> RequestError:
    """What is raised for a drafter whose logits cannot be compared."""
    return RequestError("the drafter gave infinite or NaN logits; its checkpoint is damaged, or needs dtype float32")


def not_finite(position: int) -> RequestError:
    """What is raised for a target whose logits cannot be compared."""
    return RequestError(
        f"the model gave infinite or NaN logits at position {position}; "
        "the checkpoint is damaged, or its values need dtype float32"
    )


def _judge_greedy(trials: Sequence[Trial]) -> list[Verdict]:
    drafts, widths = _tested(trials)
    choices = _padded([trial.logits.argmax(-1) for trial in trials])
    return _verdicts(trials, *accept_greedy(choices, drafts, widths))


def _judge_sampled(trials: Sequence[Trial]) -> list[Verdict]:
    drafts, widths = _tested(trials)
    target_probs = _padded([warp(trial.logits, trial.params) for trial in trials])
    draft_probs = torch.zeros_like(target_probs)
    for row, trial in zip(draft_probs, trials, strict=True):
        if trial.drafted.probs is not None:
            tested = trial.drafted.probs[: trial.width]
            row[: len(tested)] = tested
    most, device = drafts.shape[1], drafts.device
    uniforms = torch.stack([_uniforms(t.params.seed, t.emitted, "test", most, device) for t in trials])
    last = torch.cat([_uniforms(t.params.seed, t.emitted, "last", 1, device) for t in trials])
    return _verdicts(trials, *accept_sampled(target_probs, draft_probs, drafts, widths, uniforms, last))


def _tested(trials: Sequence[Trial]) -> tuple[Tensor, Tensor]:
    """Drafts int64 [S, W] up to each width, and the widths int64 [S]."""
    device = trials[0].logits.device
    widths = [trial.width for trial in trials]
    rows = [trial.drafted.tokens[: trial.width] for trial in trials]
    drafts = [[*row, *[NOTHING] * (max(widths) - len(row))] for row in rows]
    return torch.tensor(drafts, device=device), torch.tensor(widths, device=device)


def _verdicts(trials: Sequence[Trial], accepted: Tensor, last: Tensor) -> list[Verdict]:
    return [
        Verdict([*trial.drafted.tokens[:count], *([] if token == NOTHING else [token])], count)
        for trial, count, token in zip(trials, accepted.tolist(), last.tolist(), strict=True)
    ]


def _padded(rows: Sequence[Tensor]) -> Tensor:
    """[S, W, ...] of S tensors of up to W rows, zeros behind the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _uniforms(seed: int, emitted: int, purpose: str, count: int, device: torch.device) -> Tensor:
    values = [uniform(seed, emitted, purpose, index) for index in range(count)]
    return torch.tensor(values, dtype=torch.float64, device=device)
