"""Corpus, tokenizer and split of the demo target's training."""

from pathlib import Path

import pytest
import transformers

from outrider.errors import ConfigError
from outrider.train.corpus import build_corpus, chat_pairs, heldout_documents, is_heldout, is_module
from outrider.train.prepare import Prepared, prepare
from outrider.train.tokenizer import SPECIAL_TOKENS, Vocabulary, load_tokenizer

SHIPPED = Path(__file__).parents[1] / "src" / "outrider" / "demo" / "target"

TEXTS = [
    "def f(x):\n    return x\n",
    "\tmixed \t tabs\r\nand\rreturns \n\n\n        deep\n",
    "naïve = '日本語 😀 \u200b\ufeff'  # trailing   \n",
    "<|endoftext|> and <|user|> are text here <|mask|>",
    "x" * 300 + "\x00\x07",
    "",
]


def function(name: str) -> str:
    lines = [f"    value_{name}_{i} = compute_{name}(argument_{i}, other_{i})" for i in range(12)]
    return f'def {name}():\n    """Compute the thing that {name} is about."""\n' + "\n".join(lines) + "\n"


@pytest.fixture
def stdlib(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    (folder / "test").mkdir(parents=True)
    for i in range(120):
        (folder / f"module{i}.py").write_text(function(f"name{i}"))
        (folder / "test" / f"test_module{i}.py").write_text(function(f"test{i}"))
    return folder


def test_the_shipped_tokenizer_round_trips_every_text() -> None:
    words = Vocabulary(load_tokenizer(SHIPPED))
    for text, ids in zip(TEXTS, words.encode(TEXTS), strict=True):
        assert words.decode(ids) == text
        assert not ids or min(ids) >= len(SPECIAL_TOKENS), "ordinary text gave a special token"


def test_transformers_reads_the_shipped_tokenizer() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    assert len(tokenizer) == 4096
    assert [tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS] == list(range(6))
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.mask_token == "<|mask|>"
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 0, "text begins with <|endoftext|>"
        assert tokenizer.decode(ids[1:]) == text


def test_the_chat_template_gives_the_training_form() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    asked = [{"role": "user", "content": "Add two numbers."}]
    answered = [*asked, {"role": "assistant", "content": "def add(a, b):\n    return a + b\n"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|endoftext|><|user|>Add two numbers.<|end|><|assistant|>"
    whole = tokenizer.apply_chat_template(answered, tokenize=False)
    assert whole == prompt + "def add(a, b):\n    return a + b\n<|end|>"
    words = Vocabulary(load_tokenizer(SHIPPED))
    trained = words.encode_chat([(asked[0]["content"], answered[1]["content"])])[0]
    assert tokenizer(whole, add_special_tokens=False)["input_ids"] == [words.end_of_text, *trained]


def test_a_prompt_that_ends_with_a_newline_is_a_prefix_of_its_continuation() -> None:
    words = Vocabulary(load_tokenizer(SHIPPED))
    prompt, whole = words.encode(["def f(n):\n", "def f(n):\n    return n\n"])
    assert whole[: len(prompt)] == prompt


def test_the_split_is_by_whole_file_and_stable(stdlib: Path) -> None:
    corpus = build_corpus([stdlib])
    heldout = [doc.path for doc in corpus.heldout]
    assert heldout == [doc.path for doc in heldout_documents(stdlib)]
    assert heldout == sorted(p for p in (f"module{i}.py" for i in range(120)) if is_heldout(p))
    assert 2 <= len(heldout) <= 25
    assert not set(heldout) & {doc.path for doc in corpus.train}
    # Known answers: a change of the rule would make old and new figures incomparable.
    assert is_heldout("argparse.py") and not is_heldout("ast.py")
    assert not any(is_heldout(f"test/test_{i}.py") for i in range(500))
    assert not is_module("encodings/cp437.py") and not is_module("idlelib/idle_test/test_run.py")


def test_copies_of_a_heldout_file_do_not_enter_training(stdlib: Path, tmp_path: Path) -> None:
    original = heldout_documents(stdlib)[0]
    other = tmp_path / "package"
    other.mkdir()
    edited = original.text.replace("argument_0", "renamed_argument") + "\n\n" + function("added")
    (other / "vendored.py").write_text(edited)
    (other / "innocent.py").write_text(function("innocent"))
    corpus = build_corpus([stdlib, other])
    assert corpus.dropped == ["package/vendored.py"]
    assert "innocent.py" in {doc.path for doc in corpus.train}
    assert original.text not in {doc.text for doc in corpus.train}


def test_a_folder_without_heldout_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigError, match="held-out"):
        build_corpus([tmp_path / "a"])
    with pytest.raises(ConfigError, match="neither"):
        build_corpus([tmp_path / "missing.py"])


def test_chat_pairs_separate_docstring_and_code(stdlib: Path) -> None:
    documents = build_corpus([stdlib]).train
    pairs = chat_pairs(documents)
    assert pairs
    assert all(p.docstring.startswith("Compute the thing") and '"""' not in p.code for p in pairs)
    compile(pairs[0].code, "pair", "exec")


def test_prepared_data_survives_its_folder(stdlib: Path, tmp_path: Path) -> None:
    ready = prepare([stdlib], 3, primary=("lib", "PSF-2.0"), vocabulary=400)
    ready.save(tmp_path / "prepared", 64)
    again = Prepared.load(tmp_path / "prepared")
    assert again.record == ready.record
    assert (again.tokens == ready.tokens).all() and (again.probe == ready.probe).all()
    assert [a.tolist() for a in again.heldout] == [a.tolist() for a in ready.heldout]
    text = "".join(doc.text for doc in heldout_documents(stdlib))
    assert ready.record.heldout_bytes == len(text.encode())
    assert text == "".join(Vocabulary(again.tokenizer).decode(ids.tolist()) for ids in again.heldout)
