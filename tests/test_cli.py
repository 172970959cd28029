"""The command line as a user meets it: one JSON object, one sentence, exit codes."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import cli
from outrider.checkpoint.locate import DEMO, locate
from outrider.engine.tokenizer import Tokenizer
from outrider.errors import RequestError
from tiny import tiny_gpt_oss, tiny_qwen3_moe


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one command in this process."""
    monkeypatch.setattr(sys, "argv", ["outrider", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def outrider(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *args: run(capsys, monkeypatch, *map(str, args))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    tiny_gpt_oss(path, mxfp4=True)
    return path


def test_generate_prints_one_json_object(outrider: Any, folder: Path) -> None:
    code, out, _ = outrider(
        "generate", folder, "--prompt-ids", "1,2,3", "--expert-slots", "50%", "--max-tokens", 9, "--json"
    )
    report = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert len(report["token_ids"]) == 9 and report["finish_reason"] == "length"
    assert report["text"] is None and report["mean_acceptance_length"] == 1.0
    assert report["tokens_per_second"] > 0
    stats = report["stats"]
    assert stats["expert_hits"] + stats["expert_misses"] == stats["expert_accesses"]
    assert stats["expert_cache_hit_rate"] == stats["expert_hits"] / stats["expert_accesses"]


def test_generate_for_people_shows_tokens_and_the_table(outrider: Any, folder: Path) -> None:
    code, out, err = outrider("generate", folder, "--prompt-ids", "1,2,3", "--expert-slots", "50%", "--max-tokens", 4)
    assert code == 0 and "hit rate" in err and "cold bytes" in err
    assert len(out.split()) == 4, "standard output holds what was generated and nothing else"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--prompt-ids", "1,x"], "--prompt-ids"),
        (["--prompt-ids", "1,9999"], "9999"),
        (["--prompt-ids", ""], "--prompt-ids"),
        ([], "give either"),
        (["hello", "--prompt-ids", "1"], "give either"),
        (["hello"], "tokenizer"),
        ([""], "empty"),
        (["--prompt-ids", "1", "--max-tokens", "999999"], "context holds"),
        (["--prompt-ids", "1", "--max-tokens", "0"], "max_tokens"),
        (["--prompt-ids", "1", "--max-context", "999999"], "max_context"),
        (["--prompt-ids", "1", "--expert-slots", "1"], "floor of 2"),
        (["--prompt-ids", "1", "--expert-slots", "1KiB"], "floor of 2"),
        (["--prompt-ids", "1", "--expert-slots", "lots"], "lots"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature"),
        (["--prompt-ids", "1", "--device", "cuda"], "cuda"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    outrider: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = outrider("generate", folder, *args, "--json")
    sentence = json.loads(out)["error"]
    assert code == 2 and says in sentence and "\n" not in sentence
    code, out, err = outrider("generate", folder, *args)
    assert code == 2 and out == "" and "error:" in err and "Traceback" not in err


def test_an_unknown_model_is_one_sentence(outrider: Any, tmp_path: Path) -> None:
    for model in (tmp_path / "nothing", tmp_path, "not a hub id"):
        code, out, _ = outrider("generate", model, "--prompt-ids", "1", "--json")
        assert code == 2 and json.loads(out)["error"]


def test_inspect_plan_synth_pack(outrider: Any, tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path / "plain", mlp_only_layers=[1])
    code, out, _ = outrider("inspect", tmp_path / "plain", "--json")
    assert code == 0 and json.loads(out)["experts"] == 8
    code, out, _ = outrider("pack", tmp_path / "plain", tmp_path / "packed", "--json")
    report = json.loads(out)
    assert code == 0 and 0 < report["relative_error"] < 0.2
    code, out, _ = outrider("generate", tmp_path / "packed", "--prompt-ids", "1,2", "--max-tokens", 3, "--json")
    assert code == 0 and len(json.loads(out)["token_ids"]) == 3
    code, out, _ = outrider("pack", tmp_path / "packed", tmp_path / "again", "--json")
    assert code == 2 and not (tmp_path / "again").exists()
    code, out, _ = outrider("synth", tmp_path / "plain", tmp_path / "random", "--json")
    assert code == 0 and (tmp_path / "random" / "config.json").exists()
    code, out, _ = outrider("plan", tmp_path / "plain", "--gpu-memory", "24GiB", "--h2d", "10GB", "--json")
    assert code == 0 and json.loads(out)["hardware"]["h2d_bytes_per_second"] == 10e9
    code, out, _ = outrider("plan", "gpt-oss-20b", "--hardware", "abacus", "--json")
    assert code == 2 and "abacus" in json.loads(out)["error"]


def test_cache_sim_and_bench(outrider: Any, tmp_path: Path, folder: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(json.dumps({"tok": t, "layers": [[t % 8, (t + 3) % 8]]}) + "\n" for t in range(64)), encoding="utf-8"
    )
    code, out, _ = outrider("cache-sim", trace, "--fractions", "50%", "--plot", tmp_path / "p.png", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and {"fraction", "policy", "hit_rate"} <= rows[0].keys()
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    args = ["--prompt-ids", "1,2", "--expert-slots", "100%,50%", "--max-tokens", 4, "--repeats", 2]
    code, out, _ = outrider("bench", "residency", folder, *args, "--output", tmp_path / "r" / "rows.json", "--json")
    result = json.loads(out)
    assert code == 0 and all(row["identical"] for row in result["rows"]) and len(result["rows"]) == 4
    assert json.loads((tmp_path / "r" / "rows.json").read_text()) == result
    assert result["environment"]["versions"]["torch"] and result["environment"]["command"]


def test_help_reads_without_loading_a_model() -> None:
    done = subprocess.run([sys.executable, "-m", "outrider", "--help"], capture_output=True, text=True, check=True)
    for command in ("demo", "generate", "chat", "inspect", "plan", "synth", "pack", "cache-sim", "bench"):
        assert command in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "--bogus"],
        ["generate"],
        ["generate", "demo", "x", "--policy", "mru"],
        ["generate", "demo", "x", "--max-tokens", "many"],
        ["fly"],
        ["bench", "residency", "demo", "--max-tokens", "1"],
        ["bench", "residency", "demo", "--repeats", "0"],
        ["bench", "residency", "demo", "--policies", "mru"],
        ["cache-sim", "nothing.npz", "--fractions", "12"],
        ["cache-sim", "nothing.npz"],
    ],
)
def test_a_wrong_command_line_is_one_sentence_too(outrider: Any, args: list[str]) -> None:
    code, out, _ = outrider(*args, "--json")
    assert code == 2 and json.loads(out)["error"] and out.count("\n") == 1
    code, out, err = outrider(*args)
    assert code == 2 and out == "" and "error:" in err and "Traceback" not in err


def test_chat_keeps_the_history(outrider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("Forget this.\n/reset\nAdd two numbers.\n\nNow three.\n/exit\nunread\n")
    )
    code, out, _ = outrider("chat", "demo", "--expert-slots", "50%", "--max-tokens", 12, "--threads", 1, "--json")
    messages = json.loads(out)["messages"]
    assert code == 0 and [m["role"] for m in messages] == ["user", "assistant"] * 2
    assert [m["content"] for m in messages[::2]] == ["Add two numbers.", "Now three."]
    assert all(m["content"] for m in messages[1::2])


def test_a_conversation_that_does_not_fit_is_said_and_dropped(outrider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x " * 400 + "\nShort.\n"))
    args = ["chat", "demo", "--max-context", 64, "--max-tokens", 8, "--threads", 1]
    code, out, err = outrider(*args, "--json")
    assert code == 0 and "context holds 64" in err
    assert [m["content"] for m in json.loads(out)["messages"][::2]] == ["Short."]


def test_demo_shows_text_and_table(outrider: Any) -> None:
    code, out, _ = outrider("demo", "--max-tokens", 24)
    assert code == 0 and "class Stack" in out and "hit rate" in out and "DFlash" in out
    assert re.search(r"identical +yes", out)
    code, out, _ = outrider("demo", "--max-tokens", 24, "--json")
    plain, dflash = json.loads(out)["plain"], json.loads(out)["dflash"]
    assert plain["text"] and plain["stats"]["num_offloaded_experts"] == 192
    assert json.loads(out)["identical"] is True and plain["token_ids"] == dflash["token_ids"]
    assert dflash["stats"]["decode_steps"] < plain["stats"]["decode_steps"] == 23


def test_demo_says_when_tokens_differ(outrider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.engine.llm import LLM

    generate = LLM.generate

    def other(self: Any, *args: Any) -> Any:
        (completion,) = generate(self, *args)
        return [replace(completion, token_ids=[*completion.token_ids[:-1], 0])]

    monkeypatch.setattr(LLM, "generate", other)
    code, out, _ = outrider("demo", "--max-tokens", 4)
    assert code == 1 and re.search(r"identical +NO", out)


@pytest.mark.parametrize(
    ("content", "says"),
    [("[]", "tokenizer"), ('{"model": {"type": "Odd"}}', "tokenizer"), ("not json", "tokenizer")],
)
def test_a_broken_tokenizer_is_one_sentence(outrider: Any, folder: Path, content: str, says: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    try:
        code, out, _ = outrider("generate", folder, "hello", "--max-tokens", 2, "--json")
    finally:
        (folder / "tokenizer.json").unlink()
    assert code == 2 and says in json.loads(out)["error"]


def test_prompts_and_conversations_that_cannot_be_encoded() -> None:
    tokenizer = Tokenizer(DEMO)
    with pytest.raises(RequestError, match="Unicode at character 1"):
        tokenizer.encode("a\udc80")
    tokenizer._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.chat([{"role": "user", "content": "hi"}])
    tokenizer._tokenizer.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_a_plan_from_the_hub_fetches_the_config_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(DEMO)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert locate("some/model", config_only=True) == DEMO
    assert asked == [["config.json", "generation_config.json"]]
    locate("some/model")
    assert "*.safetensors" in asked[-1] and asked[1] == asked[0], "the config is checked before any weight is fetched"


def test_chat_needs_a_model_that_can(outrider: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = outrider("chat", folder, "--json")
    assert code == 2 and "tokenizer" in json.loads(out)["error"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\udc80\n/help\n"))
    code, out, err = outrider("chat", "demo", "--max-tokens", 4, "--threads", 1)
    assert code == 0 and "Unicode" in err and "'/help' is no command" in err and "Traceback" not in err


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "outrider", "inspect", "demo"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2 and "cannot be written" in done.stderr and "Traceback" not in done.stderr


def test_small_things(outrider: Any, tmp_path: Path) -> None:
    code, out, _ = outrider("--version")
    assert code == 0 and out.startswith("outrider 0.")
    assert outrider("plan", "demo", "--json")[0] == 0
    code, out, _ = outrider("plan", "gpt-oss-20b", "--ram", "8GiB", "--json")
    assert code == 2 and "--gpu-memory" in json.loads(out)["error"]
    code, out, _ = outrider("plan", "gpt-oss", "--json")
    assert code == 2 and "gpt-oss-20b" in json.loads(out)["error"]
    code, out, _ = outrider("generate", "./nosuch", "x", "--json")
    assert code == 2 and "neither" in json.loads(out)["error"]
    code, out, err = outrider("bench", "tables", tmp_path)
    assert code == 2 and out == "" and "no results" in err
