"""`outrider bench kernels`: the kernels of expert memory alone, each beside the limit that its bytes imply.

Expert weights rotate over at least 1 GB, so that no cache holds them. Everything runs in captured graphs.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich import box
from rich.table import Table

from outrider.bench.environment import environment
from outrider.bench.synthetic import random_record
from outrider.bench.timing import Times, time_eager, time_graph
from outrider.core import Progress, no_progress
from outrider.errors import ConfigError
from outrider.experts.home import Home
from outrider.experts.layout import ExpertLayout
from outrider.kernels.device.experts import ExpertKernel, ExpertShape
from outrider.kernels.device.fetch import fetch
from outrider.kernels.device.mxfp4 import Mxfp4Experts
from outrider.kernels.device.plain import PlainExperts
from outrider.kernels.device.resolve import PREFILL, Late, LayerState, resolve
from outrider.kernels.device.work import Work

GPT_OSS = ExpertShape(2880, 2880, True, 1.702, 7.0)
QWEN3_CODER = ExpertShape(2048, 768, False)
_ROTATION = 5 << 28
"""Bytes of expert records that a timing rotates over: 1.34 GB."""


@dataclass(frozen=True)
class KernelRow:
    """One measurement: seconds of one run; bytes that it has to move and the rate that follows, None for `resolve`."""

    kernel: str
    setting: str
    times: Times
    nbytes: int | None
    bytes_per_second: float | None


@dataclass(frozen=True)
class KernelResult:
    """All rows. `copy_bytes_per_second`: of a device copy (read and write), `dma_bytes_per_second`: of the copy engine
    from pinned memory."""

    copy_bytes_per_second: float
    dma_bytes_per_second: float
    rows: list[KernelRow]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


def bench_kernels(repeats: int = 9, progress: Progress = no_progress) -> KernelResult:
    """Measure on the current GPU. Raises: ConfigError if there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("bench kernels measures a CUDA GPU, and none is usable here")
    rows: list[KernelRow] = []
    jobs = [*_expert_jobs(), *_resolve_jobs(), *_fetch_jobs()]
    for done, job in enumerate(jobs, start=1):
        rows.append(job(repeats))
        progress("kernels measured", done, len(jobs))
    return KernelResult(device_copy(repeats), dma(repeats), rows, environment())


def render(result: KernelResult) -> Table:
    """The rows for people."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"Kernels on {result.environment['device']}",
        caption=f"device copy {result.copy_bytes_per_second / 1e12:.2f} TB/s, "
        f"DMA {result.dma_bytes_per_second / 1e9:.1f} GB/s, commit {result.environment['commit']}",
    )
    for name in ("kernel", "setting", "us (fastest-slowest)", "moved", "of its limit"):
        table.add_column(name, justify="left" if name in ("kernel", "setting") else "right")
    for row in result.rows:
        times = f"{row.times.median * 1e6:.1f} ({row.times.fastest * 1e6:.1f}-{row.times.slowest * 1e6:.1f})"
        moved = share = "-"
        if row.bytes_per_second is not None:
            from_host = row.kernel.startswith("fetch")
            limit = result.dma_bytes_per_second if from_host else result.copy_bytes_per_second
            unit, name = (1e9, "GB/s") if from_host else (1e12, "TB/s")
            moved, share = f"{row.bytes_per_second / unit:.2f} {name}", f"{row.bytes_per_second / limit:.0%}"
        table.add_row(row.kernel, row.setting, times, moved, share)
    return table


def _expert_jobs() -> Iterator[Callable[[int], KernelRow]]:
    kinds: tuple[tuple[str, ExpertKernel, ExpertShape, tuple[tuple[int, int], ...]], ...] = (
        ("MXFP4 experts, gpt-oss-20b", Mxfp4Experts(GPT_OSS), GPT_OSS, ((4, 1), (4, 8), (32, 8), (32, 16), (32, 32))),
        ("MXFP4 experts, Qwen3-Coder", Mxfp4Experts(QWEN3_CODER), QWEN3_CODER, ((8, 1), (50, 8), (128, 8))),
        ("bf16 experts, Qwen3-Coder", PlainExperts(QWEN3_CODER), QWEN3_CODER, ((8, 1), (8, 8), (50, 8), (128, 8))),
    )
    for name, kernel, shape, settings in kinds:
        for entries, rows in settings:
            yield partial(_experts, name, kernel, shape, entries, rows)


def _experts(name: str, kernel: ExpertKernel, shape: ExpertShape, entries: int, rows: int, repeats: int) -> KernelRow:
    """`entries` experts with `rows` rows each, whole MLP."""
    device = torch.device("cuda")
    layout = ExpertLayout.of(kernel.parts())
    turns = -(-_ROTATION // (entries * layout.record_nbytes))
    record = random_record(kernel, layout, torch.Generator(device).manual_seed(0))
    records = record.expand(turns * entries, -1).contiguous()
    works = []
    for turn in range(turns):
        work = Work.empty(entries, entries * rows, device)
        own = records[turn * entries : (turn + 1) * entries]
        work.address.copy_(torch.tensor([r.data_ptr() for r in own]))
        work.start.copy_(torch.arange(0, entries * rows + 1, rows))
        work.pairs.copy_(torch.arange(entries * rows))
        work.bounds[1:] = entries
        works.append(work)
    pairs = entries * rows
    x = torch.zeros(pairs, -(-shape.hidden // 64) * 64, dtype=torch.bfloat16, device=device)
    x[:, : shape.hidden].normal_()
    inner = torch.zeros(pairs, -(-shape.inner // 64) * 64, dtype=torch.bfloat16, device=device)
    out = torch.zeros(pairs, shape.hidden, device=device)

    def run() -> None:
        for work in works:
            kernel.run(x, work, work.resident, 1, inner, out)

    times = time_graph(run, turns, repeats)
    nbytes = entries * layout.payload_nbytes
    return KernelRow(name, f"{entries} experts x {rows} rows", times, nbytes, nbytes / times.median)


def _in_place(entries: int, copied: bool, repeats: int) -> KernelRow:
    """Experts that lie in host memory, one row each: copied into slots first, or read where they are."""
    device, kernel = torch.device("cuda"), Mxfp4Experts(GPT_OSS)
    layout = ExpertLayout.of(kernel.parts())
    home = Home([0], entries, layout.record_nbytes)
    record = random_record(kernel, layout, torch.Generator(device).manual_seed(0))
    for key in home.experts():
        home.record(key).copy_(record)
    slots = torch.zeros(entries, layout.record_nbytes, dtype=torch.uint8, device=device)
    work = Work.empty(entries, entries, device)
    work.sources.copy_(torch.tensor(home.addresses(0)))
    work.targets.copy_(torch.tensor([slot.data_ptr() for slot in slots]))
    work.address.copy_(work.targets if copied else work.sources)
    work.start.copy_(torch.arange(entries + 1))
    work.pairs.copy_(torch.arange(entries))
    work.bounds[1:] = entries
    work.fetches[0] = entries
    x = torch.randn(entries, GPT_OSS.hidden, dtype=torch.bfloat16, device=device)
    inner, out = torch.zeros_like(x), torch.zeros(entries, GPT_OSS.hidden, device=device)

    def run() -> None:
        if copied:
            fetch(work.sources, work.targets, work.fetches, layout.record_nbytes)
        kernel.run(x, work, work.resident, 1, inner, out)

    times = time_graph(run, 1, repeats)
    home.close()
    nbytes = entries * layout.record_nbytes
    what = "copied, then computed" if copied else "computed in place"
    return KernelRow(
        "fetch and MXFP4 experts", f"{entries} x gpt-oss-20b, {what}", times, nbytes, nbytes / times.median
    )


def _resolve_jobs() -> Iterator[Callable[[int], KernelRow]]:
    for rows, k, experts in ((16, 4, 32), (128, 4, 32), (64, 8, 128), (512, 8, 128)):
        yield partial(_resolve, rows, k, experts, 0)
    for misses in (1, 4, 8):
        yield partial(_resolve, 16, 4, 32, misses)


def _resolve(rows: int, k: int, experts: int, misses: int, repeats: int) -> KernelRow:
    """One lookup; with `misses`, two unions that differ by as many experts take turns in a cache that holds one."""
    device, turns = torch.device("cuda"), 20
    union = experts - misses
    slots = union if misses else experts

    def of(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    state = LayerState(
        of([*range(slots), *[-1] * (experts - slots)]),
        of(list(range(slots))),
        of([0] * experts, torch.int64),
        of([0] * slots, torch.int64),
        of([0] * experts, torch.int64),
        of([0] * 3),
        of([0] * 2 * PREFILL, torch.int64),
    )
    work, late = Work.empty(experts, rows * k, device), Late.empty(slots, device)
    cursor, prefill, count = of([0] * experts), of([0]), of([rows])
    staging = of([], torch.int64)
    spread = [expert % union for expert in range(rows * k)]
    lists = [of(spread).view(rows, k), of([(e + misses) % experts for e in spread]).view(rows, k)]

    def run() -> None:
        for turn in range(turns):
            resolve(lists[turn % 2], count, prefill, state, work, late, staging, cursor)

    times = time_graph(run, turns, repeats)
    return KernelRow("resolve", f"{rows * k} pairs, {misses} misses, {experts} experts", times, None, None)


def _fetch_jobs() -> Iterator[Callable[[int], KernelRow]]:
    for name, kernel, records in (
        ("gpt-oss-20b MXFP4", Mxfp4Experts(GPT_OSS), 1),
        ("gpt-oss-20b MXFP4", Mxfp4Experts(GPT_OSS), 8),
        ("Qwen3-Coder bf16", PlainExperts(QWEN3_CODER), 8),
    ):
        nbytes = ExpertLayout.of(kernel.parts()).record_nbytes
        yield partial(_fetch, name, nbytes, records)
    for entries in (1, 4):
        for copied in (True, False):
            yield partial(_in_place, entries, copied)


def _fetch(name: str, nbytes: int, number: int, repeats: int) -> KernelRow:
    device = torch.device("cuda")
    home = Home([0], number, nbytes)
    slots = torch.zeros(number, nbytes, dtype=torch.uint8, device=device)
    sources = torch.tensor(home.addresses(0), device=device)
    targets = torch.tensor([slot.data_ptr() for slot in slots], device=device)
    count = torch.tensor([number], dtype=torch.int32, device=device)
    times = time_graph(lambda: fetch(sources, targets, count, nbytes), 1, repeats)
    home.close()
    total = number * nbytes
    return KernelRow("fetch", f"{number} x {name}", times, total, total / times.median)


def device_copy(repeats: int) -> float:
    """Bytes per second, read and written, of a copy within device memory."""
    source = torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return 2 * source.numel() / time_eager(run, repeats).median  # captured, a copy goes through the copy engine


def dma(repeats: int) -> float:
    """Bytes per second of the copy engine from pinned host memory."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")

    def run() -> None:
        target.copy_(source, non_blocking=True)

    return source.numel() / time_graph(run, 1, repeats).median
