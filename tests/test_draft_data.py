"""What a drafter learns from: documents and their split, prompts, text on disk that survives, captured features."""

import json
import os
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
from outrider.train.draft_data import Continuation, Samples, Sequences, engine_options, main, read_samples, regenerate
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
        ("a.jsonl", b'{"text": "\xe9"}', "a.jsonl is not UTF-8"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": " "}]}', "a.jsonl, line 1 has only empty messages"),
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


def test_copies_count_once_and_stay_on_the_held_out_side(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    for i in range(80):
        (folder / "sub" / f"m{i}.txt").write_text(f"text {i}")
    once, twice = read_texts([folder]), read_texts([folder, folder / "sub"])
    held = {t.content for t in twice.heldout}
    assert held >= {t.content for t in once.heldout} and held.isdisjoint(t.content for t in twice.train)
    assert len(twice.train) + len(twice.heldout) == 80 and once.digest() != twice.digest()

    def split(lines: list[dict[str, object]], end: str) -> tuple[set[object], set[object]]:
        file = tmp_path / "lines.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)) + end)
        texts = read_texts([file])
        return {t.content for t in texts.train}, {t.content for t in texts.heldout}  # type: ignore[misc]

    lines: list[dict[str, object]] = [{"text": f"line {i}"} for i in range(80)]
    first = split(lines, "")
    assert first[1] and split(lines, "\n") == first and split([{"id": 1} | line for line in lines] + lines, "") == first


def test_long_conversations_lose_their_oldest_turns() -> None:
    tokenizer = Tokenizer(DEMO)
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} " + "word " * 10} for i in range(5)]
    drawn = {tuple(Prompts([Text("a", turns)], tokenizer, (5, 60), 0).prompt(i)) for i in range(40)}
    assert len(drawn) == 3 and all(len(p) <= 60 and p[:2] == tuple(tokenizer.chat(turns)[:2]) for p in drawn)
    texts = [tokenizer.decode(list(p)) for p in drawn]
    assert all(any(f"turn {last}" in text and f"turn {last + 1}" not in text for text in texts) for last in (0, 2, 4))


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
    params = [SETTINGS.params(i) for i in range(7)]
    assert {p.temperature for p in params} == {0.0, 0.8} and len({p.seed for p in params}) == 7


@pytest.mark.parametrize("torn", ["tokens.bin", "spans.bin"])
def test_samples_survive_a_write_that_was_cut_off(tmp_path: Path, torn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples(tmp_path)
    samples.append([([1, 2, 3], 1), ([4, 5], 1)])
    before = lists(samples.sequences(2))
    with (tmp_path / torn).open("ab") as file:
        file.write(b"\1\0\0\0\2\0")
    again = Samples(tmp_path)
    assert len(again) == 2 and lists(again.sequences(2)) == before
    with monkeypatch.context() as patch:
        patch.setattr(again, "_spans", tmp_path / "none" / "spans.bin")
        with pytest.raises(FileNotFoundError):  # tokens are written first, so what has no span is not there
            again.append([([6, 6, 6, 6], 2)])
    again = Samples(tmp_path)
    assert lists(read_samples(tmp_path)) == before == lists(again.sequences(2))
    again.append([([7, 8, 9], 2)])
    assert lists(Samples(tmp_path).sequences(3)) == [*before, [7, 8, 9]]
    with (tmp_path / "tokens.bin").open("r+b") as file:
        file.truncate(10)
    for reader in (Samples, read_samples):
        with pytest.raises(ConfigError, match="is shorter than"):
            reader(tmp_path)


def test_the_module_command_fills_a_folder_and_says_how(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def f():\n    return 1\n" * 20)
    arguments = ["demo", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), "--sequences", "3"]
    before = torch.get_num_threads()
    assert main([*arguments, "--shortest", "3", "--longest", "6", "--tokens", "4"]) == 0
    torch.set_num_threads(before)
    samples = Samples(tmp_path / "out")
    assert len(samples) == 3 and "--tokens 4" in (tmp_path / "out" / "command.json").read_text()
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
    features = capture(engine, sequences, (0, 2), tmp_path / "f.bin")
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
    whole = capture(engine, sequences, (1,), tmp_path / "whole.bin").clone()
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
        capture(engine, sequences, (1,), tmp_path / "f.bin")
    resumed = True
    assert torch.equal(capture(engine, sequences, (1,), tmp_path / "f.bin"), whole)
    assert len(calls) == 6
    capture(engine, sequences, (1,), tmp_path / "f.bin")
    assert len(calls) == 6
    capture(engine, sequences, (2,), tmp_path / "f.bin")
    assert len(calls) == 12


def test_features_for_which_there_is_no_disk_are_refused(
    engine: Engine, sequences: Sequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"the features would take .* \(No space left on device\)"):
        capture(engine, sequences, (1,), tmp_path / "f.bin")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "state"])
def test_damaged_features_are_captured_again(engine: Engine, sequences: Sequences, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "f.bin"
    whole = capture(engine, sequences, (1,), file).clone()
    if damage == "cut":
        with file.open("r+b") as data:
            data.truncate(1000)
    else:
        file.with_suffix(".json").write_text("")
    assert torch.equal(capture(engine, sequences, (1,), file), whole)


def test_chunks_fit_the_pages() -> None:
    lengths = np.array([1, 16, 17, 40, 64, 5, 5])
    assert draft_capture._chunks(lengths, 0, 64) == [range(3), range(3, 4), range(4, 5), range(5, 7)]
    assert draft_capture._chunks(lengths, 3, 1000) == [range(3, 7)] and draft_capture._chunks(lengths, 7, 64) == []
