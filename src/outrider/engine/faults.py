"""What a GPU raises, in a sentence."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outrider.errors import ConfigError, DeviceError


@contextmanager
def device_faults(doing: str) -> Iterator[None]:
    """Raises: ConfigError where memory ran out, DeviceError for anything else that CUDA reports, while `doing`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU ran out of memory while {doing} ({_first_line(error)}); "
            "lower --expert-slots, --max-context or max_batch, or raise --gpu-memory"
        ) from error
    except RuntimeError as error:
        if not isinstance(error, torch.AcceleratorError) and "Triton Error [CUDA]" not in str(error):
            raise
        raise _lost(doing, error) from error
    except _launch_errors() as error:
        raise _lost(doing, error) from error


def _launch_errors() -> tuple[type[Exception], ...]:
    """What cuda-core raises where a kernel cannot be launched; none if nothing has loaded it."""
    utils = sys.modules.get("cuda.core._utils.cuda_utils")
    return () if utils is None else (utils.CUDAError,)


def _lost(doing: str, error: Exception) -> DeviceError:
    return DeviceError(
        f"the GPU failed while {doing} ({_first_line(error)}); this process cannot use it any more: start again, "
        "and look at nvidia-smi and the system's log if it happens twice"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
