"""The shipped pair: speculation changes no token of fifty texts at any width and residency, and pays in steps."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.checkpoint.locate import DEMO, DEMO_DRAFT
from pairs import assert_same, greedy

TOKENS, PROMPTS = 128, 50


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("demo", dtype="float32", probe_copies=False, max_batch=PROMPTS)


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    """10 to 59 tokens from the middle of the standard library's files that neither model was trained on."""
    held = json.loads((DEMO / "heldout.json").read_text())["heldout"]
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [(library / name).read_text(encoding="utf-8") for name in held if (library / name).is_file()]
    texts += [text[len(text) // 4 :] for text in texts]
    return [plain.tokenizer.encode(text[len(text) // 2 :][:600])[: 10 + i] for i, text in enumerate(texts[:PROMPTS])]


@pytest.fixture(scope="module")
def expected(plain: LLM, prompts: list[list[int]]) -> list[list[int]]:
    assert len(prompts) == PROMPTS and all(prompts)
    return [c.token_ids for c in plain.generate(prompts, greedy(TOKENS))]


@pytest.mark.parametrize(
    ("width", "slots"), [(1, "25%"), (2, "50%"), (4, "100%"), (4, "25%"), (8, "100%"), (8, "50%"), (8, "25%")]
)
def test_greedy_tokens_are_those_of_plain_decoding(
    plain: LLM, prompts: list[list[int]], expected: list[list[int]], slots: str, width: int
) -> None:
    with LLM(
        "demo", draft="demo", width=width, expert_slots=slots, dtype="float32", probe_copies=False, max_batch=PROMPTS
    ) as llm:
        outputs = [c.token_ids for c in llm.generate(prompts, greedy(TOKENS))]
        stats = llm.stats()
    for i, (prompt, want, got) in enumerate(zip(prompts, expected, outputs, strict=True)):
        assert_same(plain.engine, prompt, want, got, f"prompt {i}, width {width}, {slots}")
    assert stats.mean_acceptance_length is not None
    least = {1: 1.0, 2: 1.3, 4: 1.6, 8: 2.0}[width]
    assert least <= stats.mean_acceptance_length <= width


def test_one_prompt_takes_fewer_steps_and_streams_the_same_text(plain: LLM) -> None:
    prompt, params = "def read_lines(path):\n", SamplingParams(max_tokens=64, ignore_eos=True)
    (want,) = plain.generate(prompt, params)
    with LLM("demo", draft="demo", expert_slots="50%", dtype="float32") as llm:
        chunks = list(llm.stream(prompt, params))
        steps = llm.stats().decode_steps
    assert [c.token_id for c in chunks] == want.token_ids and "".join(c.text for c in chunks) == want.text
    assert steps < 50
    assert [c.finish_reason for c in chunks] == [None] * 63 + ["length"]


def test_a_chat_with_the_draft_is_the_same_chat(plain: LLM) -> None:
    messages = [{"role": "user", "content": "Return the sum of two numbers."}]
    want = [c.token_id for c in plain.chat(messages, SamplingParams(max_tokens=80))]
    with LLM("demo", draft="demo", expert_slots="25%", dtype="float32") as llm:
        assert [c.token_id for c in llm.chat(messages, SamplingParams(max_tokens=80))] == want


def test_size_and_card_of_the_draft() -> None:
    assert sum(path.stat().st_size for path in DEMO_DRAFT.iterdir()) <= 10_000_000
    report: dict[str, Any] = json.loads((DEMO_DRAFT / "acceptance.json").read_text())
    assert report["mean_acceptance_length"] >= 2.0
    assert (DEMO_DRAFT / "README.md").is_file() and DEMO.is_dir()
