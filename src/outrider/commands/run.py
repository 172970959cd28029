"""`demo`, `generate`, `chat`: the engine at work."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.commands.options import (
    Context,
    Device,
    Draft,
    Driver,
    Dtype,
    GpuMemory,
    Json,
    MaxTokens,
    Model,
    Policy,
    Ram,
    Seed,
    Slots,
    Temperature,
    Threads,
    TopK,
    TopP,
    WidthText,
    given_bytes,
    given_prompt,
)
from outrider.config import SamplingParams, parse_width
from outrider.console import comparison, console, converse, errors, print_json, progress_bars, stats_table, stream

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

DEMO_PROMPT = 'class Stack:\n    """A stack."""\n\n    def __init__(self):\n'


def demo(
    prompt: Annotated[str, typer.Argument(help="Python code to continue.")] = DEMO_PROMPT,
    expert_slots: Slots = "50%",
    width: WidthText = "auto",
    max_tokens: MaxTokens = 128,
    as_json: Json = False,
) -> None:
    """The shipped pair writes Python, half of its experts resident, with its DFlash draft and without, side by side.

    The prompt is also completed with all experts resident; "identical" says whether all three gave the same tokens
    (exit code 1 if not).
    """
    params = SamplingParams(max_tokens=max_tokens)
    settings: dict[str, Any] = {"expert_slots": expert_slots, "threads": 1}
    with _load("demo", draft="demo", width=parse_width(width), **settings) as llm:
        if not as_json:
            sys.stdout.write(prompt)
        dflash = stream(llm, prompt, params, quiet=as_json)
    with _load("demo", **settings) as llm:
        plain = stream(llm, prompt, params, quiet=True)
    with _load("demo", threads=1) as llm:
        resident = llm.generate(prompt, params)[0].token_ids
    identical = plain["token_ids"] == dflash["token_ids"] == resident
    if as_json:
        print_json({"plain": plain, "dflash": dflash, "identical": identical})
    else:
        console.print(comparison({"plain": plain, "DFlash": dflash}, identical))
    if not identical:
        raise typer.Exit(1)


def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; '-' reads standard input.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead of text: 1,2,3.")] = None,
    draft: Draft = None,
    width: WidthText = "auto",
    expert_slots: Slots = None,
    gpu_memory: GpuMemory = None,
    ram: Ram = None,
    policy: Policy = "decayed-lfu",
    device: Device = "auto",
    driver: Driver = "auto",
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
    given = given_prompt(prompt, prompt_ids)
    params = SamplingParams(max_tokens, temperature, top_p, top_k, seed)
    options: dict[str, Any] = {"policy": policy, "device": device, "driver": driver, "dtype": dtype, "threads": threads}
    options |= {"max_context": max_context, "gpu_memory": given_bytes(gpu_memory), "ram": given_bytes(ram)}
    with _load(model, draft=draft, width=parse_width(width), expert_slots=expert_slots, **options) as llm:
        report = stream(llm, given, params, quiet=as_json)
        if as_json:
            print_json(report)
        else:
            errors.print(stats_table(llm.stats()))


def chat(
    model: Model,
    draft: Draft = None,
    width: WidthText = "auto",
    expert_slots: Slots = None,
    gpu_memory: GpuMemory = None,
    ram: Ram = None,
    policy: Policy = "decayed-lfu",
    device: Device = "auto",
    driver: Driver = "auto",
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
    options: dict[str, Any] = {"policy": policy, "device": device, "driver": driver, "dtype": dtype, "threads": threads}
    options |= {"max_context": max_context, "gpu_memory": given_bytes(gpu_memory), "ram": given_bytes(ram)}
    Tokenizer(locate(model)).check_chat()
    with _load(model, draft=draft, width=parse_width(width), expert_slots=expert_slots, **options) as llm:
        history = converse(llm, params, quiet=as_json)
        if as_json:
            print_json({"messages": history, "stats": llm.stats().to_dict()})


def _load(model: str, **options: Any) -> "LLM":
    from outrider.engine.llm import LLM

    with progress_bars() as progress:
        llm = LLM(model, progress=progress, **options)
    if llm.engine.note:
        errors.print(llm.engine.note)
    return llm
