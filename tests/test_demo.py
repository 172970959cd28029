"""The shipped model: equal to transformers, the same at any residency, within its size, and good for a first look."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.checkpoint.locate import DEMO
from outrider.config import EngineOptions, parse_slots
from outrider.engine.build import build_engine
from parity import hf_greedy, hf_logits, our_logits
from tiny import load_with_transformers

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n",
    'class Stack:\n    """A stack."""\n\n    def __init__(self):\n',
    "for i in range(10):\n    print(",
    "def test_append(self):\n        d = deque()\n",
    "try:\n    import ssl\nexcept ImportError:\n",
    "# Return the number of lines in a file.\ndef count_lines(path):\n",
    "    def __repr__(self):\n        return ",
    "parser = argparse.ArgumentParser(description=",
    "x",
]


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_with_transformers(DEMO)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", expert_slots="50%", dtype="float32")


def test_logits_and_greedy_tokens_equal_transformers(llm: LLM, reference: Any) -> None:
    texts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    for text in texts:
        torch.testing.assert_close(our_logits(llm.engine, text), hf_logits(reference, text), atol=1e-4, rtol=0)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    batched = [c.token_ids for c in llm.generate(texts, params)]
    assert batched == [hf_greedy(reference, text, 64) for text in texts]
    assert [llm.generate([text], params)[0].token_ids for text in texts[:4]] == batched[:4]


@pytest.mark.parametrize("policy", ["lru", "decayed-lfu"])
def test_tokens_are_the_same_at_any_residency(llm: LLM, policy: Any) -> None:
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    texts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS[:4]]
    expected = [c.token_ids for c in llm.generate(texts, params)]
    for slots in ("100%", "25%", "5"):
        other = LLM("demo", expert_slots=slots, policy=policy, dtype="float32")
        assert [c.token_ids for c in other.generate(texts, params)] == expected, slots
        other.close()


def test_streamed_text_equals_decoded_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for prompt in (PROMPTS[0], "# Größe, 大小, размер\ns = '"):
        (whole,) = llm.generate(prompt, params)
        chunks = list(llm.stream(prompt, params))
        assert [c.token_id for c in chunks] == whole.token_ids
        assert "".join(c.text for c in chunks) == whole.text
        assert [c.finish_reason for c in chunks] == [None] * 59 + ["length"]


def test_the_text_of_a_stop_token_is_not_shown(llm: LLM) -> None:
    free = llm.generate(PROMPTS[2], SamplingParams(max_tokens=20))[0].token_ids
    params = SamplingParams(max_tokens=20, stop_token_ids=(free[9],))
    (whole,) = llm.generate(PROMPTS[2], params)
    first = free.index(free[9])
    assert whole.token_ids == free[: first + 1] and whole.finish_reason == "stop"
    assert whole.text == llm.tokenizer.decode(free[:first])
    assert "".join(c.text for c in llm.stream(PROMPTS[2], params)) == whole.text


def test_chat_uses_the_template_and_stops_at_its_end(llm: LLM) -> None:
    chunks = list(
        llm.chat([{"role": "user", "content": "Return the sum of two numbers."}], SamplingParams(max_tokens=200))
    )
    text = "".join(c.text for c in chunks)
    assert "def " in text and "<|" not in text
    assert chunks[-1].finish_reason == "stop"


def test_half_resident_means_misses_and_the_engine_says_so(llm: LLM) -> None:
    llm.reset_cache()
    llm.reset_counters()
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=32, ignore_eos=True))
    stats = llm.stats()
    assert stats.num_offloaded_experts > 0 and stats.expert_misses > 0 and stats.cold_bytes > 0
    assert stats.expert_cache_hit_rate is not None and 0.5 < stats.expert_cache_hit_rate < 1
    json.dumps(stats.to_dict())


def test_size_and_card() -> None:
    shipped = [DEMO / "model.safetensors", *DEMO.glob("tokenizer*"), DEMO / "chat_template.jinja"]
    assert sum(path.stat().st_size for path in shipped if path.exists()) <= 16_000_000
    card = (DEMO / "README.md").read_text()
    assert "xz -9e" in card and "bits per byte" in card and "FAILED" not in card
    assert Path(DEMO / "generation_config.json").exists()


def test_the_demo_is_a_gpt_oss_model_with_routing() -> None:
    config = build_engine("demo", EngineOptions(parse_slots("50%"))).config
    assert config.family == "gpt_oss" and config.mxfp4_experts
    assert config.num_layers >= 6 and config.num_experts >= 16 and config.experts_per_token == 4
