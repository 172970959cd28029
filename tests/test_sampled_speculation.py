"""Sampled speculation gives the target's own distribution: the first three tokens of an engine over 20,000 seeds.

The expectation is exact: the engine's own logits of every prefix under the same warp. Six tokens make 216 cells.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chi_squared import p_value
from outrider import SamplingParams
from outrider.checkpoint.hf_config import read_config
from outrider.config import EngineOptions
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.kernels.warp import warp
from outrider.spec import sampling
from outrider.spec.drafter import Drafter
from outrider.spec.session import SpecSession
from pairs import drafted
from parity import our_logits
from test_acceptance import redraw_after_a_cut
from tiny import tiny_gpt_oss
from tiny_draft import tiny_draft

VOCAB, SEEDS, PROMPT = 6, 20_000, [3, 1, 4]
Rule = Callable[[SpecSession], int]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """One layer of target and draft, of which the draft agrees with the target now and then."""
    path: Path = tmp_path_factory.mktemp("pair")
    target = path / "target"
    tiny_gpt_oss(target, mxfp4=True, layers=1, vocab_size=VOCAB, eos_token_id=VOCAB - 1, experts=3)
    tiny_draft(path / "draft", read_config(target), layers=1, block=4, taps=(0,), mask=VOCAB - 1)
    return build_engine(str(target), EngineOptions(draft=str(path / "draft"), max_context=16, kv_tokens=512 * 16))


def params(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=5, temperature=1.3, top_k=5, top_p=0.97, seed=seed, ignore_eos=True)


def exact(engine: Engine) -> Tensor:
    """Probabilities [VOCAB ** 3] of the first three tokens under plain sampling."""
    joint = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for a, b in itertools.product(range(VOCAB), repeat=2):
        rows = warp(our_logits(engine, [*PROMPT, a, b])[-3:], params(0)).double()
        joint[a, b] = rows[0, a] * rows[1, b] * rows[2]
    return joint.flatten()


def counts(engine: Engine, rule: Rule | None, seeds: range, batch: int) -> Tensor:
    """How often each triple came first, `batch` sessions a round."""
    cells = torch.zeros(VOCAB**3, dtype=torch.int64)
    for start in range(seeds.start, seeds.stop, batch):
        sessions = [engine.begin_session(PROMPT, params(s)) for s in range(start, min(start + batch, seeds.stop))]
        running = sessions
        while running := [s for s in running if len(s.output) < 3]:
            engine.draft_round(running)
            engine.verify_round(running, None if rule is None else [rule(s) for s in running])
        for session in sessions:
            a, b, c = session.output[:3]
            cells[(a * VOCAB + b) * VOCAB + c] += 1
            engine.cancel(session)
    return cells


def cut_at_even_drafts(session: SpecSession) -> int:
    """Row r stays while d_1 .. d_r are odd: it reads d_r for row r, as a rule may."""
    odd = list(itertools.takewhile(lambda token: token % 2 == 1, drafted(session)))
    return 1 + len(odd)


class BadDrafter(Drafter):
    """Prefers, at every place, one token that depends on the anchor, whatever the target thinks."""

    def __init__(self, real: Drafter) -> None:
        self.config, self.context, self.extend = real.config, real.context, real.extend  # type: ignore[method-assign]

    def propose(self, anchors: Any, tables: Any) -> Tensor:
        logits = torch.zeros(len(anchors), self.config.num_drafts, VOCAB)
        logits[torch.arange(len(anchors)), :, torch.tensor(anchors) * 5 % VOCAB] = 3.0
        return logits


@pytest.mark.parametrize(
    ("rule", "bad", "batch"),
    [(None, False, 500), (cut_at_even_drafts, False, 500), (cut_at_even_drafts, True, 500), (None, True, 1)],
    ids=["whole-blocks", "cut", "cut-bad-draft", "bad-draft-one-by-one"],
)
def test_the_first_three_tokens_are_distributed_as_in_plain_sampling(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, rule: Rule | None, bad: bool, batch: int
) -> None:
    assert engine.rounds.drafter is not None
    if bad:
        monkeypatch.setattr(engine.rounds, "drafter", BadDrafter(engine.rounds.drafter))
    engine.reset_counters()
    assert p_value(counts(engine, rule, range(SEEDS), batch), exact(engine) * SEEDS) > 0.001
    stats = engine.stats()
    assert stats.accepted_drafts > 1000 and stats.tested_drafts - stats.accepted_drafts > 1000


def test_plain_sampling_passes_the_same_test(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.rounds, "drafter", None)
    monkeypatch.setattr(engine.rounds, "_taps", ())
    assert p_value(counts(engine, None, range(SEEDS), 500), exact(engine) * SEEDS) > 0.001


def test_a_redraw_after_a_cut_fails_the_test(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "accept_sampled", redraw_after_a_cut)
    assert p_value(counts(engine, cut_at_even_drafts, range(4000), 500), exact(engine) * 4000) < 1e-6
