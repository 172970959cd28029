"""S4: one speculative round as an API, its scenarios and numbers; what a round may not do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle_drafter import install_oracle
from outrider import SamplingParams
from outrider.config import EngineOptions, parse_slots
from outrider.core import ExpertKey
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.errors import CheckpointError, OutriderError, RequestError
from outrider.kvcache.pages import PAGE_SIZE
from outrider.spec.observation import Observation, nbytes_of, union_of
from pairs import drafted, finish, greedy, ids, make_pair, open_pair
from tiny_draft import Sizes, tiny_draft

TOKENS = 24


@pytest.fixture(scope="module", params=["gpt_oss-mxfp4", "qwen3_moe-window"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("pair")
    make_pair(path, request.param)
    return path


@pytest.fixture
def engine(pair: Path) -> Iterator[Engine]:
    engine = open_pair(pair, "50%")
    yield engine
    engine.close()


@pytest.fixture
def prompt(engine: Engine) -> list[int]:
    return ids(0, 19, engine.config.vocab_size)


def generate(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    session = engine.submit(prompt, params)
    while engine.step():
        pass
    return session.output


def test_the_collector_unites_routes_and_sums_exact_bytes() -> None:
    seen = Observation(())
    seen.routed(0, torch.tensor([[1, 3], [3, 3]]))
    seen.routed(4, torch.tensor([[2], [2]]))
    union = union_of(seen.routes(), range(2))
    assert union == {(0, 1), (0, 3), (4, 2)}
    sizes = {ExpertKey(0, 1): 100, ExpertKey(0, 3): 250, ExpertKey(4, 2): 400}
    assert nbytes_of(union, sizes) == 750
    assert union_of(seen.routes(), range(1, 2)) == {(0, 3), (4, 2)}
    with pytest.raises(ValueError, match="layer 4 has no expert 2"):
        nbytes_of(union, {key: size for key, size in sizes.items() if key != (4, 2)})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_gives_what_generate_gives(engine: Engine, prompt: list[int], temperature: float) -> None:
    params = greedy(TOKENS, temperature=temperature, top_p=0.95, seed=3)
    expected = generate(engine, prompt, params)
    session = engine.begin_session(prompt, params)
    assert session.emitted == expected[:1] and session.anchor == expected[0]
    emitted = list(session.emitted)
    while not session.finished:
        engine.draft_round([session])
        (result,) = engine.verify_round([session])
        emitted += result.accepted_ids
        assert session.emitted == emitted and result.finished == session.finished
        assert session.finished or session.table.length == len(prompt) + len(emitted) - 1
    assert emitted == expected and session.finish_reason is not None and session.finish_reason.value == "length"
    assert engine.stats().kv_occupancy_bytes == 0


def test_an_anchor_that_stops_finishes_the_session_at_once(engine: Engine, prompt: list[int]) -> None:
    (first, *_) = generate(engine, prompt, greedy(4))
    session = engine.begin_session(prompt, greedy(9), stop_ids=[first])
    assert session.finished and session.output == [first] and session.finish_reason is not None
    assert session.finish_reason.value == "stop" and engine.stats().kv_occupancy_bytes == 0


def test_one_token_takes_no_round(engine: Engine, prompt: list[int]) -> None:
    engine.reset_counters()
    session = engine.begin_session(prompt, greedy(1))
    assert session.finished and len(session.output) == 1 and engine.stats().rounds == 0
    with pytest.raises(RuntimeError, match="finished"):
        engine.draft_round([session])


def test_wrong_order_is_an_error_and_harms_nobody(engine: Engine, prompt: list[int]) -> None:
    expected = generate(engine, prompt, greedy(TOKENS))
    session = engine.begin_session(prompt, greedy(TOKENS))
    with pytest.raises(RuntimeError, match="call draft_round first"):
        engine.verify_round([session])
    engine.draft_round([session])
    with pytest.raises(RuntimeError, match="waits for its verify"):
        engine.draft_round([session])
    for wrong in ([0], [9], [2, 2]):
        with pytest.raises(ValueError):
            engine.verify_round([session], wrong)
    for call in (engine.draft_round, engine.verify_round):
        with pytest.raises(RuntimeError, match="twice"):
            call([session, session])
    queued = engine.submit(prompt, greedy(4))
    with pytest.raises(RuntimeError, match="not prefilled"):
        engine.draft_round([queued])
    engine.cancel(queued)
    engine.verify_round([session])
    finish(engine, [session])
    assert session.output == expected
    for finished_call in (engine.draft_round, engine.verify_round):
        with pytest.raises(RuntimeError, match="is finished"):
            finished_call([session])


def test_the_projection_is_the_last_union_with_its_exact_bytes(engine: Engine, prompt: list[int]) -> None:
    session = engine.begin_session(prompt, greedy(TOKENS))
    (draft,) = engine.draft_round([session])
    assert (draft.expert_union, draft.expert_bytes, draft.projection) == (frozenset(), 0, "none")
    (result,) = engine.verify_round([session])
    layers = engine.config.moe_layers
    assert {key.layer for key in result.expert_union} == set(layers)
    assert len(result.expert_union) >= len(layers) * engine.config.experts_per_token
    (draft,) = engine.draft_round([session])
    assert draft.expert_union == result.expert_union and draft.projection == "previous-round"
    assert draft.expert_bytes == sum(engine.provider.expert_nbytes[key] for key in result.expert_union)
    engine.cancel(session)


def test_a_union_is_what_the_rows_of_its_own_session_went_to(engine: Engine, prompt: list[int]) -> None:
    """Two sessions in one verify have the unions that each has alone, and the provider saw their sum."""
    alone = []
    for length in (19, 7):
        session = engine.begin_session(prompt[:length], greedy(TOKENS))
        engine.draft_round([session])
        alone += [result.expert_union for result in engine.verify_round([session], [3])]
        engine.cancel(session)
    both = [engine.begin_session(prompt[:length], greedy(TOKENS)) for length in (19, 7)]
    engine.draft_round(both)
    engine.reset_counters()
    together = [result.expert_union for result in engine.verify_round(both, [3, 3])]
    assert together == alone and engine.stats().expert_accesses == len(together[0] | together[1])
    for session in both:
        engine.cancel(session)


def test_a_draft_touches_neither_cache_nor_counters(engine: Engine, prompt: list[int]) -> None:
    session = engine.begin_session(prompt, greedy(TOKENS))
    engine.draft_round([session])
    engine.verify_round([session])
    resident, before = engine.provider.resident_keys(), engine.provider.snapshot()
    engine.draft_round([session])
    assert engine.provider.resident_keys() == resident and engine.provider.snapshot() == before
    engine.cancel(session)


def test_accepted_drafts_and_the_token_behind_them(engine: Engine, prompt: list[int]) -> None:
    """Widths cut what is tested: with w rows d_1 .. d_w are, and the last of them has no row of its own."""
    expected = generate(engine, prompt, greedy(TOKENS))
    oracle = install_oracle(engine, 0.0)
    session = engine.begin_session(prompt, greedy(TOKENS))
    oracle.know(session, expected)
    engine.reset_counters()
    for width, accepted, committed in ((8, 7, 8), (3, 3, 3), (1, 1, 1), (8, 7, 8)):
        start = session.table.length
        engine.draft_round([session])
        (result,) = engine.verify_round([session], [width])
        assert (result.num_accepted, result.committed) == (accepted, committed)
        assert len(result.accepted_ids) == committed == session.table.length - start
    stats = engine.stats()
    assert session.output == expected[:21]
    engine.cancel(session)
    assert (stats.tested_drafts, stats.accepted_drafts) == (18, 18)
    assert stats.acceptance_by_position == [1.0] * 7


def test_a_stop_token_inside_a_block_ends_it_there(engine: Engine, prompt: list[int]) -> None:
    expected = generate(engine, prompt, greedy(TOKENS))
    stop_at = next(i for i in range(2, TOKENS) if expected[i] not in expected[:i])
    oracle = install_oracle(engine, 0.0)
    session = engine.begin_session(prompt, greedy(TOKENS, stop_token_ids=(expected[stop_at],)))
    oracle.know(session, expected)
    finish(engine, [session])
    assert session.output == expected[: stop_at + 1] and session.finish_reason is not None
    assert session.finish_reason.value == "stop"


@pytest.mark.parametrize("tokens", [2, 3, 8, 9, 10])
def test_a_length_limit_inside_a_block_ends_it_there(pair: Path, tokens: int) -> None:
    """No row is run, and no page taken, beyond the last token: the pool holds exactly the request."""
    pages = -(-(PAGE_SIZE + tokens - 1) // PAGE_SIZE)
    engine = open_pair(pair, max_context=2 * PAGE_SIZE, kv_tokens=pages * PAGE_SIZE)
    prompt = ids(1, PAGE_SIZE, engine.config.vocab_size)
    expected = generate(engine, prompt, greedy(tokens))
    oracle = install_oracle(engine, 0.0)
    session = engine.begin_session(prompt, greedy(tokens))
    oracle.know(session, [*expected, 1, 2, 3, 4, 5, 6, 7, 8])
    finish(engine, [session])
    assert session.output == expected and len(expected) == tokens
    engine.close()


def test_pages_of_a_session_are_kept_for_it(pair: Path) -> None:
    """Requests that wait, and other sessions, cannot take them; a session that is refused takes none."""
    engine = open_pair(pair, max_context=32, kv_tokens=64)
    first = engine.begin_session(ids(0, 20, 200), greedy(12))
    waiting = engine.submit(ids(1, 30, 200), greedy(2))
    second = engine.begin_session(ids(2, 16, 200), greedy(12))
    with pytest.raises(RequestError, match="KV pages"):
        engine.begin_session(ids(3, 3, 200), greedy(2))
    assert engine.step() is None, "there is no page for the one that waits"
    finish(engine, [second])
    while engine.step():
        pass
    finish(engine, [first])
    assert [len(s.output) for s in (first, second, waiting)] == [12, 12, 2]
    assert engine.stats().kv_occupancy_bytes == 0
    engine.close()


def test_a_verify_that_fails_can_be_made_again(
    engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the target, or in the drafter's context after it, leaves the session and its block as they were."""
    expected = generate(engine, prompt, greedy(TOKENS))
    session = engine.begin_session(prompt, greedy(TOKENS))
    oracle = install_oracle(engine, 0.3)
    oracle.know(session, expected)
    failures = 0
    while not session.finished:
        engine.draft_round([session])
        before = (list(session.output), session.table.length, drafted(session))
        for owner, name in ((engine.provider, "resolve"), (oracle, "extend")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, _fail)
                with pytest.raises(OSError, match="gone"):
                    engine.verify_round([session])
            failures += 1
            assert (session.output, session.table.length, drafted(session)) == before
        engine.verify_round([session])
    assert failures > 4 and session.output == expected


def test_a_step_whose_verify_failed_does_not_draft_again(
    engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(engine, prompt, greedy(TOKENS))
    session = engine.submit(prompt, greedy(TOKENS))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.provider, "resolve", _fail)
        with pytest.raises(OSError, match="gone"):
            engine.step()
    before = engine.stats().drafted_tokens
    engine.step()
    assert engine.stats().drafted_tokens == before
    while engine.step():
        pass
    assert session.output == expected


def _fail(*_: Any) -> Any:
    raise OSError("the disk is gone")


def test_rounds_without_a_drafter_are_plain_decoding(pair: Path) -> None:
    engine = open_pair(pair, "50%", speculate=False)
    prompt = ids(0, 19, engine.config.vocab_size)
    expected = generate(engine, prompt, greedy(TOKENS))
    session = engine.begin_session(prompt, greedy(TOKENS))
    (draft,) = engine.draft_round([session])
    assert draft.tokens == () and draft.token_probs == ()
    engine.verify_round([session], [1])
    finish(engine, [session])
    stats = engine.stats()
    assert session.output == expected
    assert stats.mean_acceptance_length == 1.0 and stats.acceptance_by_position is None
    assert stats.draft_seconds is None and stats.drafted_tokens == 0
    engine.close()


def test_the_draft_says_how_likely_its_tokens_are(engine: Engine, prompt: list[int]) -> None:
    for params in (greedy(9), greedy(9, temperature=0.7, top_k=5)):
        session = engine.begin_session(prompt, params)
        (draft,) = engine.draft_round([session])
        assert engine.rounds.drafter is not None
        logits = engine.rounds.drafter.propose([session.anchor], [session.table])[0]
        temperature = params.temperature or 1.0
        kept = logits if not params.top_k else logits.masked_fill(logits < logits.topk(5).values[:, -1:], -torch.inf)
        wanted = (kept / temperature).softmax(-1)[range(7), list(draft.tokens)]
        torch.testing.assert_close(torch.tensor(draft.token_probs), wanted)
        assert len(draft.tokens) == 7 and all(0 < p <= 1 for p in draft.token_probs)
        engine.cancel(session)


def test_route_ahead_statistics_change_nothing_but_themselves(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draft's projection is prefetched by hand, with S3 recorded and without: same tokens, same prefetch calls."""
    runs = []
    for recorded in (True, False):
        engine = open_pair(pair, "50%", route_ahead_stats=recorded, probe_copies=False)
        calls: list[Any] = []
        real = engine.provider.prefetch
        monkeypatch.setattr(engine.provider, "prefetch", lambda k, p, c=calls, r=real: (c.append((k, p)), r(k, p))[1])
        session = engine.begin_session(ids(0, 19, engine.config.vocab_size), greedy(TOKENS))
        predicted = 0
        while not session.finished:
            (draft,) = engine.draft_round([session])
            predicted += engine.prefetch(sorted(draft.expert_union))
            engine.verify_round([session])
        runs.append((session.output, calls))
        stats = engine.stats()
        assert (stats.route_ahead is not None) == recorded
        if stats.route_ahead:
            seen = stats.route_ahead
            assert seen.steps == stats.rounds and seen.layers_observed == stats.rounds * len(engine.config.moe_layers)
            assert seen.predicted == predicted == seen.kept + seen.wasted and 0 < seen.covered < seen.actual
            assert seen.actual == stats.expert_accesses and seen.coverage == seen.covered / seen.actual
            (size,) = set(engine.provider.expert_nbytes.values())
            assert seen.route_ahead_wasted_bytes == seen.wasted * size
            engine.reset_counters()
            assert engine.stats().route_ahead.steps == 0  # type: ignore[union-attr]
        engine.close()
    assert runs[0] == runs[1]


def test_occupancy_counts_the_context_of_the_drafter(engine: Engine, prompt: list[int]) -> None:
    session = engine.begin_session(prompt, greedy(4))
    drafter = engine.rounds.drafter
    assert drafter is not None and engine.stats().kv_occupancy_bytes == 2 * (
        engine.kv.page_nbytes + drafter.context.page_nbytes
    )
    engine.cancel(session)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 9}, "width is 9, but a block of this draft has 8 rows"),
        ({"width": 0}, "width is 0"),
        ({"width": "wide"}, "width is 'wide'"),
        ({"width": 4, "draft": None}, "there is no draft"),
        ({"draft": "/nowhere"}, "/nowhere"),
    ],
)
def test_settings_that_cannot_work_are_refused(pair: Path, options: dict[str, Any], message: str) -> None:
    settings = {"draft": str(pair / "draft")} | options
    with pytest.raises(OutriderError, match=message):
        build_engine(str(pair / "target"), EngineOptions(parse_slots("50%"), **settings))


def test_width_off_ignores_the_draft(pair: Path) -> None:
    engine = open_pair(pair, width="off")
    assert engine.rounds.drafter is None
    engine.close()


def test_a_draft_of_another_target_is_refused(pair: Path, tmp_path: Path) -> None:
    tiny_draft(tmp_path, Sizes(num_layers=9))
    with pytest.raises(CheckpointError, match="num_target_layers is 9, but the target has 3"):
        open_pair(pair, draft=str(tmp_path))


def test_nan_from_the_drafter_is_an_error(engine: Engine, prompt: list[int]) -> None:
    session = engine.begin_session(prompt, greedy(9))
    assert engine.rounds.drafter is not None
    engine.rounds.drafter._head = engine.rounds.drafter._head * float("nan")
    with pytest.raises(RequestError, match="drafter gave infinite or NaN"):
        engine.draft_round([session])
    engine.cancel(session)
