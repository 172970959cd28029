"""What the commands show: progress bars on stderr, streamed text, statistics as a table, or one JSON object."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from outrider.config import SamplingParams, format_bytes
from outrider.core import Progress as Report
from outrider.errors import ConfigError, RequestError
from outrider.stats import Stats

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

console = Console()
errors = Console(stderr=True)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def show(value: Any, render: Callable[[Any], RenderableType], as_json: bool, output: Path | None = None) -> None:
    """`value.to_dict()` as JSON, or what `render` makes of it; the JSON goes to the file `output`, too.

    Raises: ConfigError if the file cannot be written.
    """
    if output is not None:
        write_json(output, value.to_dict())
    if as_json:
        print_json(value.to_dict())
    else:
        console.print(render(value))


def show_error(sentence: str, as_json: bool) -> None:
    """The one sentence of an error: on stderr, or as `{"error": ...}` on stdout."""
    if as_json:
        print_json({"error": sentence})
    else:
        errors.print(f"[bold red]error:[/] {escape(sentence)}", highlight=False, soft_wrap=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`value` as indented JSON at `path`, whole or not at all.

    Raises: ConfigError if the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(value, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


@contextmanager
def progress_bars(unit: str = "bytes") -> Iterator[Report]:
    """A `core.Progress` that draws a bar for each kind of work; bytes are shown with their rate.

    What follows a colon in its name may change while the bar stays: "training: loss 2.31".
    """
    speed = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn("{task.description}"), BarColumn(), *speed, TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            kind = what.partition(":")[0]
            if kind not in tasks:
                tasks[kind] = bars.add_task(what, total=total)
            bars.update(tasks[kind], description=what, completed=done, total=total)

        yield report


def stream(llm: "LLM", prompt: str | list[int], params: SamplingParams, quiet: bool = False) -> dict[str, Any]:
    """Generate, showing text (ids, for a prompt of ids) as it comes unless `quiet`; returns what `--json` prints."""
    is_text = isinstance(prompt, str)
    chunks = []
    for chunk in llm.stream(prompt, params):
        chunks.append(chunk)
        if not quiet:
            sys.stdout.write(chunk.text if is_text else f"{chunk.token_id} ")
            sys.stdout.flush()
    if not quiet:
        sys.stdout.write("\n")
    stats = llm.stats()
    return {
        "token_ids": [chunk.token_id for chunk in chunks],
        "text": "".join(chunk.text for chunk in chunks) if is_text else None,
        "finish_reason": chunks[-1].finish_reason,
        "tokens_per_second": decode_rate(stats),
        "mean_acceptance_length": stats.mean_acceptance_length,
        "stats": stats.to_dict(),
    }


def converse(llm: "LLM", params: SamplingParams, quiet: bool = False) -> list[dict[str, str]]:
    """The chat loop, until /exit, end of input or Ctrl-C at the prompt; `quiet` shows nothing. Returns the history."""
    history: list[dict[str, str]] = []
    while True:
        try:
            line = (console.input("[bold]> [/]") if sys.stdin.isatty() and not quiet else input()).strip()
        except (EOFError, KeyboardInterrupt):
            return history
        if line == "/exit":
            return history
        if line == "/reset":
            history.clear()
        elif line == "/stats":
            errors.print(stats_table(llm.stats()))
        elif line.startswith("/"):
            show_error(f"'{line}' is no command; there are /stats, /reset and /exit", as_json=False)
        elif line:
            _answer(llm, history, line, params, quiet)


def _answer(llm: "LLM", history: list[dict[str, str]], line: str, params: SamplingParams, quiet: bool) -> None:
    """One turn; it enters `history` as far as it was answered, and not at all if it was broken off before."""
    question = {"role": "user", "content": line}
    pieces: list[str] = []
    try:
        for chunk in llm.chat([*history, question], params):
            pieces.append(chunk.text)
            if not quiet:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
    except RequestError as error:
        show_error(f"{error} (/reset starts over)", as_json=False)
        return
    except KeyboardInterrupt:
        pass
    if not quiet:
        sys.stdout.write("\n")
    if pieces:
        history += [question, {"role": "assistant", "content": "".join(pieces)}]


def decode_rate(stats: Stats) -> float | None:
    """Tokens of decode steps per second of decode steps; None if none ran."""
    if not stats.decode_seconds:
        return None
    return stats.decode_tokens / stats.decode_seconds


def _acceptance(length: float | None, by_position: list[float]) -> str:
    shares = " ".join(f"{share:.0%}" for share in by_position)
    return f"{length:.2f} tokens a round, the bonus token included; by position {shares}"


def comparison(reports: dict[str, dict[str, Any]], identical: bool) -> Table:
    """Reports of `stream` side by side, and whether the tokens are the same in all of them."""
    table = Table(title_justify="left", box=None, padding=(0, 2))
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")

    def row(name: str, figure: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(name, *(figure(report) for report in reports.values()))

    def stat(name: str, form: Callable[[Any], str]) -> Callable[[dict[str, Any]], str]:
        return lambda report: "-" if report["stats"][name] is None else form(report["stats"][name])

    row("tokens/s", lambda r: "-" if r["tokens_per_second"] is None else f"{r['tokens_per_second']:.1f}")
    row("target steps", stat("decode_steps", str))
    row("acceptance length, bonus included", stat("mean_acceptance_length", "{:.2f}".format))
    row("hit rate", stat("expert_cache_hit_rate", "{:.1%}".format))
    row("cold bytes", stat("cold_bytes", format_bytes))
    row("waited for experts", stat("exposed_fetch_seconds", lambda s: f"{s * 1e3:.1f} ms"))
    table.add_row("identical", f"{'yes' if identical else 'NO'}", "")
    return table


def stats_table(stats: Stats) -> Table:
    """What the expert cache did, for people."""
    table = Table(title="expert cache", title_justify="left", show_header=False, box=None, padding=(0, 2))

    def row(name: str, value: str) -> None:
        table.add_row(name, value)

    rate, hit_rate = decode_rate(stats), stats.expert_cache_hit_rate
    row("decode speed", "-" if rate is None else f"{rate:.1f} tokens/s over {stats.decode_steps} steps")
    if stats.acceptance_by_position is not None:
        row("acceptance", _acceptance(stats.mean_acceptance_length, stats.acceptance_by_position))
    home = f"for {stats.num_offloaded_experts} experts in host memory or on disk"
    row("slots", f"{stats.expert_slots_total} {home if stats.num_offloaded_experts else 'hold all experts'}")
    row("resident bytes", format_bytes(stats.expert_occupancy_bytes))
    hits = f"{stats.expert_hits} of {stats.expert_accesses} accesses"
    row("hit rate", "-" if hit_rate is None else f"{hit_rate:.1%} ({hits})")
    row("cold bytes", f"{format_bytes(stats.cold_bytes)} decode, {format_bytes(stats.prefill_cold_bytes)} prefill")
    row("evictions", f"{stats.evictions} ({stats.expert_overflow} misses overflowed their layer's slots)")
    exposed = stats.exposed_fetch_seconds
    row(
        "exposed fetch", "-" if exposed is None else f"{exposed * 1e3:.1f} ms waited for expert bytes, prefill included"
    )
    speed = stats.measured_h2d_bytes_per_second
    row("copy path", "not probed" if speed is None else f"{format_bytes(speed)}/s, measured at start")
    return table
