"""What a drafter learns from: documents and their split, prompts, text on disk that survives, captured features."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.checkpoint.locate import DEMO
from outrider.config import EngineOptions
from outrider.core import Phase
from outrider.engine.build import build_engine
from outrider.engine.engine import Engine
from outrider.engine.tokenizer import Tokenizer
from outrider.errors import ConfigError
from outrider.kvcache.pages import PageTable
from outrider.models.target import Target
from outrider.spec.observation import Observation
from outrider.train import draft_capture
from outrider.train.corpus import is_heldout
from outrider.train.draft_capture import capture
from outrider.train.draft_data import Continuation, Samples, Sequences, engine_options, main, regenerate
from outrider.train.draft_text import Prompts, Text, is_heldout_text, read_texts
from pairs import ids
from tiny import MAKERS, VOCAB

SETTINGS = Continuation(prompt=(3, 9), tokens=8, greedy=0.5, batch=3)


class GivenPrompts(Prompts):
    """Random ids instead of text."""

    def __init__(self) -> None:
        pass

    def prompt(self, index: int) -> list[int]:
        return ids(index, 3 + index % 5, VOCAB)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("target")
    MAKERS["gpt_oss-mxfp4"](folder)
    return build_engine(str(folder), engine_options(EngineOptions(dtype="float32"), 6, 40))


def lists(sequences: Sequences) -> list[list[int]]:
    return [part.tolist() for part in np.split(sequences.tokens, sequences.lengths.cumsum()[:-1])]


# --- text ---------------------------------------------------------------------------------------------------------


def test_every_kind_of_text_is_read_and_split_by_a_hash(tmp_path: Path) -> None:
    code = "def f(x):\n    return x + 1\n" * 4
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for i in range(60):
        (folder / "sub" / f"m{i}.py").write_text(f"# {i}\n{code}")
        (folder / f"t{i}.txt").write_text(f"text {i}")
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("pack/a.py", code)
    lines = [json.dumps({"text": f"line {i}"}) for i in range(60)]
    lines += [
        json.dumps({"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": "!"}]})
        for i in range(9)
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    texts = read_texts([folder, tmp_path / "code.zip", tmp_path / "lines.jsonl"])
    assert len(texts.train) + len(texts.heldout) == 60 + 60 + 1 + 69
    assert {t.name for t in texts.train}.isdisjoint(t.name for t in texts.heldout)
    held = {t.name for t in texts.heldout}
    assert {f"sub/m{i}.py" for i in range(60) if is_heldout(f"sub/m{i}.py")} == {n for n in held if n.endswith(".py")}
    assert {f"t{i}.txt" for i in range(60) if is_heldout_text(f"t{i}.txt")} == {n for n in held if n.endswith(".txt")}
    assert held and all(any(kind in name for name in held) for kind in (".py", ".txt", ".jsonl"))
    talk = next(t for t in texts.train if isinstance(t.content, list))
    assert [m["role"] for m in talk.content] == ["user", "assistant"]  # type: ignore[union-attr,index]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", "{", "a.jsonl, line 1 is not JSON"),
        ("a.jsonl", '{"other": 1}', "a.jsonl, line 1 has neither 'text' nor 'messages'"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "a.jsonl, line 1 has a message without 'role' and 'content'"),
        ("a.jsonl", "3", "a.jsonl, line 1 has neither"),
        ("a.jsonl", "[1]", "a.jsonl, line 1 has neither"),
        ("a.txt", b"\xff", "a.txt is not UTF-8"),
        ("a.png", "x", "a.png is neither a folder of text nor"),
        ("a.zip", "x", "a.zip is no zip archive"),
        ("a.txt", "", "no text found in"),
    ],
)
def test_text_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, name: str, content: str | bytes, sentence: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=sentence):
        read_texts([file])
    with pytest.raises(ConfigError, match="none is neither a folder"):
        read_texts([tmp_path / "none"])


def test_prompts_are_a_pure_function_and_begin_as_the_tokenizer_begins() -> None:
    tokenizer = Tokenizer(DEMO)
    texts = [Text("a", "def f(x):\n    return x\n" * 80), Text("b", [{"role": "user", "content": "Add two numbers."}])]
    prompts, again = (Prompts(texts, tokenizer, (5, 20), 7) for _ in range(2))
    drawn = [prompts.prompt(i) for i in range(200)]
    assert drawn[50:] == [again.prompt(i) for i in range(50, 200)]
    assert drawn != [Prompts(texts, tokenizer, (5, 20), 8).prompt(i) for i in range(200)]
    assert all(p[0] == tokenizer.encode("")[0] and 1 < len(p) <= 20 for p in drawn)
    assert tokenizer.chat(texts[1].content) in drawn  # type: ignore[arg-type]
    stream = np.array(tokenizer.encode("x = 1\n" * 50)[1:], dtype=np.uint16)
    whole = Prompts([Text("ids", stream)], tokenizer, (6, 6), 0)
    assert {len(whole.prompt(i)) for i in range(20)} == {6}
    assert {whole.prompt(i)[0] for i in range(20)} == {tokenizer.encode("")[0]}


# --- text that the target writes ------------------------------------------------------------------------------------


def test_a_sequence_does_not_depend_on_the_batch_nor_on_where_the_work_was_stopped(
    engine: Engine, tmp_path: Path
) -> None:
    whole, parts = Samples(tmp_path / "whole"), Samples(tmp_path / "parts")
    regenerate(engine, GivenPrompts(), whole, 7, SETTINGS)
    regenerate(engine, GivenPrompts(), parts, 2, SETTINGS)
    parts = Samples(tmp_path / "parts")
    assert len(parts) == 2
    regenerate(engine, GivenPrompts(), parts, 7, SETTINGS)
    assert lists(whole.sequences(7)) == lists(parts.sequences(7))
    for index, text in enumerate(lists(whole.sequences(7))):
        prompt = GivenPrompts().prompt(index)
        assert text[: len(prompt)] == prompt and len(prompt) < len(text) <= len(prompt) + 8
    temperatures = {SETTINGS.params(i).temperature for i in range(7)}
    assert temperatures == {0.0, 0.8}


@pytest.mark.parametrize("torn", ["tokens.bin", "spans.bin"])
def test_samples_survive_a_write_that_was_cut_off(tmp_path: Path, torn: str) -> None:
    samples = Samples(tmp_path)
    samples.append([([1, 2, 3], 1), ([4, 5], 1)])
    before = lists(samples.sequences(2))
    with (tmp_path / torn).open("ab") as file:
        file.write(b"\1\0\0\0\2\0")
    again = Samples(tmp_path)
    assert len(again) == 2 and lists(again.sequences(2)) == before
    again.append([([7, 8, 9], 2)])
    assert lists(Samples(tmp_path).sequences(3)) == [*before, [7, 8, 9]]
    with (tmp_path / "tokens.bin").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(ConfigError, match="is shorter than"):
        Samples(tmp_path)


def test_the_module_command_fills_a_folder_and_says_how(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def f():\n    return 1\n" * 20)
    arguments = ["demo", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--sequences", "3"]
    before = torch.get_num_threads()
    assert main([*arguments, "--shortest", "3", "--longest", "6", "--tokens", "4"]) == 0
    torch.set_num_threads(before)
    samples = Samples(tmp_path / "out")
    assert len(samples) == 3 and "--tokens 4" in samples.command.read_text()
    assert main([*arguments[:2], str(tmp_path / "none.txt"), *arguments[3:]]) == 2


@pytest.mark.parametrize(
    "fields", [{"prompt": (5, 4)}, {"prompt": (0, 4)}, {"tokens": 1}, {"greedy": 1.5}, {"batch": 0}]
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is not usable"):
        Continuation(**fields)  # type: ignore[arg-type]


# --- features -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    return Sequences.of([(ids(i, 10 + 3 * i, VOCAB), 4) for i in range(6)])


def test_features_are_the_residual_stream_of_each_sequence_by_itself(
    engine: Engine, sequences: Sequences, tmp_path: Path
) -> None:
    features = capture(engine, sequences, (0, 2), tmp_path / "f.bin", 1 << 20)
    target = Target(engine.decoder, engine.kv, engine.provider, engine.decoder.embedding.device)
    for start, text in zip(sequences.starts.tolist(), lists(sequences), strict=True):
        seen, table = Observation((0, 2)), PageTable(engine.kv.pool)
        target.forward(Phase.PREFILL, [table], [text], seen)
        target.provider.commit(range(len(text)))
        table.release()
        expected = seen.features(range(len(text))).to(torch.bfloat16)
        assert torch.equal(features[start : start + len(text)], expected)


def test_capturing_goes_on_where_it_stopped_and_begins_anew_for_other_text(
    engine: Engine, sequences: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = capture(engine, sequences, (1,), tmp_path / "whole.bin", 1 << 20).clone()
    calls: list[int] = []
    run = draft_capture._run

    def stopping(target: Target, parts: list[list[int]], taps: tuple[int, ...]) -> torch.Tensor:
        if len(calls) == 1 and not resumed:
            raise KeyboardInterrupt
        calls.append(len(parts))
        return run(target, parts, taps)

    resumed = False
    monkeypatch.setattr(draft_capture, "_run", stopping)
    monkeypatch.setattr(
        draft_capture, "_chunks", lambda lengths, done, room: [range(i, i + 1) for i in range(done, len(lengths))]
    )
    with pytest.raises(KeyboardInterrupt):
        capture(engine, sequences, (1,), tmp_path / "f.bin", 1 << 20)
    resumed = True
    assert torch.equal(capture(engine, sequences, (1,), tmp_path / "f.bin", 1 << 20), whole)
    assert len(calls) == 6
    capture(engine, sequences, (1,), tmp_path / "f.bin", 1 << 20)
    assert len(calls) == 6
    capture(engine, sequences, (2,), tmp_path / "f.bin", 1 << 20)
    assert len(calls) == 12


def test_features_larger_than_allowed_are_refused(engine: Engine, sequences: Sequences, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"more than the .* that the recipe allows"):
        capture(engine, sequences, (1,), tmp_path / "f.bin", 100)
    assert not (tmp_path / "f.bin").exists()
