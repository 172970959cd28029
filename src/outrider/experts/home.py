"""Packed expert records in pinned host memory that the device reads by address, and the way they get there."""

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.config import format_bytes
from outrider.core import ExpertKey, Progress, no_progress
from outrider.errors import ConfigError
from outrider.experts.layout import ExpertLayout
from outrider.experts.store import MappedStore
from outrider.kernels.device.experts import ExpertKernel


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

    Raises: ConfigError if the machine does not let that many bytes be pinned.
    """

    def __init__(self, layers: list[int], experts: int, record_nbytes: int, pinned: bool = True) -> None:
        self._records: dict[int, Tensor] = {}
        self._pinned = pinned
        for layer in layers:
            records = torch.empty(experts, record_nbytes, dtype=torch.uint8)
            if pinned:
                self._register(records)
            self._records[layer] = records

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(records.numel() for records in self._records.values())

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
        for records in self._records.values():
            if self._pinned:
                torch.cuda.cudart().cudaHostUnregister(records.data_ptr())
        self._records.clear()

    def _register(self, records: Tensor) -> None:
        # torch's pinned allocator rounds up to a power of two; registering plain memory does not.
        status = int(torch.cuda.cudart().cudaHostRegister(records.data_ptr(), records.numel(), 0))
        if status != 0:
            self.close()
            raise ConfigError(
                f"cannot pin {format_bytes(records.numel())} of host memory (CUDA error {status}); "
                "raise the limit of locked memory (ulimit -l), free some memory, or run with --driver host"
            )
