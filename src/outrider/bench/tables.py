"""`BENCHMARKS.md` from the result files, so that no figure in it was typed by hand."""

import json
from pathlib import Path
from typing import Any

from outrider.config import format_bytes
from outrider.errors import CheckpointError, ConfigError

PREFACE = """# Benchmarks

Rendered by `outrider bench tables benchmarks/results > BENCHMARKS.md`; a test keeps it equal to the result files.

What is shown: decoding of one sequence, greedy, with fewer and fewer experts resident, by the host-driven provider
(Python chooses victims, a thread copies); of the demo also with its draft. Tokens are compared with those of the first
row. What is not shown yet: captured graphs, concurrency, other engines, speculation on a GPU. Models named after a
config are synthetic: true shapes and bytes, random weights (`outrider synth gpt-oss-20b FOLDER --layers 4`), so routing
is nearly uniform and hit rates are lower than real text gives.

"width" is the rows of a verify (off: plain decoding; auto: the whole block), "accepted" the tokens that a round gives,
the bonus token included. On a CPU rows are not free: a verify of 8 rows computes nearly as long as several tokens, so
what speculation saves there is steps and expert bytes, and only partly time.

"waited" is the time that compute waited for expert bytes, those of prefill included, per decoded token. "copy path" is
the probe at start, on the engine's own copy thread; DMA from pinned memory reaches 55 GB/s on an H200, so a third of
the limit is used at best. On the GPU a step takes long even with nothing to fetch: Python's launches bound it.
"""


def markdown(results: Path) -> str:
    """All residency results below `results`, one section a file.

    Raises: ConfigError if there are none, CheckpointError naming a file that is not such a result.
    """
    sections = [PREFACE]
    paths = sorted(results.glob("*/residency-*.json"))
    if not paths:
        raise ConfigError(f"there are no results (DEVICE/residency-*.json) below {results}")
    for path in paths:
        try:
            sections.append(_section(path.stem.removeprefix("residency-"), json.loads(path.read_text())))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not a result of 'outrider bench residency' ({error!r})") from error
    return "\n".join(sections)


def _section(name: str, result: dict[str, Any]) -> str:
    where = result["environment"]
    versions = ", ".join(f"{package} {number}" for package, number in where["versions"].items())
    driver = f", driver {where['driver']}" if where["driver"] else ""
    lines = [
        f"## {name} on {where['device']}",
        "",
        f"`{where['command']}`; commit {where['commit']}, {where['threads']} threads{driver}; {versions}.",
        f"{result['prompt_tokens']} + {result['output_tokens']} tokens, median of {result['repeats']} runs.",
        "",
        "| slots | policy | width | tokens/s | accepted | hit rate | cold bytes/token | waited/token | copy path "
        "| identical |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    return "\n".join([*lines, *(_row(row) for row in result["rows"]), ""])


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
