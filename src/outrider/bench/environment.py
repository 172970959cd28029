"""Where a measurement was taken: every result carries this beside its figures.

`OUTRIDER_COMMIT` names the commit where the source has travelled without its history.
"""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from outrider import __version__


def environment() -> dict[str, Any]:
    """Device, driver, versions, commit and command; what cannot be told is None."""
    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _processor(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else None,
        "threads": torch.get_num_threads(),
        "versions": {
            "outrider": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": version("triton"),
            "transformers": version("transformers"),
        },
        "commit": os.environ.get("OUTRIDER_COMMIT")
        or _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"),
        "command": _command(sys.argv[1:]),
    }


def _command(arguments: list[str]) -> str:
    """The command that measured; where its result was written does not matter to who runs it again."""
    kept = [a for before, a in zip(["", *arguments], arguments, strict=False) if "--output" not in (before, a)]
    return shlex.join(["outrider", *kept])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
