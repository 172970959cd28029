"""`inspect`, `plan`, `synth`, `pack`: checkpoints without an engine."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.commands.options import Json, Model, Seed
from outrider.config import parse_bytes, parse_slots
from outrider.console import progress_bars, show
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from outrider.engine.memory_plan import Hardware


def inspect(model: Model, as_json: Json = False) -> None:
    """What is in a checkpoint; reads headers only."""
    from outrider.checkpoint import locate
    from outrider.checkpoint.inspect import inspect as look
    from outrider.checkpoint.inspect import render

    show(look(locate(model)), render, as_json)


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
