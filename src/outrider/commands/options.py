"""Options that several commands share, and how their text is read."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.config import DeviceName, DriverName, DtypeName, PolicyName, parse_bytes
from outrider.errors import RequestError

Model = Annotated[str, typer.Argument(help="Hub id, local folder, or 'demo'.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Output = Annotated[Path | None, typer.Option(help="Also write the JSON here.")]
Slots = Annotated[
    str | None,
    typer.Option(help="Experts that may be resident: 50%, 6GiB in all, or slots per layer. Default: what fits."),
]
GpuMemory = Annotated[str | None, typer.Option(help="Device memory that may be used: 24GiB.")]
Ram = Annotated[str | None, typer.Option(help="Host memory that may be pinned: 64GiB; the rest stays in files.")]
Policy = Annotated[PolicyName, typer.Option(help="Which resident expert is evicted.")]
Device = Annotated[DeviceName, typer.Option(help="Where to compute.")]
Driver = Annotated[DriverName, typer.Option(help="Who decides about experts: Python (host) or captured kernels.")]
Dtype = Annotated[DtypeName, typer.Option(help="auto: bfloat16 on CUDA, else float32.")]
Context = Annotated[int | None, typer.Option(help="Longest prompt + output, in tokens.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens up to this mass.")]
TopK = Annotated[int, typer.Option(help="Keep this many tokens; 0 is off.")]
Threads = Annotated[int | None, typer.Option(help="Compute threads on a CPU; default: torch's choice.")]
Seed = Annotated[int, typer.Option(help="Seed of sampling.")]
Draft = Annotated[str | None, typer.Option(help="DFlash draft of the model: hub id, local folder, or 'demo'.")]
WidthText = Annotated[str, typer.Option("--width", help="Rows of a verify: auto (the whole block), a number, or off.")]


def given_prompt(text: str | None, ids: str | None) -> str | list[int]:
    if (text is None) == (ids is None):
        raise RequestError("give either a prompt text or --prompt-ids")
    if ids is not None:
        return given_ids(ids)
    return sys.stdin.read() if text == "-" else str(text)


def given_bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def given_ids(ids: str) -> list[int]:
    try:
        return [int(token) for token in ids.split(",")]
    except ValueError as error:
        raise RequestError(f"--prompt-ids is '{ids}'; write token ids as 1,2,3") from error
