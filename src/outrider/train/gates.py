"""The quality gates, measured on the exported files, as one report that the card is written from.

Contract: nothing here trains. A failed gate is recorded as failed; it does not stop the export.
"""

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.train.card import write_card
from outrider.train.evaluate import evaluate, samples, windows
from outrider.train.export import read_target
from outrider.train.prepare import Prepared
from outrider.train.target_model import TargetModel
from outrider.train.tokenizer import Vocabulary
from outrider.train.wake import wake_exported

if TYPE_CHECKING:
    from outrider.train.train_target import Trainer

BETTER_THAN_XZ = 0.20
SMALLEST_SHARE = 0.2  # of a uniform share
LARGEST_BYTES = 16_000_000
_CPU_BATCH, _CUDA_BATCH = 2, 32


def training_report(trainer: "Trainer", ready: Prepared, start: Path | None) -> dict[str, Any]:
    """What was trained, and the bits per byte of the masters rounded to bfloat16; `start` as for `train_target`."""
    masters = TargetModel(trainer.recipe.config)
    masters.load_state_dict({k: v.bfloat16().float() for k, v in trainer.model.state_dict().items()})
    return {
        "recipe": asdict(trainer.recipe),
        "before": _earlier_run(start),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "trained_tokens": trainer.step * trainer.recipe.batch * trainer.recipe.config.context,
        "steps": trainer.steps,
        "history": trainer.history,
        "training_seconds": round(trainer.seconds, 1),
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else platform.machine(),
        "torch": str(torch.__version__),
        "record": asdict(ready.record),
        "gates": {"bf16_bits_per_byte": _evaluate(masters, ready, trainer.device)["bits_per_byte"]},
    }


def _earlier_run(start: Path | None) -> dict[str, Any] | None:
    if start is None or not (start / "training.json").exists():
        return None
    old = json.loads((start / "training.json").read_text(encoding="utf-8"))
    kept = ("steps", "trained_tokens", "training_seconds", "device", "gates", "recipe", "command")
    return {key: old[key] for key in kept}


def _evaluate(model: TargetModel, ready: Prepared, device: torch.device) -> dict[str, Any]:
    rows = windows(ready.heldout, model.config.context, Vocabulary(ready.tokenizer).end_of_text)
    if device.type == "cuda":
        model.dtype = torch.bfloat16
        model.compile_blocks()
    batch = _CUDA_BATCH if device.type == "cuda" else _CPU_BATCH
    return asdict(evaluate(model.to(device), rows, ready.record.heldout_bytes, batch))


def finish(
    folder: Path, ready: Prepared, report: dict[str, Any], *, floor: float, device: torch.device, command: str
) -> dict[str, Any]:
    """Wake starved experts of the export in `folder`, measure it, write its card; returns the complete report.

    The samples are taken in float32 on the CPU.
    """
    raised = wake_exported(folder, ready.probe, floor)
    after = _evaluate(read_target(folder), ready, device)
    report = {
        **report,
        "woken": {"floor": floor, "biases": raised},
        "measured_on": device.type,
        "gates": gates(report["gates"]["bf16_bits_per_byte"], after, ready, folder),
        "routing": after["routing"],
        "samples": samples(read_target(folder), Vocabulary(ready.tokenizer)),
    }
    write_card(folder, report, command)
    return report


def shipped_bytes(folder: Path) -> int:
    """Bytes of the weights and the tokenizer's files."""
    return sum(
        p.stat().st_size for p in folder.iterdir() if p.name.startswith(("model.", "tokenizer", "chat_template"))
    )


def gates(before: float, after: dict[str, Any], ready: Prepared, folder: Path) -> dict[str, Any]:
    """The figures that must hold, and whether they do; `before` and `after` MXFP4, in bits per byte."""
    record = ready.record
    xz = 8 * record.xz_bytes / record.heldout_bytes
    smallest = min(layer["smallest_share"] for layer in after["routing"])
    size = shipped_bytes(folder)
    limit = (1 - BETTER_THAN_XZ) * xz
    return {
        "xz_bits_per_byte": xz,
        "bf16_bits_per_byte": before,
        "mxfp4_bits_per_byte": after["bits_per_byte"],
        "bits_per_byte_ok": max(before, after["bits_per_byte"]) <= limit,
        "smallest_share": smallest,
        "experts_alive": smallest >= SMALLEST_SHARE,
        "bytes": size,
        "bytes_ok": size <= LARGEST_BYTES,
    }
