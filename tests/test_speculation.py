"""Speculation never changes a token: both families, windows shorter than the text, any width, residency and batch."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oracle_drafter import install_oracle
from outrider import SamplingParams
from outrider.checkpoint.hf_config import read_config
from outrider.engine.engine import Engine
from pairs import assert_same, finish, greedy, ids, make_pair, open_pair
from tiny import tiny_gpt_oss, tiny_qwen3_moe
from tiny_draft import tiny_draft

TOKENS = 64
LENGTHS = (5, 21, 40)
SAMPLED = SamplingParams(max_tokens=TOKENS, temperature=1.0, top_k=20, top_p=0.9, seed=5, ignore_eos=True)
PAIRS = ["gpt_oss-mxfp4", "gpt_oss-bf16-tied-sharded", "qwen3_moe", "qwen3_moe-window"]


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("pair")
    make_pair(path, request.param)
    return path


@pytest.fixture(scope="module")
def plain(pair: Path) -> Iterator[tuple[Engine, list[list[int]], list[list[int]]]]:
    """A plain engine, prompts, and what it makes of them through `step`."""
    engine = open_pair(pair, speculate=False)
    prompts = [ids(seed, length, engine.config.vocab_size) for seed, length in enumerate(LENGTHS)]
    sessions = [engine.submit(prompt, greedy(TOKENS)) for prompt in prompts]
    while engine.step():
        pass
    yield engine, prompts, [s.output for s in sessions]
    engine.close()


@pytest.mark.parametrize("slots", ["100%", "50%", "25%"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_greedy_tokens_are_those_of_plain_decoding(
    pair: Path, plain: tuple[Engine, list[list[int]], list[list[int]]], slots: str, width: int
) -> None:
    """With the drafter as it is (hardly ever right) and with one that errs now and then; a batch, through `step`."""
    reference, prompts, expected = plain
    engine = open_pair(pair, slots, width=width)
    for error in (None, 0.15):
        oracle = None if error is None else install_oracle(engine, error, seed=width)
        engine.reset_counters()
        sessions = [engine.submit(prompt, greedy(TOKENS)) for prompt in prompts]
        if oracle:
            for session, output in zip(sessions, expected, strict=True):
                oracle.know(session, output)
        while engine.step():
            pass
        for prompt, want, session in zip(prompts, expected, sessions, strict=True):
            assert_same(reference, prompt, want, session.output, f"width {width}, {slots}, error {error}")
        stats = engine.stats()
        assert stats.decode_tokens == len(LENGTHS) * (TOKENS - 1) and stats.kv_occupancy_bytes == 0
        if oracle and width > 1:
            assert stats.mean_acceptance_length is not None and 1.5 < stats.mean_acceptance_length < width
            assert stats.decode_steps < TOKENS - 1
    engine.close()


def test_ragged_widths_and_acceptance_in_one_batch(
    pair: Path, plain: tuple[Engine, list[list[int]], list[list[int]]]
) -> None:
    """Every session gets another width each round, joins late, and accepts another number of drafts."""
    reference, prompts, expected = plain
    engine = open_pair(pair, "38%")
    oracle, rng = install_oracle(engine, 0.2), random.Random(1)
    sessions, accepted, committed = [], set(), set()
    for prompt, output in zip(prompts, expected, strict=True):
        sessions.append(engine.begin_session(prompt, greedy(TOKENS)))
        oracle.know(sessions[-1], output)
        for _ in range(3):
            engine.draft_round(sessions)
            for result in engine.verify_round(sessions, [rng.randint(1, 8) for _ in sessions]):
                accepted.add(result.num_accepted)
                committed.add(result.committed)
    outputs = finish(engine, sessions, lambda _: rng.randint(1, 8))
    for prompt, want, got in zip(prompts, expected, outputs, strict=True):
        assert_same(reference, prompt, want, got, "ragged")
    assert len(accepted) > 3 and len(committed) > 3
    engine.close()


def test_greedy_and_sampled_requests_mix(pair: Path, plain: tuple[Engine, list[list[int]], list[list[int]]]) -> None:
    """A sampled neighbour changes no greedy token."""
    reference, prompts, expected = plain
    engine = open_pair(pair, "50%")
    oracle = install_oracle(engine, 0.2)
    sessions = [engine.submit(prompt, p) for prompt in prompts for p in (greedy(TOKENS), SAMPLED)]
    for i, session in enumerate(sessions):
        oracle.know(session, expected[i // 2])
    while engine.step():
        pass
    for i, prompt in enumerate(prompts):
        assert_same(reference, prompt, expected[i], sessions[2 * i].output, "beside sampled ones")
        assert len(sessions[2 * i + 1].output) == TOKENS
    engine.close()


def test_a_sampled_request_gives_the_same_alone_by_hand_and_at_any_residency(pair: Path) -> None:
    outputs = []
    for slots in ("100%", "50%", "25%"):
        engine = open_pair(pair, slots)
        prompts = [ids(seed, length, engine.config.vocab_size) for seed, length in enumerate(LENGTHS)]
        together = [engine.submit(prompt, SAMPLED) for prompt in prompts]
        while engine.step():
            pass
        by_hand = engine.begin_session(prompts[0], SAMPLED)
        finish(engine, [by_hand])
        outputs += [together[0].output, by_hand.output]
        engine.close()
    assert outputs == outputs[:1] * 6 and len(outputs[0]) == TOKENS


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
SHAPES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "gpt-oss-20b": (
        lambda folder: tiny_gpt_oss(folder, mxfp4=True, layers=24),
        {
            "block": 8,
            "taps": (1, 6, 11, 16, 21),
            "heads": 64,
            "kv_heads": 8,
            "bias": True,
            "rope_theta": 150000.0,
            "rope_scaling": YARN,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3-coder-30b-a3b": (
        lambda folder: tiny_qwen3_moe(folder, layers=48),
        {"block": 16, "taps": (1, 12, 23, 34, 45), "heads": 32, "kv_heads": 4, "rope_theta": 1e7},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_of_the_published_shapes_run(tmp_path: Path, name: str) -> None:
    """Targets of the real depth: a whole block is drafted, and no token changes."""
    make_target, shape = SHAPES[name]
    make_target(tmp_path / "target")
    tiny_draft(tmp_path / "draft", read_config(tmp_path / "target"), layers=8, **shape)
    plain, engine = open_pair(tmp_path, "50%", speculate=False), open_pair(tmp_path, "50%")
    prompt = ids(0, 12, engine.config.vocab_size)
    expected = finish(plain, [plain.begin_session(prompt, greedy(24))])
    session = engine.begin_session(prompt, greedy(24))
    (draft,) = engine.draft_round([session])
    assert len(draft.tokens) == shape["block"] - 1
    engine.verify_round([session])
    assert finish(engine, [session]) == expected
    install_oracle(engine, 0.1).know(again := engine.begin_session(prompt, greedy(24)), expected[0])
    engine.reset_counters()
    assert finish(engine, [again]) == expected
    assert (engine.stats().mean_acceptance_length or 0) > 3
    plain.close()
    engine.close()
