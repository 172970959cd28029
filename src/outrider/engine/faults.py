"""What a GPU raises, in a sentence."""

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
    except torch.AcceleratorError as error:
        raise DeviceError(
            f"the GPU failed while {doing} ({_first_line(error)}); this process cannot use it any more: start again, "
            "and look at nvidia-smi and the system's log if it happens twice"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
