"""Packed expert records in pinned host memory that the device reads by address, and the way they get there."""

from collections.abc import Iterator
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from outrider.config import format_bytes
from outrider.core import ExpertKey, Progress, no_progress
from outrider.errors import ConfigError
from outrider.experts.layout import ExpertLayout
from outrider.experts.store import MappedStore
from outrider.kernels.device.experts import ExpertKernel

_HUGE_PAGE = 2 << 20


class PackedRecords:
    """Reads experts from the checkpoint and packs them on `device`, as uint8 [record_nbytes] of `layout`."""

    def __init__(self, source: MappedStore, kernel: ExpertKernel, device: torch.device) -> None:
        self.layout = ExpertLayout.of(kernel.parts())
        self.expert_nbytes = source.expert_nbytes
        self._source, self._kernel, self._device = source, kernel, device

    def read(self, key: ExpertKey) -> Tensor:
        """One packed record. Raises: ConfigError for weights that cannot be packed."""
        stored = torch.empty(self._source.layout.record_nbytes, dtype=torch.uint8)
        self._source.copy_range(key, 0, len(stored), stored)
        weights = self._source.layout.view(stored.to(self._device))
        record = torch.zeros(self.layout.record_nbytes, dtype=torch.uint8, device=self._device)
        try:
            packed = self._kernel.pack(weights)
        except ValueError as error:
            raise ConfigError(
                f"expert {key.expert} of layer {key.layer} cannot be packed: {error}; run with --driver host"
            ) from error
        for name, part in self.layout.view(record).items():
            part.copy_(packed[name])
        return record


class Home:
    """Pinned records [layers][experts, record_nbytes] with their addresses. Freed by `close`.

    They lie in huge pages where the system has them: the device's reads of small ones are 4% slower.

    Raises: ConfigError if the machine does not let that many bytes be pinned.
    """

    def __init__(self, layers: list[int], experts: int, record_nbytes: int, pinned: bool = True) -> None:
        self.nbytes = len(layers) * experts * record_nbytes
        self._memory = _huge_pages(self.nbytes)
        self._pinned = pinned
        if pinned:
            self._register()
        records = self._memory[: self.nbytes].view(len(layers), experts, record_nbytes)
        self._records: dict[int, Tensor] = dict(zip(layers, records, strict=True))

    def record(self, key: ExpertKey) -> Tensor:
        """uint8 [record_nbytes]."""
        return self._records[key.layer][key.expert]

    def addresses(self, layer: int) -> list[int]:
        """Where each expert's record lies, as the device sees it."""
        records = self._records[layer]
        return [records.data_ptr() + expert * records.shape[1] for expert in range(len(records))]

    def fill(self, records: PackedRecords, progress: Progress = no_progress) -> None:
        """Read, pack and store every expert."""
        keys = list(self.experts())
        for done, key in enumerate(keys, start=1):
            self.record(key).copy_(records.read(key))
            progress("packing experts", done * records.layout.record_nbytes, self.nbytes)

    def experts(self) -> Iterator[ExpertKey]:
        """Every expert, layer by layer."""
        return (ExpertKey(layer, e) for layer, records in self._records.items() for e in range(len(records)))

    def close(self) -> None:
        """Give the memory back; nothing may read it any more."""
        if self._pinned and self._records:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._records.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _register(self) -> None:
        status = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0))
        if status != 0:
            raise ConfigError(
                f"cannot pin {format_bytes(self.nbytes)} of host memory (CUDA error {status}); "
                "raise the limit of locked memory (ulimit -l), free some memory, or run with --driver host"
            )


def _huge_pages(nbytes: int) -> Tensor:
    """At least `nbytes` of zeroed memory, uint8, aligned to huge pages and advised to use them."""
    mapping = mmap(-1, nbytes + 2 * _HUGE_PAGE, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    mapping.madvise(MADV_HUGEPAGE)
    memory: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    first = -memory.data_ptr() % _HUGE_PAGE
    aligned: Tensor = memory[first : first + -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE]
    return aligned
