"""Against transformers: same checkpoint, same logits, same greedy tokens, however the rows are batched."""

import random
from pathlib import Path

import pytest
import torch

from outrider.config import EngineOptions, SamplingParams, parse_slots
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from parity import Texts, hf_greedy, hf_logits, hf_padded_logits, our_logits
from tiny import MAKERS, tiny_gpt_oss

Pair = tuple[Engine, torch.nn.Module]


def make_texts(lengths: list[int], vocab: int, seed: int = 0) -> Texts:
    rng = random.Random(seed)
    return [[rng.randrange(vocab - 1) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("tiny")
    model = MAKERS[request.param](folder)
    return build_engine(str(folder), EngineOptions(expert_slots=parse_slots("50%"), dtype="float32")), model


def generate(engine: Engine, texts: Texts, tokens: int) -> Texts:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sequences = [engine.submit(text, params) for text in texts]
    while engine.step():
        pass
    return [s.output for s in sequences]


def test_logits_equal_transformers(pair: Pair) -> None:
    engine, model = pair
    texts = make_texts([1, 5, 17, 40], engine.config.vocab_size)
    padded = hf_padded_logits(model, texts)
    for text, from_batch in zip(texts, padded, strict=True):
        ours = our_logits(engine, text)
        torch.testing.assert_close(ours, hf_logits(model, text), atol=1e-4, rtol=0)
        torch.testing.assert_close(ours, from_batch, atol=1e-4, rtol=0)


def test_greedy_equals_transformers_batched_and_alone(pair: Pair) -> None:
    engine, model = pair
    texts = make_texts([3, 9, 14, 20, 24, 31, 33, 38, 47, 60], engine.config.vocab_size, seed=1)
    expected = [hf_greedy(model, text, 64) for text in texts]
    assert generate(engine, texts, 64) == expected
    assert [generate(engine, [text], 64)[0] for text in texts[:3]] == expected[:3]


def test_logits_do_not_know_how_rows_were_grouped(pair: Pair) -> None:
    """Bit for bit: one row at a time, odd chunks, all at once."""
    engine, _ = pair
    (text,) = make_texts([300], engine.config.vocab_size, seed=2)
    whole = our_logits(engine, text)
    for chunk in (7, 16, 129):
        assert torch.equal(our_logits(engine, text, chunk), whole)
    assert torch.equal(our_logits(engine, text[:40], 1), whole[:40])


def test_prompts_longer_than_a_prefill_chunk(tmp_path: Path) -> None:
    model = tiny_gpt_oss(tmp_path, mxfp4=True)
    engine = build_engine(str(tmp_path), EngineOptions(prefill_chunk=32))
    (text,) = make_texts([150], engine.config.vocab_size, seed=3)
    assert generate(engine, [text], 16) == [hf_greedy(model, text, 16)]
