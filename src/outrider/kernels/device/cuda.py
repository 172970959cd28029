"""CUDA C++ kernels compiled at run time through NVRTC: what Triton cannot express, without a build step.

Only kernels whose speed hangs on register fragments are written this way; everything else is Triton.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Argument = Tensor | int | float
"""A tensor is passed as its address, an int as a 32-bit one, a float as float32."""


class CudaKernel:
    """The `extern "C"` function `name` of the file `source` beside this one, compiled for the current GPU at first use.

    Args:
        macros: compile-time constants.
    """

    def __init__(self, source: str, name: str, macros: dict[str, int]) -> None:
        self.source, self.name, self.macros = source, name, macros

    def launch(self, grid: tuple[int, ...], threads: int, shared: int, *args: Argument) -> None:
        """Queue one run on torch's current stream (which may be capturing), with `shared` bytes of dynamic memory."""
        from cuda.core import LaunchConfig, Stream, launch

        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        kernel = _loaded(self.source, self.name, tuple(self.macros.items()), torch.cuda.current_device())
        launch(stream, LaunchConfig(grid=grid, block=threads, shmem_size=shared), kernel, *map(_argument, args))


def compile_cubin(source: str, macros: tuple[tuple[str, int], ...], capability: int) -> Any:
    """Compile a file beside this one for a compute capability (80: 8.0), Hopper's with all that only it has; needs no
    GPU."""
    from cuda.core import Program, ProgramOptions

    folder = Path(__file__).parent
    code = (folder / source).read_text()
    defined = [(name, str(value)) for name, value in macros]
    arch = "sm_90a" if capability == 90 else f"sm_{capability}"
    options = ProgramOptions(arch=arch, std="c++17", define_macro=defined, include_path=str(folder))
    return Program(code, "c++", options).compile("cubin")


@cache
def _loaded(source: str, name: str, macros: tuple[tuple[str, int], ...], device: int) -> Any:
    from cuda.core import Device

    Device(device).set_current()
    major, minor = torch.cuda.get_device_capability(device)
    return compile_cubin(source, macros, 10 * major + minor).get_kernel(name)


def _argument(value: Argument) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return ctypes.c_int32(value) if isinstance(value, int) else ctypes.c_float(value)
