"""Offloading never changes a token: any residency, any policy, any reset, any company in the batch."""

import json
import random
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import EngineOptions, parse_slots
from outrider.engine.build import build_engine
from outrider.errors import ConfigError, OutriderError, RequestError
from parity import our_logits
from test_parity import generate, make_texts
from tiny import tiny_gpt_oss

SLOTS = ["100%", "50%", "38%", "3"]  # of 8 experts, 2 a token: 25% is the floor of 2, "3" is one slot above it


def test_tokens_are_the_same_at_any_residency_and_policy(folder: Path) -> None:
    outputs = {}
    for slots in [*SLOTS, "25%"]:
        for policy in ("lru", "decayed-lfu"):
            engine = build_engine(str(folder), EngineOptions(parse_slots(slots), policy))  # type: ignore[arg-type]
            outputs[slots, policy] = generate(engine, make_texts([5, 40, 23], engine.config.vocab_size), 48)
            stats = engine.stats()
            assert (stats.num_offloaded_experts == 0) == (slots == "100%")
            assert (stats.evictions > 0) == (slots != "100%")
            assert stats.expert_hits + stats.expert_misses == stats.expert_accesses > 0
            engine.close()
    assert all(output == outputs["100%", "lru"] for output in outputs.values())


def test_resets_between_generations_change_no_token(folder: Path) -> None:
    engine = build_engine(str(folder), EngineOptions(parse_slots("50%")))
    texts = make_texts([6], engine.config.vocab_size)
    first = generate(engine, texts, 8)
    for turn in range(100):
        (engine.reset_cache if turn % 2 else engine.reset_counters)()
        if turn % 2:
            assert engine.stats().expert_occupancy_bytes == 0
        else:
            assert engine.stats().expert_cache_hit_rate is None
        assert generate(engine, texts, 8) == first


def test_a_sampled_request_does_not_depend_on_its_neighbours(folder: Path) -> None:
    engine = build_engine(str(folder), EngineOptions(parse_slots("50%")))
    texts = make_texts([4, 30, 11], engine.config.vocab_size)
    params = [
        SamplingParams(max_tokens=24, temperature=t, top_p=0.9, top_k=20, seed=7, ignore_eos=True) for t in (0, 1, 1.5)
    ]
    sequences = [engine.submit(text, p) for text, p in zip(texts, params, strict=True)]
    while engine.step():
        pass
    for text, p, together in zip(texts, params, sequences, strict=True):
        alone = engine.submit(text, p)
        while engine.step():
            pass
        assert alone.output == together.output
    assert engine.stats().kv_occupancy_bytes == 0


def test_more_requests_than_fit_wait_for_pages(folder: Path) -> None:
    small = build_engine(str(folder), EngineOptions(max_context=64, kv_tokens=128, max_batch=3))
    large = build_engine(str(folder), EngineOptions(max_context=64))
    texts = make_texts([10, 20, 30, 25, 15, 5], small.config.vocab_size)
    assert generate(small, texts, 20) == generate(large, texts, 20)
    assert small.stats().kv_occupancy_bytes == 0


def test_kv_occupancy_is_that_of_the_pages(tmp_path: Path) -> None:
    tiny_gpt_oss(tmp_path, mxfp4=True)
    with LLM(str(tmp_path), expert_slots="50%") as llm:
        stream = llm.stream(list(range(20)), SamplingParams(max_tokens=4))
        next(stream)
        config = llm.engine.config
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
        assert llm.stats().kv_occupancy_bytes == 2 * 16 * per_token  # 20 tokens take two pages of 16
        stream.close()
        assert llm.stats().kv_occupancy_bytes == 0


def test_a_failed_step_can_be_run_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle of a layer leaves every sequence as it was, and the batch goes on to the same tokens."""
    engine = build_engine(str(folder), EngineOptions(parse_slots("50%")))
    texts = make_texts([5, 20], engine.config.vocab_size)
    expected = generate(engine, texts, 12)
    sequences = [engine.submit(text, SamplingParams(max_tokens=12, ignore_eos=True)) for text in texts]
    resolve, calls = engine.provider.resolve, count()

    def fail_sometimes(layer: int, expert_ids: torch.Tensor) -> Iterator[Any]:
        for turn, item in enumerate(resolve(layer, expert_ids)):
            if turn == 1 and next(calls) % 5 == 0:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(engine.provider, "resolve", fail_sometimes)
    failures = 0
    while engine.scheduler.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            failures += 1
    assert failures > 3
    assert [s.output for s in sequences] == expected


def test_a_closed_engine_says_so(folder: Path) -> None:
    engine = build_engine(str(folder), EngineOptions(parse_slots("50%")))
    engine.close()
    with pytest.raises(OutriderError, match="closed"):
        generate(engine, [[1, 2, 3]], 4)


def test_generation_config_adds_ends(folder: Path) -> None:
    with LLM(str(folder)) as llm:
        (free,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
        end = free.token_ids[7]
    extra = folder / "generation_config.json"
    before = extra.read_text() if extra.exists() else None
    try:
        extra.write_text(json.dumps({"eos_token_id": [end, 0]}))
        with LLM(str(folder)) as llm:
            (ended,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20))
    finally:
        extra.unlink() if before is None else extra.write_text(before)
    first = free.token_ids.index(end)
    assert ended.token_ids == free.token_ids[: first + 1] and ended.finish_reason == "stop"


def test_four_experts_a_token_are_summed_in_rank_order(tmp_path: Path) -> None:
    """With k = 4 the order of addition shows in the bits; it must not follow who was resident."""
    tiny_gpt_oss(tmp_path, mxfp4=True, top_k=4)
    logits = []
    for slots in ("100%", "4", "75%"):
        engine = build_engine(str(tmp_path), EngineOptions(parse_slots(slots)))
        (text,) = make_texts([60], engine.config.vocab_size)
        logits.append(our_logits(engine, text, chunk=1))
        logits.append(our_logits(engine, text))
    assert all(torch.equal(other, logits[0]) for other in logits)


def test_what_was_not_observed_is_none(folder: Path) -> None:
    engine = build_engine(str(folder), EngineOptions(parse_slots("50%"), probe_copies=False))
    stats = engine.stats()
    assert stats.expert_cache_hit_rate is None
    assert stats.exposed_fetch_seconds is None
    assert stats.decode_seconds is None
    assert stats.measured_h2d_bytes_per_second is None
    probed = build_engine(str(folder), EngineOptions(parse_slots("50%"))).stats()
    assert probed.measured_h2d_bytes_per_second is not None and probed.measured_h2d_bytes_per_second > 0
    assert sum(probed.h2d_bytes.values()) == 0 and probed.expert_occupancy_bytes == 0, "the probe left traces"


def test_decode_tokens_leave_out_those_of_prefill(folder: Path) -> None:
    engine = build_engine(str(folder), EngineOptions(parse_slots("50%")))
    generate(engine, make_texts([5, 9], engine.config.vocab_size), 8)
    stats = engine.stats()
    assert (stats.tokens_generated, stats.decode_tokens) == (16, 14)
    assert (stats.prefill_steps, stats.decode_steps) == (2, 7)


def test_ctrl_c_at_any_moment_breaks_nothing(folder: Path) -> None:
    """Interrupts at random moments, also inside steps: every one arrives, and the tokens stay the same."""
    engine = build_engine(str(folder), EngineOptions(parse_slots("38%")))
    texts = make_texts([5, 20], engine.config.vocab_size)
    expected = generate(engine, texts, 24)
    rng, arrived = random.Random(0), 0
    for _ in range(15):
        sequences = [engine.submit(text, SamplingParams(max_tokens=24, ignore_eos=True)) for text in texts]
        sent = Timer(rng.uniform(0.0, 0.05), signal.raise_signal, [signal.SIGINT])
        sent.start()
        while engine.scheduler.has_work or sent.is_alive():
            try:
                engine.step()
            except KeyboardInterrupt:
                arrived += 1
        assert [s.output for s in sequences] == expected
    assert arrived > 0


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_inside_a_step_waits_for_its_end_unless_pressed_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, presses: int
) -> None:
    engine = build_engine(str(folder), EngineOptions(parse_slots("50%")))
    (expected,) = generate(engine, [[1, 2, 3]], 6)
    sequence = engine.submit([1, 2, 3], SamplingParams(max_tokens=6, ignore_eos=True))
    resolve, calls = engine.provider.resolve, count()

    def press(layer: int, expert_ids: torch.Tensor) -> Iterator[Any]:
        if next(calls) == 0:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        yield from resolve(layer, expert_ids)

    monkeypatch.setattr(engine.provider, "resolve", press)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert sequence.output == (expected[:1] if presses == 1 else [])
    while engine.step():
        pass
    assert sequence.output == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_logits_that_are_not_finite_are_an_error(folder: Path) -> None:
    engine = build_engine(str(folder), EngineOptions())
    engine.decoder.head[7] = float("nan")
    with pytest.raises(RequestError, match="NaN"):
        generate(engine, [[1, 2, 3]], 4)


def test_what_a_page_held_before_does_not_matter(folder: Path) -> None:
    engine = build_engine(str(folder), EngineOptions())
    expected = generate(engine, [[1, 2, 3]], 8)
    for layer in range(engine.config.num_layers):
        engine.kv._keys[layer].fill_(float("nan"))
        engine.kv._values[layer].fill_(float("nan"))
    assert generate(engine, [[1, 2, 3]], 8) == expected


def test_settings_that_do_not_exist_are_refused_by_name() -> None:
    for wrong in ({"device": "gpu"}, {"policy": "mru"}, {"dtype": "int8"}, {"threads": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LLM("demo", **wrong)  # type: ignore[arg-type]


def test_a_model_larger_than_memory_is_refused_with_the_sum(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.memory_needs.available_ram", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"dense weights .* \+ 24 expert slots .* come to"):
        build_engine(str(folder), EngineOptions())
