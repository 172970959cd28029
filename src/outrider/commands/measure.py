"""`cache-sim` and `bench`: figures, with where and how they were taken."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outrider.commands.options import (
    Device,
    Draft,
    Driver,
    Dtype,
    Json,
    MaxTokens,
    Model,
    Output,
    Threads,
    given_ids,
)
from outrider.commands.run import DEMO_PROMPT
from outrider.config import parse_slots, parse_width
from outrider.console import errors, progress_bars, show
from outrider.errors import ConfigError


def cache_sim(
    trace: Annotated[Path, typer.Argument(help="Recorded routing: .npz, .jsonl, .csv or .csv.gz.")],
    fractions: Annotated[str, typer.Option(help="Shares of each layer's experts that have a slot.")] = "25%,50%,75%",
    tokens: Annotated[int, typer.Option(help="Replay at most this many tokens, longest runs first; 0: all.")] = 4000,
    warmup: Annotated[
        int, typer.Option(help="Tokens at the start of each run that are replayed but not counted.")
    ] = 32,
    keep_cache: Annotated[bool, typer.Option(help="Do not empty the cache between runs.")] = False,
    num_experts: Annotated[int | None, typer.Option(help="Experts a layer, where the trace does not say.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves to this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Replay recorded routing through LRU, LFU, decayed LFU and Belady's optimum."""
    from outrider.bench import cache_sim as sim
    from outrider.bench.traces import read_trace

    shares = [_share(share) for share in fractions.split(",")]
    recorded = read_trace(trace, num_experts)
    with progress_bars(unit="tokens") as progress:
        result = sim.simulate(
            recorded,
            shares,
            warmup=warmup,
            max_tokens=tokens or None,
            keep_cache=keep_cache,
            progress=partial(progress, "replaying"),
        )
    if plot is not None:
        sim.plot(result, plot)
        errors.print(f"wrote {plot}")
    show(result, sim.render, as_json)


def residency(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = DEMO_PROMPT,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead of text: 1,2,3.")] = None,
    expert_slots: Annotated[str, typer.Option(help="Residencies to measure.")] = "100%,75%,50%,25%",
    policies: Annotated[str, typer.Option(help="Policies to measure.")] = "decayed-lfu,lru",
    draft: Draft = None,
    widths: Annotated[str, typer.Option(help="Rows of a verify to measure: off,2,4,auto. 'off' is plain.")] = "off",
    device: Device = "auto",
    driver: Driver = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    max_tokens: MaxTokens = 128,
    repeats: Annotated[int, typer.Option(help="Runs a row.")] = 5,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Decode with fewer and fewer experts resident: speed, hit rate, cold bytes, and whether a token changes."""
    from outrider.bench import residency as bench

    given = prompt if prompt_ids is None else given_ids(prompt_ids)
    with progress_bars(unit="settings") as progress:
        result = bench.bench_residency(
            model,
            given,
            expert_slots.split(","),
            policies.split(","),
            max_tokens,
            repeats,
            progress,
            draft,
            [parse_width(width) for width in widths.split(",")],
            device=device,
            driver=driver,
            dtype=dtype,
            threads=threads,
        )
    show(result, bench.render, as_json, output)


def kernels(
    repeats: Annotated[int, typer.Option(help="Replays a row.")] = 9,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """The kernels of expert memory alone on this GPU, beside the limits that their bytes imply."""
    from outrider.bench import kernels as bench

    with progress_bars(unit="kernels") as progress:
        result = bench.bench_kernels(repeats, progress)
    show(result, bench.render, as_json, output)


def step(
    model: Annotated[str, typer.Argument(help="Preset such as gpt-oss-20b, or a config.json.")],
    expert_slots: Annotated[str, typer.Option(help="Residencies to measure.")] = "100%,75%,50%,25%",
    context: Annotated[str, typer.Option(help="Tokens before the measured ones: 1024,8192.")] = "1024",
    routing: Annotated[
        str, typer.Option(help="own (the random router's), uniform (drawn), or a recorded trace; several by comma.")
    ] = "uniform",
    policies: Annotated[str, typer.Option(help="Policies to measure.")] = "decayed-lfu",
    ablate: Annotated[bool, typer.Option(help="Also without overlap, and without graphs.")] = False,
    repeats: Annotated[int, typer.Option(help="Runs a row.")] = 7,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Decoding steps of a full-size synthetic target on this GPU, beside what cold bytes alone would cost."""
    from outrider.bench import step as bench

    ways = [(True, True), (False, True), (True, False)] if ablate else [(True, True)]
    settings = [
        bench.Setting(slots, int(length), routes, policy, overlap, graphs)  # type: ignore[arg-type]
        for graphs in (True, False)
        for length in context.split(",")
        for routes in routing.split(",")
        for slots in expert_slots.split(",")
        for policy in policies.split(",")
        for overlap in (True, False)
        if (overlap, graphs) in ways
    ]
    with progress_bars(unit="settings") as progress:
        result = bench.bench_step(model, settings, repeats, progress)
    show(result, bench.render, as_json, output)


def dflash_round(
    model: Annotated[str, typer.Argument(help="Preset whose draft's shape is known, such as gpt-oss-20b.")],
    expert_slots: Annotated[str, typer.Option(help="Residencies to measure.")] = "100%,50%,25%",
    context: Annotated[int, typer.Option(help="Tokens before the first that is measured.")] = 1024,
    routing: Annotated[str, typer.Option(help="own, uniform, or a recorded trace.")] = "uniform",
    trace: Annotated[Path | None, typer.Option(help="Also write a profiler's trace here, for Perfetto.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs a row.")] = 7,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """DFlash rounds of a full-size synthetic target and draft on this GPU: draft, verify, accept."""
    from outrider.bench import dflash_round as bench

    with progress_bars(unit="residencies") as progress:
        result = bench.bench_round(model, expert_slots.split(","), context, routing, repeats, trace, progress)
    show(result, bench.render, as_json, output)


def timeline(
    model: Annotated[str, typer.Argument(help="Preset such as gpt-oss-20b, or a result of this command to draw.")],
    expert_slots: Annotated[str, typer.Option(help="Experts that are resident.")] = "50%",
    routing: Annotated[str, typer.Option(help="own, uniform, or a recorded trace.")] = "uniform",
    context: Annotated[int, typer.Option(help="Tokens before the step.")] = 1024,
    plot: Annotated[Path | None, typer.Option(help="Draw its first layers here (needs matplotlib).")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Where a decoding step of a full-size synthetic target spends its time, by this GPU's own clock."""
    from outrider.bench import timeline as bench

    written = model.endswith(".json") and Path(model).is_file() and '"spans"' in Path(model).read_text()
    result = (
        bench.read_timeline(Path(model)) if written else bench.bench_timeline(model, expert_slots, routing, context)
    )
    if plot is not None:
        bench.plot(result, plot)
        errors.print(f"wrote {plot}")
    show(result, bench.render, as_json, output)


def prefill(
    model: Annotated[str, typer.Argument(help="Preset such as gpt-oss-20b, or a config.json.")],
    expert_slots: Annotated[str, typer.Option(help="Residencies to measure.")] = "100%,50%",
    tokens: Annotated[str, typer.Option(help="Lengths of the prompts.")] = "16,128,512,4096",
    routing: Annotated[
        str, typer.Option(help="Of the decoding beside: own, uniform, or a recorded trace.")
    ] = "uniform",
    repeats: Annotated[int, typer.Option(help="Runs a row.")] = 5,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Prompts of a full-size synthetic target on this GPU, and what they do to the cache of a running decode."""
    from outrider.bench import prefill as bench

    lengths = [int(length) for length in tokens.split(",")]
    with progress_bars(unit="prompts") as progress:
        result = bench.bench_prefill(model, expert_slots.split(","), lengths, routing, repeats, progress)
    show(result, bench.render, as_json, output)


def tables(
    results: Annotated[Path, typer.Argument(help="Folder of result files, one folder a device below it.")],
) -> None:
    """Print the Markdown of all results, which is BENCHMARKS.md."""
    from outrider.bench.tables import markdown

    sys.stdout.write(markdown(results))


def _share(text: str) -> float:
    fraction = parse_slots(text).fraction if text.strip().endswith("%") else None
    if fraction is None:
        raise ConfigError(f"--fractions takes shares such as 25%,50%, not '{text}'")
    return fraction
