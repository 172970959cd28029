"""What a round tells others (expert cache, S3, counters), and what cancelling, stopping and failing leave behind."""

import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle_drafter import install_oracle
from outrider import LLM
from outrider.config import SamplingParams
from outrider.core import Band, ExpertKey
from outrider.engine.engine import Engine
from outrider.errors import CheckpointError, RequestError
from outrider.kvcache.pages import PAGE_SIZE, PagePool, PageTable
from outrider.scheduler.sequence import FinishReason
from outrider.spec import sampling
from pairs import finish, greedy, ids, make_pair, open_pair

TOKENS = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("pair")
    make_pair(path, "gpt_oss-mxfp4")
    return path


@pytest.fixture
def engine(pair: Path) -> Iterator[Engine]:
    engine = open_pair(pair, "50%", route_ahead_stats=True, probe_copies=False)
    yield engine
    engine.close()


@pytest.fixture
def prompts(engine: Engine) -> list[list[int]]:
    return [ids(seed, 17 + seed, engine.config.vocab_size) for seed in range(3)]


def plain(engine: Engine, prompts: list[list[int]], tokens: int = TOKENS) -> list[list[int]]:
    sessions = [engine.submit(prompt, greedy(tokens)) for prompt in prompts]
    while engine.step():
        pass
    return [session.output for session in sessions]


# --- what others are told -------------------------------------------------------------------------------------------


def test_cache_and_s3_are_told_of_the_kept_rows_of_every_session(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a batch lie one session behind the other; anchor and accepted drafts of each are kept."""
    texts = plain(engine, prompts)
    oracle = install_oracle(engine, 0.35, seed=3)
    sessions = [engine.begin_session(prompt, greedy(TOKENS)) for prompt in prompts]
    for session, text in zip(sessions, texts, strict=True):
        oracle.know(session, text)
    told: dict[str, list[list[int]]] = {"cache": [], "s3": []}
    sink = engine.rounds._sink
    assert sink is not None
    for name, owner in (("cache", engine.provider), ("s3", sink)):
        commit = owner.commit
        monkeypatch.setattr(owner, "commit", lambda rows, n=name, c=commit: (told[n].append(list(rows)), c(rows)))
    expected, uneven = [], False
    while running := [s for s in sessions if not s.finished]:
        engine.draft_round(running)
        widths = [min(8, s.remaining) for s in running]
        results = engine.verify_round(running)
        starts = np.cumsum([0, *widths[:-1]]).tolist()
        expected.append([start + i for start, r in zip(starts, results, strict=True) for i in range(r.committed)])
        uneven |= len({r.committed for r in results}) > 1
    assert told["cache"] == told["s3"] == expected and uneven
    assert [s.output for s in sessions] == texts


def test_a_projection_is_the_union_of_the_last_verify_alone(engine: Engine, prompts: list[list[int]]) -> None:
    session = engine.begin_session(prompts[0], greedy(TOKENS))
    unions = []
    while not session.finished:
        (draft,) = engine.draft_round([session])
        assert draft.expert_union == (unions[-1] if unions else frozenset())
        (result,) = engine.verify_round([session])
        unions.append(result.expert_union)
    assert len(unions) > 3 and any(not earlier <= later for earlier, later in pairwise(unions))


def test_s3_counts_what_was_prefetched_and_not_what_was_asked_for(engine: Engine, prompts: list[list[int]]) -> None:
    session = engine.begin_session(prompts[0], greedy(TOKENS))
    engine.draft_round([session])
    keys = [ExpertKey(layer, expert) for layer in engine.config.moe_layers for expert in range(8)]
    queued = engine.prefetch(keys)
    assert 0 < queued < len(keys)
    engine.verify_round([session])
    stats = engine.stats()
    assert stats.route_ahead is not None and stats.route_ahead.predicted == queued
    (size,) = set(engine.provider.expert_nbytes.values())
    assert stats.route_ahead.route_ahead_predicted_bytes == queued * size


def test_what_was_predicted_for_a_verify_that_failed_counts_for_its_retry(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = engine.begin_session(prompts[0], greedy(TOKENS))
    engine.draft_round([session])
    keys = [ExpertKey(layer, expert) for layer in engine.config.moe_layers for expert in range(8)]
    queued = engine.prefetch(keys[:12])
    with monkeypatch.context() as patch:
        patch.setattr(engine.provider, "resolve", _fail)
        with pytest.raises(OSError, match="gone"):
            engine.verify_round([session])
    engine.provider.reset_cache()
    queued += engine.prefetch(keys[12:14])
    engine.verify_round([session])
    seen = engine.stats().route_ahead
    assert seen is not None and seen.predicted == queued > 2 and seen.steps == 1


def test_a_refused_prefetch_leaves_nothing_behind(engine: Engine, prompts: list[list[int]]) -> None:
    expected = plain(engine, prompts)
    engine.reset_cache()
    with pytest.raises(ValueError, match=r"there is no expert \(99, 0\)"):
        engine.prefetch([ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(99, 0)], Band.ON_DEMAND)
    assert plain(engine, prompts) == expected


# --- counters ---------------------------------------------------------------------------------------------------------


def test_a_stop_inside_a_block_counts_the_drafts_up_to_it(engine: Engine, prompts: list[list[int]]) -> None:
    (text,) = plain(engine, prompts[:1])
    stop_at = next(i for i in range(2, 8) if text[i] not in text[:i])
    oracle = install_oracle(engine, 0.0)
    session = engine.begin_session(prompts[0], greedy(TOKENS, stop_token_ids=(text[stop_at],)))
    oracle.know(session, text)
    engine.reset_counters()
    engine.draft_round([session])
    (result,) = engine.verify_round([session])
    stats = engine.stats()
    assert result.finished and result.accepted_ids == tuple(text[1 : stop_at + 1]) and result.num_accepted == stop_at
    assert stats.tested_drafts == stats.accepted_drafts == stop_at
    assert stats.acceptance_by_position == [1.0] * stop_at
    assert 0 < stats.draft_seconds < stats.decode_seconds  # type: ignore[operator]


def test_a_stop_that_is_also_the_last_token_is_a_stop(engine: Engine, prompts: list[list[int]]) -> None:
    (text,) = plain(engine, prompts[:1])
    last = next(i for i in range(2, TOKENS) if text[i] not in text[:i])
    session = engine.begin_session(prompts[0], greedy(last + 1, stop_token_ids=(text[last],)))
    finish(engine, [session])
    assert session.finish_reason is FinishReason.STOP and session.output == text[: last + 1]


def test_a_prompt_in_chunks_gives_one_first_token(pair: Path) -> None:
    engine = open_pair(pair, prefill_chunk=16)
    plain(engine, [ids(0, 50, 200)], 5)
    stats = engine.stats()
    assert (stats.prefill_steps, stats.tokens_generated, stats.decode_tokens) == (4, 5, 4)
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_random_number_is_used_twice(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    used: list[tuple[Any, ...]] = []
    uniform = sampling.uniform
    monkeypatch.setattr(sampling, "uniform", lambda *place: (used.append(place), uniform(*place))[1])
    session = engine.begin_session(prompts[0], greedy(TOKENS, temperature=temperature))
    finish(engine, [session])
    assert len(used) == len(set(used)) and bool(used) == (temperature > 0)


# --- what is left behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafted", [False, True])
def test_a_cancelled_session_cannot_be_driven_on(engine: Engine, prompts: list[list[int]], drafted: bool) -> None:
    session = engine.begin_session(prompts[0], greedy(TOKENS))
    if drafted:
        engine.draft_round([session])
    engine.cancel(session)
    assert session.finish_reason is FinishReason.ABORT and engine.kv.pool.num_used == 0
    for call in (engine.draft_round, engine.verify_round):
        with pytest.raises(RuntimeError, match="is finished"):
            call([session])
    assert engine.kv.pool.num_used == 0


def test_a_session_whose_prefill_fails_keeps_no_page(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.rounds.drafter, "extend", _fail)
        with pytest.raises(OSError, match="gone"):
            engine.begin_session(prompts[0], greedy(TOKENS))
    assert engine.kv.pool.num_used == 0 and engine.scheduler._reserved() == 0


def test_generate_says_so_if_hand_driven_sessions_hold_the_pages(pair: Path) -> None:
    with LLM(str(pair / "target"), max_context=32, kv_tokens=32) as llm:
        held = llm.engine.begin_session(ids(0, 10, 200), greedy(20))
        for call in (lambda: llm.generate([[1, 2, 3]], greedy(8)), lambda: list(llm.stream([1, 2, 3], greedy(8)))):
            with pytest.raises(RequestError, match="begun by hand hold the KV pages"):
                call()
        finish(llm.engine, [held])
        assert len(llm.generate([[1, 2, 3]], greedy(8))[0].token_ids) == 8


def test_an_interrupt_waits_for_the_end_of_a_round(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(engine, prompts)
    monkeypatch.setattr(signal, "default_int_handler", signal.default_int_handler)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        session = engine.begin_session(prompts[0], greedy(TOKENS))
        for name in ("draft_round", "verify_round"):
            real = getattr(engine.rounds, name)

            def interrupted(*args: Any, real: Any = real) -> Any:
                os.kill(os.getpid(), signal.SIGINT)
                return real(*args)

            with monkeypatch.context() as patch:
                patch.setattr(engine.rounds, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    getattr(engine, name)([session])
            assert (session.draft is not None) == (name == "draft_round")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(session.output) > 1
    finish(engine, [session])
    assert session.output == expected[0]


@pytest.mark.parametrize("row", [0, 2])
def test_logits_that_are_not_finite_are_an_error_in_any_row(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    session = engine.begin_session(prompts[0], greedy(TOKENS))
    engine.draft_round([session])
    real = engine.decoder.logits

    def damaged(hidden: torch.Tensor) -> torch.Tensor:
        logits = real(hidden).clone()
        logits[row, 5] = torch.nan
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "logits", damaged)
        with pytest.raises(RequestError, match=f"NaN logits at position {len(prompts[0])};"):
            engine.verify_round([session])
    engine.verify_round([session])
    finish(engine, [session])
    assert session.output == plain(engine, prompts[:1])[0]


def test_no_sessions_are_no_work(engine: Engine) -> None:
    assert engine.draft_round([]) == [] and engine.verify_round([]) == []
    with pytest.raises(ValueError, match="1 widths were given for 2 sessions"):
        sessions = [engine.begin_session(ids(i, 5, 200), greedy(4)) for i in range(2)]
        engine.draft_round(sessions)
        engine.verify_round(sessions, [1])


# --- pages and limits -------------------------------------------------------------------------------------------------


def test_pages_go_out_last_in_first_out_and_are_never_given_twice() -> None:
    pool = PagePool(6)
    first, second = PageTable(pool), PageTable(pool)
    first.append(3 * PAGE_SIZE)
    pages = list(first.pages)
    first.truncate(PAGE_SIZE)
    second.append(2 * PAGE_SIZE)
    assert second.pages == pages[1:] and first.pages == pages[:1]
    for length in (-1, PAGE_SIZE + 1):
        with pytest.raises(ValueError, match="cannot truncate a table of 16 tokens"):
            first.truncate(length)

    class Interrupting(PagePool):
        def give(self, pages: list[int]) -> None:
            raise KeyboardInterrupt

    table = PageTable(Interrupting(2))
    table.append(20)
    with pytest.raises(KeyboardInterrupt):
        table.release()
    assert table.pages == [] and table.length == 0


@pytest.mark.parametrize("tokens", [PAGE_SIZE, PAGE_SIZE + 1, PAGE_SIZE + 2, 2 * PAGE_SIZE + 1])
def test_a_pool_of_exactly_the_requests_pages_is_enough_at_every_page_edge(pair: Path, tokens: int) -> None:
    prompt = ids(1, 9, 200)
    pages = -(-(len(prompt) + tokens - 1) // PAGE_SIZE)
    engine = open_pair(pair, max_context=64, kv_tokens=pages * PAGE_SIZE)
    oracle = install_oracle(engine, 0.2)
    session = engine.begin_session(prompt, greedy(tokens))
    oracle.know(session, [5] * 99)
    finish(engine, [session])
    assert len(session.output) == tokens and engine.kv.pool.num_used == 0
    engine.close()


def test_the_context_is_full_to_the_last_token(pair: Path) -> None:
    engine = open_pair(pair, max_context=32)
    assert len(plain(engine, [ids(0, 20, 200)], 12)[0]) == 12
    with pytest.raises(RequestError, match="the context holds 32"):
        engine.submit(ids(0, 20, 200), greedy(13))
    assert engine.check(np.array([1, 2, 3]), SamplingParams(1)) == [1, 2, 3]  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="is no token id"):
        engine.check(["a"], SamplingParams(1))  # type: ignore[list-item]
    engine.close()


def test_sessions_by_hand_do_not_count_against_the_batch(pair: Path) -> None:
    engine = open_pair(pair, max_batch=1)
    session = engine.begin_session(ids(0, 9, 200), greedy(6))
    assert len(plain(engine, [ids(1, 9, 200)], 6)[0]) == 6
    finish(engine, [session])
    engine.close()


def test_a_draft_with_another_models_embedding_is_refused_at_the_start(pair: Path, tmp_path: Path) -> None:
    make_pair(tmp_path, "gpt_oss-mxfp4", style="speculators")
    file = tmp_path / "draft" / "model.safetensors"
    stored = load_file(tmp_path / "target" / "model.safetensors")
    tensors = load_file(file) | {"embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
    save_file(tensors, file)
    open_pair(tmp_path).close()
    tensors["embed_tokens.weight"][0] += 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"'embed_tokens.weight' differs from the target's"):
        open_pair(tmp_path)


def _fail(*args: object, **keywords: object) -> None:
    raise OSError("gone")
