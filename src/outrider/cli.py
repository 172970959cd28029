"""The command line. Every command is a thin shell around a library call; `--json` prints exactly one object on stdout.

Errors that a user can act on end with one sentence on stderr (or `{"error": sentence}` on stdout) and exit code 2.
"""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider import __version__
from outrider.config import DeviceName, DtypeName, PolicyName, SamplingParams, parse_bytes, parse_slots
from outrider.console import (
    console,
    converse,
    errors,
    print_json,
    progress_bars,
    show,
    show_error,
    stats_table,
    stream,
    write_json,
)
from outrider.errors import ConfigError, OutriderError, RequestError

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.engine.memory_plan import Hardware

DEMO_PROMPT = 'class Stack:\n    """A stack."""\n\n    def __init__(self):\n'
UsageError: Any = typer.BadParameter.__mro__[1]  # typer does not export what it raises for a wrong command line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Outrider serves Mixture-of-Experts models that do not fit in your GPU.",
    epilog="MODEL is a hub id, a local folder, or 'demo'. Memory is written 50%, 6GiB, or as slots per layer.",
)
Model = Annotated[str, typer.Argument(help="Hub id, local folder, or 'demo'.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Slots = Annotated[str, typer.Option(help="Experts that may be resident: 50%, 6GiB in all, or slots per layer.")]
Policy = Annotated[PolicyName, typer.Option(help="Which resident expert is evicted.")]
Device = Annotated[DeviceName, typer.Option(help="Where to compute.")]
Dtype = Annotated[DtypeName, typer.Option(help="auto: bfloat16 on CUDA, else float32.")]
Context = Annotated[int | None, typer.Option(help="Longest prompt + output, in tokens.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens up to this mass.")]
TopK = Annotated[int, typer.Option(help="Keep this many tokens; 0 is off.")]
Threads = Annotated[int | None, typer.Option(help="Compute threads on a CPU; default: torch's choice.")]
Seed = Annotated[int, typer.Option(help="Seed of sampling.")]


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Outrider serves Mixture-of-Experts models that do not fit in your GPU."""


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="Python code to continue.")] = DEMO_PROMPT,
    expert_slots: Slots = "50%",
    max_tokens: MaxTokens = 128,
    as_json: Json = False,
) -> None:
    """The shipped model writes Python with half of its experts resident; then a table of what the expert cache did.

    The same prompt is then completed with all experts resident, to see that not a token differs.
    """
    params = SamplingParams(max_tokens=max_tokens)
    with _load("demo", expert_slots=expert_slots, threads=1) as llm:
        if not as_json:
            sys.stdout.write(prompt)
        report = stream(llm, prompt, params, quiet=as_json)
        table = stats_table(llm.stats())
    with _load("demo", threads=1) as llm:
        identical = llm.generate(prompt, params)[0].token_ids == report["token_ids"]
    if as_json:
        print_json({"plain": report, "identical": identical})
    else:
        table.add_row("identical", f"{'yes' if identical else 'NO'}: the tokens with all experts resident")
        console.print(table)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; '-' reads standard input.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead of text: 1,2,3.")] = None,
    expert_slots: Slots = "100%",
    policy: Policy = "decayed-lfu",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    max_context: Context = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Complete one prompt, streamed, then show the statistics."""
    given = _prompt(prompt, prompt_ids)
    params = SamplingParams(max_tokens, temperature, top_p, top_k, seed)
    options = {"policy": policy, "device": device, "dtype": dtype, "threads": threads, "max_context": max_context}
    with _load(model, expert_slots=expert_slots, **options) as llm:
        _finish(llm, stream(llm, given, params, quiet=as_json), as_json)


@app.command()
def chat(
    model: Model,
    expert_slots: Slots = "100%",
    policy: Policy = "decayed-lfu",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    max_context: Context = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Talk to the model; the history is kept. /stats shows the statistics, /reset starts over, /exit ends.

    With --json, turns are read from standard input, a line each, and the conversation is printed at the end.
    """
    from outrider.checkpoint import locate
    from outrider.engine.tokenizer import Tokenizer

    params = SamplingParams(max_tokens, temperature, top_p, top_k, seed)
    options = {"policy": policy, "device": device, "dtype": dtype, "threads": threads, "max_context": max_context}
    Tokenizer(locate(model)).check_chat()
    with _load(model, expert_slots=expert_slots, **options) as llm:
        history = converse(llm, params, quiet=as_json)
        if as_json:
            print_json({"messages": history, "stats": llm.stats().to_dict()})


@app.command()
def inspect(model: Model, as_json: Json = False) -> None:
    """What is in a checkpoint; reads headers only."""
    from outrider.checkpoint import locate
    from outrider.checkpoint.inspect import inspect as look
    from outrider.checkpoint.inspect import render

    show(look(locate(model)), render, as_json)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Preset (gpt-oss-20b, ...), config.json, folder, hub id or 'demo'.")],
    gpu_memory: Annotated[str | None, typer.Option(help="Device memory to plan for: 24GiB.")] = None,
    ram: Annotated[
        str | None, typer.Option(help="Host memory that may be pinned: 64GiB. The rest stays on disk.")
    ] = None,
    expert_slots: Annotated[str | None, typer.Option(help="Plan for these slots instead of as many as fit.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of KV a sequence; default: the model's, at most 4096.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Sequences that run at once.")] = 1,
    hit_rate: Annotated[float | None, typer.Option(help="Expert cache hit rate; default: the resident share.")] = None,
    hardware: Annotated[str, typer.Option(help="Preset of bandwidths, such as h200 or rtx4090.")] = "h200",
    hbm: Annotated[str | None, typer.Option(help="Device memory bandwidth a second: 4.3TB.")] = None,
    h2d: Annotated[str | None, typer.Option(help="Host-to-device bandwidth a second: 55GB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk bandwidth a second: 3GB.")] = None,
    as_json: Json = False,
) -> None:
    """What fits where and how fast decoding can be at best, from config.json alone."""
    from outrider.checkpoint import locate
    from outrider.checkpoint.presets import PRESETS, load_config
    from outrider.engine.memory_plan import make_plan, render

    if ram and not gpu_memory and not expert_slots:
        raise ConfigError(
            "--ram bounds the experts that the device has no slot for; give --gpu-memory or --expert-slots"
        )
    by_name = model in PRESETS or Path(model).is_file() or ("/" not in model and model != "demo")
    made = make_plan(
        load_config(model if by_name else locate(model, config_only=True)),
        gpu_memory=parse_bytes(gpu_memory) if gpu_memory else None,
        ram=parse_bytes(ram) if ram else None,
        context=context,
        concurrency=concurrency,
        hardware=_hardware(hardware, hbm, h2d, disk),
        hit_rate=hit_rate,
        expert_slots=parse_slots(expert_slots) if expert_slots else None,
    )
    show(made, render, as_json)


@app.command()
def synth(
    config: Annotated[str, typer.Argument(help="Preset (gpt-oss-20b, ...), config.json, or a folder that holds one.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    layers: Annotated[int | None, typer.Option(help="Fewer (or more) layers than the config has.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write a random checkpoint of true shapes and bytes."""
    from outrider.checkpoint.inspect import inspect as look
    from outrider.checkpoint.inspect import render
    from outrider.checkpoint.synth import synthesize

    with progress_bars() as progress:
        synthesize(config, out, seed, progress, layers=layers)
    show(look(out), render, as_json)


@app.command()
def pack(
    model: Model,
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    experts: Annotated[Literal["mxfp4"], typer.Option(help="Format of the packed experts.")] = "mxfp4",
    as_json: Json = False,
) -> None:
    """Repack plain experts to MXFP4 and report the error of every tensor."""
    from outrider.checkpoint import locate
    from outrider.checkpoint import pack as packing

    with progress_bars() as progress:
        report = packing.pack(locate(model), out, progress)
    show(report, packing.render, as_json)


@app.command()
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


bench = typer.Typer(no_args_is_help=True, help="Measure; every result says where and how it was taken.")
app.add_typer(bench, name="bench")


@bench.command()
def residency(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = DEMO_PROMPT,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead of text: 1,2,3.")] = None,
    expert_slots: Annotated[str, typer.Option(help="Residencies to measure.")] = "100%,75%,50%,25%",
    policies: Annotated[str, typer.Option(help="Policies to measure.")] = "decayed-lfu,lru",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    max_tokens: MaxTokens = 128,
    repeats: Annotated[int, typer.Option(help="Runs a row.")] = 5,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    as_json: Json = False,
) -> None:
    """Decode with fewer and fewer experts resident: speed, hit rate, cold bytes, and whether a token changes."""
    from outrider.bench import residency as bench

    given = prompt if prompt_ids is None else _ids(prompt_ids)
    with progress_bars(unit="settings") as progress:
        result = bench.bench_residency(
            model,
            given,
            expert_slots.split(","),
            policies.split(","),
            max_tokens,
            repeats,
            progress,
            device=device,
            dtype=dtype,
            threads=threads,
        )
    if output is not None:
        write_json(output, result.to_dict())
    show(result, bench.render, as_json)


@bench.command()
def tables(
    results: Annotated[Path, typer.Argument(help="Folder of result files, one folder a device below it.")],
) -> None:
    """Print the Markdown of all results, which is BENCHMARKS.md."""
    from outrider.bench.tables import markdown

    sys.stdout.write(markdown(results))


def _load(model: str, **options: Any) -> "LLM":
    from outrider.engine.llm import LLM

    with progress_bars() as progress:
        return LLM(model, progress=progress, **options)


def _finish(llm: "LLM", report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        errors.print(stats_table(llm.stats()))


def _hardware(name: str, hbm: str | None, h2d: str | None, disk: str | None) -> "Hardware":
    """The preset with the bandwidths that were given in its place."""
    from outrider.engine.memory_plan import HARDWARE

    if name not in HARDWARE:
        raise ConfigError(
            f"hardware '{name}' is unknown; there are {', '.join(HARDWARE)}, or give --hbm, --h2d and --disk"
        )
    given = {"hbm": hbm, "h2d": h2d, "disk": disk}
    own = {f"{what}_bytes_per_second": float(parse_bytes(rate)) for what, rate in given.items() if rate}
    return replace(HARDWARE[name], **own, origin="given") if own else HARDWARE[name]  # type: ignore[arg-type]


def _share(text: str) -> float:
    fraction = parse_slots(text).fraction if text.strip().endswith("%") else None
    if fraction is None:
        raise ConfigError(f"--fractions takes shares such as 25%,50%, not '{text}'")
    return fraction


def _prompt(text: str | None, ids: str | None) -> str | list[int]:
    if (text is None) == (ids is None):
        raise RequestError("give either a prompt text or --prompt-ids")
    if ids is not None:
        return _ids(ids)
    return sys.stdin.read() if text == "-" else str(text)


def _ids(ids: str) -> list[int]:
    try:
        return [int(token) for token in ids.split(",")]
    except ValueError as error:
        raise RequestError(f"--prompt-ids is '{ids}'; write token ids as 1,2,3") from error


def main() -> None:
    """Entry point of the `outrider` command."""
    as_json = "--json" in sys.argv
    try:
        code = app(standalone_mode=False)
    except OutriderError as error:
        show_error(str(error), as_json)
        sys.exit(2)
    except UsageError as error:
        if message := error.format_message():  # a bare `outrider` has shown its help already
            show_error(f"{message.rstrip('.')}; see --help", as_json)
        sys.exit(2)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered cannot be written either
        show_error(f"the output cannot be written: {error.strerror}", as_json=False)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code or 0)
