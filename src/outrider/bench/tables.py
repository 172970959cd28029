"""`BENCHMARKS.md` from the result files, so that no figure in it was typed by hand."""

import json
from pathlib import Path
from typing import Any

from outrider.config import format_bytes
from outrider.errors import CheckpointError, ConfigError

PREFACE = """# Benchmarks

Rendered by `outrider bench tables benchmarks/results > BENCHMARKS.md`; a test keeps it equal to the result files.

**What is shown.** Kernels, decoding steps and DFlash rounds of one sequence, greedy, driven by the device (captured
graphs), on synthetic models: true shapes and bytes, random weights. Routing is "uniform" (drawn, the worst case of a
cache), "own" (the random router's) or a recorded trace of the real model, named by its file. And decoding with real
weights (the demo) and of synthetic layers by the host-driven provider (Python chooses victims, a thread copies); tokens
are compared with those of the first row. Drafts of random weights hardly ever stand, so rounds show what they cost, not
what they give. **What is not shown yet:** concurrency, other engines measured side by side.

"expected" is the resident step of the same run plus cold bytes over what the copy engine moves: a cache that costs
nothing and overlaps nothing. "of its limit" compares with a device copy (read and write), of a fetch with the copy
engine; a copy also writes, so what only reads may pass it. "width" is the rows of a verify (off: plain decoding; auto:
the whole block), "accepted" the tokens that a round gives, the bonus token included. "waited" is the time that compute
waited for expert bytes per decoded token, "copy path" the host-driven engine's own copies, probed at start.
"""


def markdown(results: Path) -> str:
    """All results below `results`, one section a file: kernels, then steps, then residency.

    Raises: ConfigError if there are none, CheckpointError naming a file that is not such a result.
    """
    sections = [PREFACE]
    found = [
        (path, kind, render)
        for kind, render in (
            ("kernels", _kernels),
            ("step", _steps),
            ("round", _rounds),
            ("prefill", _prefill),
            ("residency", _residency),
        )
        for path in sorted(results.glob(f"*/{kind}*.json"))
    ]
    if not found:
        raise ConfigError(f"there are no results (DEVICE/kernels*, step*, residency*.json) below {results}")
    for path, kind, render in found:
        try:
            result = json.loads(path.read_text())
            title = f"## {path.stem.replace('-', ' ', 1)} on {result['environment']['device']}"
            sections.append("\n".join([title, "", _where(result["environment"]), *render(result), ""]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not a result of 'outrider bench {kind}' ({error!r})") from error
    return "\n".join(sections)


def _where(environment: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in environment["versions"].items())
    driver = f", driver {environment['driver']}" if environment["driver"] else ""
    how = f"commit {environment['commit']}, {environment['threads']} threads{driver}"
    return f"`{environment['command']}`; {how}; {versions}."


def _kernels(result: dict[str, Any]) -> list[str]:
    copy, dma = result["copy_bytes_per_second"], result["dma_bytes_per_second"]
    lines = [
        f"Device copy {copy / 1e12:.2f} TB/s (read and write), copy engine {dma / 1e9:.1f} GB/s.",
        "",
        "| kernel | setting | median (fastest-slowest) | moved | of its limit |",
        "|---|---|--:|--:|--:|",
    ]
    for row in result["rows"]:
        times, rate = row["times"], row["bytes_per_second"]
        limit = dma if row["kernel"].startswith("fetch") else copy
        spread = f"{times['median'] * 1e6:.1f} us ({times['fastest'] * 1e6:.1f}-{times['slowest'] * 1e6:.1f})"
        moved, share = ("-", "-") if rate is None else (f"{format_bytes(rate)}/s", f"{rate / limit:.0%}")
        lines.append(f"| {row['kernel']} | {row['setting']} | {spread} | {moved} | {share} |")
    return lines


def _steps(result: dict[str, Any]) -> list[str]:
    copy, dma = result["copy_bytes_per_second"], result["dma_bytes_per_second"]
    lines = [
        f"Device copy {copy / 1e12:.2f} TB/s, copy engine {dma / 1e9:.1f} GB/s; "
        f"median of {result['rows'][0]['step']['repeats']} runs of 64 steps.",
        "",
        f"| {' | '.join(STEP_HEADER)} |",
        "|--:|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    return [*lines, *(f"| {' | '.join(step_cells(row))} |" for row in result["rows"])]


STEP_HEADER = ("slots", "context", "routing", "how", "tokens/s", "step", "hit rate", "cold/token", "of expected", "HBM")


def step_cells(row: dict[str, Any]) -> list[str]:
    """One row of a result of `bench step` as text."""
    setting, step, expected = row["setting"], row["step"], row["expected"]
    how = [setting["policy"]]
    how += [] if setting["overlap"] else ["no overlap"]
    how += [] if setting["graphs"] else ["eager"]
    return [
        setting["expert_slots"],
        str(setting["context"]),
        Path(setting["routing"]).stem,
        ", ".join(how),
        f"{row['tokens_per_second']:.1f}",
        f"{step['median'] * 1e3:.2f} ms ({step['fastest'] * 1e3:.2f}-{step['slowest'] * 1e3:.2f})",
        f"{row['hit_rate']:.1%}",
        format_bytes(row["cold_bytes"]),
        "-" if expected is None else f"{step['median'] / expected:.2f}x of {expected * 1e3:.2f} ms",
        f"{row['hbm_share']:.0%}",
    ]


def _rounds(result: dict[str, Any]) -> list[str]:
    lines = [
        f"A block, its verify and its acceptance behind {result['context']} tokens, routed by "
        f"{Path(result['routing']).stem}; copy engine {result['dma_bytes_per_second'] / 1e9:.1f} GB/s.",
        "",
        f"| {' | '.join(ROUND_HEADER)} |",
        f"|{'--:|' * len(ROUND_HEADER)}",
    ]
    return [*lines, *(f"| {' | '.join(round_cells(row))} |" for row in result["rows"])]


ROUND_HEADER = (
    "slots", "rows", "tokens", "round", "draft", "verify", "accept", "hit rate", "cold/round", "of expected",
    "the host meanwhile",
)  # fmt: skip


def round_cells(row: dict[str, Any]) -> list[str]:
    """One row of a result of `bench round` as text."""
    times, expected = row["times"], row["expected"]
    return [
        row["expert_slots"],
        str(row["rows"]),
        f"{row['tokens']:.2f}",
        f"{times['median'] * 1e3:.2f} ms ({times['fastest'] * 1e3:.2f}-{times['slowest'] * 1e3:.2f})",
        *(f"{row[part] * 1e3:.3f} ms" for part in ("draft", "verify", "accept")),
        f"{row['hit_rate']:.1%}",
        format_bytes(row["cold_bytes"]),
        "-" if expected is None else f"{times['median'] / expected:.2f}x of {expected * 1e3:.2f} ms",
        ", ".join(f"{number} {name}" for name, number in row["host_calls"].items()),
    ]


def _prefill(result: dict[str, Any]) -> list[str]:
    lines = [
        f"Decoding beside it is routed by {Path(result['routing']).stem}; its hit rate before and after the prompts. "
        f"Copy engine {result['dma_bytes_per_second'] / 1e9:.1f} GB/s.",
        "",
        f"| {' | '.join(PREFILL_HEADER)} |",
        f"|{'--:|' * len(PREFILL_HEADER)}",
    ]
    return [*lines, *(f"| {' | '.join(prefill_cells(row))} |" for row in result["rows"])]


PREFILL_HEADER = (
    "slots",
    "prompt",
    "tokens/s",
    "time (fastest-slowest)",
    "cold bytes",
    "of bound",
    "chunk",
    "hit rate",
)


def prefill_cells(row: dict[str, Any]) -> list[str]:
    """One row of a result of `bench prefill` as text."""
    times, bound = row["times"], row["bound"]
    return [
        row["expert_slots"],
        str(row["tokens"]),
        f"{row['tokens_per_second']:.0f}",
        f"{times['median'] * 1e3:.1f} ms ({times['fastest'] * 1e3:.1f}-{times['slowest'] * 1e3:.1f})",
        format_bytes(row["cold_bytes"]),
        "-" if bound is None else f"{row['tokens_per_second'] / bound:.0%} of {bound:.0f}",
        f"{row['chunk_seconds'] * 1e3:.0f} ms",
        f"{row['hit_rate_before']:.1%} to {row['hit_rate_after']:.1%}",
    ]


def _residency(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{result['prompt_tokens']} + {result['output_tokens']} tokens, median of {result['repeats']} runs.",
        "",
        "| slots | policy | width | tokens/s | accepted | hit rate | cold bytes/token | waited/token | copy path "
        "| identical |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    return [*lines, *(_row(row) for row in result["rows"])]


def _row(row: dict[str, Any]) -> str:
    waited, speed = row["exposed_fetch_seconds_per_token"], row["measured_h2d_bytes_per_second"]
    cells = [
        row["expert_slots"],
        row["policy"],
        str(row.get("width", "off")),  # results older than the draft were all taken without one
        f"{row['tokens_per_second']:.1f} ({row['slowest']:.1f}-{row['fastest']:.1f})",
        f"{row.get('mean_acceptance_length', 1.0):.2f}",
        "-" if row["expert_cache_hit_rate"] is None else f"{row['expert_cache_hit_rate']:.1%}",
        format_bytes(row["cold_bytes_per_token"]),
        "-" if waited is None else f"{1e3 * waited:.2f} ms",
        "-" if speed is None else f"{format_bytes(speed)}/s",
        "yes" if row["identical"] else "NO",
    ]
    return f"| {' | '.join(cells)} |"
