"""The command line as a user meets it: one JSON object, one sentence, exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider import cli
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
    code, out, _ = outrider("generate", folder, "--prompt-ids", "1,2,3", "--expert-slots", "50%", "--max-tokens", 4)
    assert code == 0 and "hit rate" in out and "cold bytes" in out


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
def test_what_cannot_be_served_is_one_sentence(outrider: Any, folder: Path, args: list[str], says: str) -> None:
    if says == "cuda" and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU here")
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
