"""Every kernel of a captured round compiles for every supported card, within its registers and shared memory. No GPU.

The launches of a whole round are recorded on tensors without data, for both model families at their true shapes, in the
smallest and the largest row bucket. So a kernel that a round launches is compiled here exactly as it is launched.
Triton compiles only in a process that was not told to interpret: each card has a process of its own.
"""

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""KiB of shared memory that a block may have, static and dynamic, by compute capability."""
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}


@pytest.mark.parametrize("capability", SHARED)
def test_a_round_compiles(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, str(capability)],
            env=environment | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout)
    misfits = [str(kernel) for kernel in kernels["compiled"] if not fits(kernel, capability)]
    assert not misfits, "\n".join(misfits)
    assert kernels["forgotten"] == []


def fits(kernel: dict[str, Any], capability: int) -> bool:
    """Whether a block of it can run on the card, without serious spills."""
    few = kernel["registers"] <= min(255, 65536 // kernel["threads"]) and kernel["stack"] <= 64
    return few and kernel["shared"] <= SHARED[capability] * 1024


def record() -> tuple[list[tuple[Any, tuple[Any, ...], dict[str, Any]]], list[tuple[Any, int, int]]]:
    """The launches of rounds: (function, arguments, options) of Triton's, (kernel, threads, shared bytes) of CUDA's."""
    from triton.runtime.jit import JITFunction

    from outrider.kernels.device.cuda import CudaKernel

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    cuda: list[tuple[Any, int, int]] = []
    JITFunction.run = lambda self, *args, grid, warmup, **given: launches.append((self, *bound(self, args, given)))
    CudaKernel.launch = lambda self, grid, threads, shared, *args: cuda.append((self, threads, shared))  # type: ignore[method-assign]
    for number, (config, policy) in enumerate(models()):
        for rows in (16, 32, 64, 512) if number == 0 else (16, 512):
            run_round(config, policy, rows)
    return launches, cuda


def bound(function: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments in the order of the parameters, and what is left of the keywords: the compiler's options."""
    names = function.arg_names[len(args) :]
    return (*args, *(given[name] for name in names)), {n: v for n, v in given.items() if n not in names}


def models() -> Iterator[tuple[Any, Any]]:
    """(config, policy): both families, each once as it is published, once with the other branches of its kernels."""
    from outrider.checkpoint.presets import load_config

    gpt_oss, qwen = load_config("gpt-oss-20b"), load_config("qwen3-coder-30b-a3b")
    yield gpt_oss, "decayed-lfu"
    yield qwen, "decayed-lfu"
    yield replace(gpt_oss, mxfp4_experts=False), "lru"
    yield replace(qwen, normalize_top_k=False), "lru"


def run_round(config: Any, policy: Any, most: int) -> None:
    """A queued round of the model in the bucket of `most` rows, on tensors without data."""
    from outrider.bench.replay import Replayed
    from outrider.checkpoint.inventory import dense_tensors
    from outrider.engine.build_device import expert_kernel
    from outrider.engine.queued_rounds import QueuedRounds
    from outrider.experts.device_provider import DeviceProvider
    from outrider.experts.home import Home
    from outrider.kernels.device.mxfp4 import Mxfp4Experts
    from outrider.kernels.device.stamp import stamp
    from outrider.kvcache.pages import PagePool
    from outrider.kvcache.storage import KVStorage
    from outrider.models.device_decoder import Buffers, DeviceDecoder, LongBuffers
    from outrider.models.long_prompt import LongPrompt
    from outrider.models.rows import Rows

    meta, dtype = torch.device("meta"), torch.bfloat16
    shapes = {name: stored.shape for name, stored in dense_tensors(config).items()}
    decoder = DeviceDecoder(config, lambda name: torch.empty(shapes[name], dtype=dtype, device=meta), 4096)
    kernel = expert_kernel(config, dtype)
    home = Home([0, 1], config.num_experts, 1 << 10, pinned=False)
    slots = dict.fromkeys((0, 1), config.num_experts // 2)
    provider = DeviceProvider(kernel, home, {}, slots, config.num_experts, config.experts_per_token, most, policy, meta)
    provider._layers = {layer: min(layer, 1) for layer in range(config.num_layers)}
    trace = torch.empty(64, config.num_layers, config.experts_per_token, dtype=torch.uint8, device=meta)
    rows = Rows(most, most, 256, meta)
    taps = (1, 2, 3, 4, 5)
    buffers = Buffers(config, most, most, taps, dtype, None)
    kv = KVStorage(config, PagePool(256), dtype, meta)
    replayed, drafter = Replayed(provider, trace), drafter_of(decoder, most)

    def forward(bucket: Buffers) -> None:
        decoder.forward(rows, bucket, kv, replayed)

    for draft, width in ((None, 1), (drafter, drafter.config.num_drafts + 1)):
        sequences = most // drafter.config.block_size
        QueuedRounds(
            decoder.head, rows, {most: buffers}, forward, provider, draft, width, sequences, graphs=False
        )._run(most, most)
    provider._states = [provider._states[min(layer, 1)] for layer in range(config.num_layers)]
    for long_rows in (512, 4096):
        whole = LongBuffers(config, long_rows, buffers, taps, dtype, meta)
        long = LongPrompt(decoder, kv, provider.streamed(long_rows), whole, 256, graphs=False)
        for step in (*long._steps[:3], long.commit):
            step()
    stamp(torch.empty(8, dtype=torch.int64, device=meta), 3)
    if isinstance(kernel, Mxfp4Experts):
        for columns in (1, 2, 4):
            wider = Mxfp4Experts(kernel._shape, columns)
            wider.run(buffers.h, provider._work, provider._work.resident, 1, buffers.inner, buffers.expert_out)


def drafter_of(decoder: Any, most: int) -> Any:
    """A drafter for `decoder`'s target, in the shape of the published ones but one layer deep."""
    from outrider.checkpoint.draft import draft_tensors
    from outrider.config import DraftConfig
    from outrider.kvcache.pages import PagePool
    from outrider.kvcache.storage import KVStorage
    from outrider.spec.device_drafter import DeviceDrafter

    target, meta, dtype = decoder.config, torch.device("meta"), torch.bfloat16
    gpt_oss = target.family == "gpt_oss"
    config = DraftConfig(
        8 if gpt_oss else 16, 1, (1, 2, 3, 4, 5), target.num_layers, target.vocab_size, target.vocab_size,
        target.hidden_size, 1, target.num_heads, target.num_kv_heads, target.head_dim, 7680 if gpt_oss else 6144, 1e-5,
        1e4, "bfloat16", (None,), (False,), attention_bias=gpt_oss,
    )  # fmt: skip
    shapes = draft_tensors(config)
    context = KVStorage(config, PagePool(256), dtype, meta)
    sequences = most // config.block_size
    return DeviceDrafter(
        config, lambda name: torch.empty(shapes[name], dtype=dtype, device=meta), decoder.embedding, decoder.head, None,
        context, most, sequences, 4096,
    )  # fmt: skip


def compile_triton(
    capability: int, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """Each distinct launch once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    seen = set()
    for function, args, options in launches:
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attrs = {}
        for index, (parameter, value) in enumerate(zip(function.params, args, strict=True)):
            signature[parameter.name] = kind = "constexpr" if parameter.is_constexpr else kind_of(value)
            if kind == "constexpr":
                constants[parameter.name] = value
            elif divisible(value):
                attrs[(index,)] = [["tt.divisibility", 16]]
        identity = (function.__name__, function.__module__, str(signature), str(constants), str(attrs), str(options))
        if identity in seen:
            continue
        seen.add(identity)
        source = ASTSource(function, signature, constants, attrs)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        yield {
            "kernel": f"{function.__module__}.{function.__name__}",
            "shared": compiled.metadata.shared,
            "threads": 32 * compiled.metadata.num_warps,
            **resources(compiled.asm["cubin"]),
        }


def kind_of(value: Any) -> str:
    """Triton's type of a launch's argument: None and 1 become constants."""
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, bool | float):
        return "i1" if isinstance(value, bool) else "fp32"
    if value is None or value == 1:
        return "constexpr"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def divisible(value: Any) -> bool:
    """Whether Triton knows of an address or an integer that 16 divides it. Storage begins at such an address."""
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return not isinstance(value, bool | float) and value % 16 == 0


def compile_cuda(capability: int, launches: list[tuple[Any, int, int]]) -> Iterator[dict[str, Any]]:
    """Each distinct kernel once."""
    from outrider.kernels.device.cuda import compile_cubin

    distinct = dict.fromkeys((k.source, tuple(k.macros.items()), threads, shared) for k, threads, shared in launches)
    for source, macros, threads, shared in distinct:
        used = resources(compile_cubin(source, macros, capability).code)
        static = used["static"] - (1024 if capability >= 90 else 0)  # the system's own, which is counted from there on
        yield {"kernel": source, "macros": macros, "threads": threads, **used, "shared": shared + static}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, bytes of stack and bytes of static shared memory of the one kernel in `cubin`."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    fields = dict(field.split(":") for field in text.stdout.split() if field.startswith(("REG:", "STACK:", "SHARED:")))
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"]), "static": int(fields["SHARED"])}


def every_kernel() -> set[str]:
    """All Triton kernels of the modules that rounds launch from, and the CUDA files beside them."""
    from triton.runtime.jit import JITFunction

    import outrider.kernels.device as device

    modules = [f"outrider.kernels.device.{module.name}" for module in pkgutil.iter_modules(device.__path__)]
    found = {file.name for folder in device.__path__ for file in Path(folder).glob("*.cu")}
    for name in [*modules, "outrider.bench.replay"]:
        members = vars(importlib.import_module(name)).values()
        found |= {f"{name}.{m.__name__}" for m in members if isinstance(m, JITFunction) and m.__module__ == name}
    return found


def main(capability: int) -> None:
    known = every_kernel()
    launches, cuda = record()
    compiled = [*compile_triton(capability, launches), *compile_cuda(capability, cuda)]
    forgotten = sorted(known - {kernel["kernel"] for kernel in compiled})
    json.dump({"compiled": compiled, "forgotten": forgotten}, sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]))
