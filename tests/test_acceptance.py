"""Acceptance by itself: greedy prefixes, sampled distributions under any fair rule of widths, and rows that stay."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chi_squared import p_value
from outrider.kernels.warp import draw
from outrider.spec.acceptance import NOTHING, accept_greedy, accept_sampled, committed_rows

Accept = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
TOKENS, DRAFTS, RUNS = 4, 3, 200_000


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=1, max_size=5), min_size=1))
def test_greedy_is_the_longest_prefix_of_what_the_target_would_choose(batch: list[list[tuple[int, int]]]) -> None:
    most = max(map(len, batch))
    padded = [[*rows, *[(0, 0)] * (most - len(rows))] for rows in batch]  # beyond a width everything agrees
    choices, drafts = torch.tensor(padded).unbind(-1)
    accepted, last = accept_greedy(choices, drafts, torch.tensor([len(rows) for rows in batch]))
    for rows, count, token in zip(batch, accepted.tolist(), last.tolist(), strict=True):
        prefix = list(itertools.takewhile(lambda pair: pair[0] == pair[1], rows))
        assert count == len(prefix)
        assert token == (NOTHING if count == len(rows) else rows[count][0])


@pytest.mark.parametrize(
    ("accepted", "width", "emitted", "rows"),
    [(0, 4, 1, 1), (2, 4, 3, 3), (3, 4, 4, 4), (4, 4, 4, 4), (1, 1, 1, 1), (3, 4, 2, 3), (3, 4, 1, 2)],
)
def test_rows_that_stay(accepted: int, width: int, emitted: int, rows: int) -> None:
    """The anchor and accepted drafts; the last of a full width has no row; behind a stop nothing stays."""
    assert committed_rows(accepted, width, emitted) == rows


def test_the_first_certain_rejection_and_acceptance() -> None:
    target = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    draft = torch.tensor([[[0.5, 0.5], [0.0, 0.0]]])
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    last = torch.tensor([0.3], dtype=torch.float64)
    for token, accepted, then in ((1, 1, 0), (0, 0, 1)):
        got = accept_sampled(target, draft, torch.tensor([[token, NOTHING]]), torch.tensor([2]), zeros, last)
        assert [t.tolist() for t in got] == [[accepted], [then]]


def test_where_target_and_draft_agree_nothing_is_rejected_and_a_full_residual_is_never_drawn() -> None:
    probs = torch.tensor([0.25, 0.75]).expand(1, 1, 2)
    ones = torch.full((1, 1), 1 - 1e-12, dtype=torch.float64)
    accepted, last = accept_sampled(probs, probs, torch.tensor([[0]]), torch.tensor([1]), ones, ones[0])
    assert (accepted.item(), last.item()) == (1, NOTHING)


def test_a_rejection_without_a_residual_draws_from_the_target() -> None:
    draft = torch.tensor([[[0.25, 0.75]]])
    uniform = torch.full((1, 1), 0.9995, dtype=torch.float64)
    for last, token in ((0.2, 0), (0.3, 1)):
        place = torch.tensor([last], dtype=torch.float64)
        got = accept_sampled(draft * 0.999, draft, torch.tensor([[0]]), torch.tensor([1]), uniform, place)
        assert [t.tolist() for t in got] == [[0], [token]]


# --- distribution -----------------------------------------------------------------------------------------------------


def tables(kind: str) -> tuple[Tensor, Tensor]:
    """target_probs [V, V] of the next token given the last; draft_probs [DRAFTS, V, V] of d_i given the anchor."""
    random = torch.Generator().manual_seed(3)
    target = torch.rand(TOKENS, TOKENS, generator=random, dtype=torch.float64).square()
    target[0, 2] = 0  # a token that the target never gives
    target /= target.sum(-1, keepdim=True)
    draft = torch.rand(DRAFTS, TOKENS, TOKENS, generator=random, dtype=torch.float64)
    if kind == "bad":  # prefers what the target does not
        draft = (1.001 - target).pow(8).expand(DRAFTS, -1, -1).clone()
    if kind == "exact":
        draft = torch.stack([torch.linalg.matrix_power(target, i + 1) for i in range(DRAFTS)])
    return target, draft / draft.sum(-1, keepdim=True)


def all_rows(drafts: Tensor) -> Tensor:
    return torch.full((len(drafts),), DRAFTS + 1)


def cut_at_likely_tokens(drafts: Tensor) -> Tensor:
    """Row r is dropped, and all behind it, if d_r is an even token: reads d_1 .. d_r for row r."""
    kept = (drafts % 2 == 1).long().cumprod(-1).sum(-1)
    return kept + 1


def cut_after_repeats(drafts: Tensor) -> Tensor:
    """Row r stays while the drafts up to d_r are all equal."""
    return 1 + (drafts == drafts[:, :1]).long().cumprod(-1).sum(-1).clamp(min=1)


def simulate(accept: Accept, rule: Callable[[Tensor], Tensor], kind: str, runs: int = RUNS) -> float:
    """p-value of the first three tokens behind token 1, in rounds, against the target's own distribution."""
    target, draft = tables(kind)
    random = torch.Generator().manual_seed(5)
    tokens = torch.full((runs, 1 + 3 + DRAFTS + 1), NOTHING)
    tokens[:, 0] = 1
    length = torch.ones(runs, dtype=torch.int64)
    at = torch.arange(runs)
    while bool((length < 4).any()):
        anchor = tokens[at, length - 1]
        offered = draft[:, anchor].transpose(0, 1)  # [runs, DRAFTS, V]
        picks = torch.rand(runs * DRAFTS, generator=random, dtype=torch.float64)
        drafts = draw(offered.reshape(-1, TOKENS), picks).view(runs, DRAFTS)
        widths = rule(drafts)
        rows = torch.cat((anchor.unsqueeze(1), drafts), 1)
        nothing = torch.zeros(runs, 1, TOKENS, dtype=torch.float64)
        accepted, last = accept(
            target[rows],
            torch.cat((offered, nothing), 1),
            torch.cat((drafts, torch.full((runs, 1), NOTHING)), 1),
            widths,
            torch.rand(runs, DRAFTS + 1, generator=random, dtype=torch.float64),
            torch.rand(runs, generator=random, dtype=torch.float64),
        )
        active = length < 4
        for place in range(DRAFTS):
            put = active & (place < accepted)
            tokens[at[put], (length + place)[put]] = drafts[put, place]
        put = active & (last != NOTHING)
        tokens[at[put], (length + accepted)[put]] = last[put]
        length = torch.where(active, length + accepted + (last != NOTHING), length)
    joint = target[1][:, None, None] * target[:, :, None] * target[None]  # [V, V, V] of three tokens behind token 1
    cells = (tokens[:, 1] * TOKENS + tokens[:, 2]) * TOKENS + tokens[:, 3]
    return p_value(cells.bincount(minlength=TOKENS**3), joint.flatten() * runs)


@pytest.mark.parametrize("kind", ["random", "bad", "exact"])
@pytest.mark.parametrize("rule", [all_rows, cut_at_likely_tokens, cut_after_repeats])
def test_sampled_tokens_are_distributed_as_the_targets(rule: Callable[[Tensor], Tensor], kind: str) -> None:
    assert simulate(accept_sampled, rule, kind) > 0.001


def redraw_after_a_cut(
    target_probs: Tensor, draft_probs: Tensor, drafts: Tensor, widths: Tensor, uniforms: Tensor, last_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """The fault: where everything stood, the last draft tested is thrown away and its place drawn afresh."""
    accepted, last = accept_sampled(target_probs, draft_probs, drafts, widths, uniforms, last_uniforms)
    row = (widths - 1).view(-1, 1, 1).expand(-1, 1, target_probs.shape[2])
    fresh = draw(target_probs.gather(1, row).squeeze(1), last_uniforms)
    whole = last == NOTHING
    return torch.where(whole, accepted - 1, accepted), torch.where(whole, fresh, last)


def test_the_fault_of_redrawing_after_a_cut_shows() -> None:
    assert simulate(redraw_after_a_cut, cut_at_likely_tokens, "random") < 1e-9
    assert simulate(redraw_after_a_cut, all_rows, "random") > 0.001, "without a cut there is nothing to redraw"


def test_a_test_that_accepts_too_often_shows() -> None:
    def lenient(*args: Tensor) -> tuple[Tensor, Tensor]:
        return accept_sampled(*args[:4], args[4] * 0.9, args[5])

    assert simulate(lenient, all_rows, "random") < 1e-9


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_a_row_of_the_batch_does_not_know_the_others(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    probs = torch.rand(2, 6, 3, 5, generator=random, dtype=torch.float64)
    target, draft = probs / probs.sum(-1, keepdim=True)
    drafts = torch.randint(0, 5, (6, 3), generator=random)
    widths = torch.randint(1, 4, (6,), generator=random)
    uniforms = torch.rand(6, 4, generator=random, dtype=torch.float64)
    together = accept_sampled(target, draft, drafts, widths, uniforms[:, :3], uniforms[:, 3])
    for i in range(6):
        own, w = slice(i, i + 1), int(widths[i])
        alone = accept_sampled(
            target[own, :w], draft[own, :w], drafts[own, :w], widths[own], uniforms[own, :w], uniforms[own, 3]
        )
        assert [t[0] for t in alone] == [t[i] for t in together]
