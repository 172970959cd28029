"""Where experts live when they are not in a slot: pinned host memory, or the mapped checkpoint itself.

Contract: a store copies any byte range of an expert's record into a slot and knows every expert's exact payload bytes.
It never changes after it is built, so any thread may read it.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.checkpoint import Checkpoint
from outrider.config import format_bytes
from outrider.core import ExpertKey, Progress, no_progress
from outrider.errors import ConfigError
from outrider.experts.layout import ExpertLayout


class ExpertStore(Protocol):
    """The home of all experts."""

    layout: ExpertLayout

    @property
    def expert_nbytes(self) -> Mapping[ExpertKey, int]:
        """Exact stored payload bytes of every expert."""

    def copy_range(self, key: ExpertKey, start: int, stop: int, record: Tensor) -> int:
        """Copy bytes [start, stop) of an expert's record into `record` (uint8 [record_nbytes]); bytes moved."""

    def close(self) -> None:
        """Give back what the store holds; no fetch may be under way."""


class MappedStore:
    """The memory-mapped checkpoint: costs no memory of its own, reads come from page cache or disk."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.layout = ExpertLayout.of(checkpoint.parts)
        self._checkpoint = checkpoint
        self._sources: dict[ExpertKey, list[tuple[int, Tensor]]] = {}

    @cached_property
    def expert_nbytes(self) -> Mapping[ExpertKey, int]:
        return dict.fromkeys(self._checkpoint.expert_keys(), self.layout.payload_nbytes)

    def copy_range(self, key: ExpertKey, start: int, stop: int, record: Tensor) -> int:
        moved = 0
        for offset, source in self._parts(key):
            first, last = max(start, offset), min(stop, offset + source.numel())
            if first < last:
                _copy(record[first:last], source[first - offset : last - offset])
                moved += last - first
        return moved

    def close(self) -> None:
        self._sources.clear()

    def _parts(self, key: ExpertKey) -> list[tuple[int, Tensor]]:
        """(offset in the record, bytes as a flat uint8 view) of each part."""
        if key not in self._sources:
            self._sources[key] = [
                (p.offset, self._checkpoint.expert_part(key, p.part.name).reshape(-1).view(torch.uint8))
                for p in self.layout.parts
            ]
        return self._sources[key]


def _copy(target: Tensor, source: Tensor) -> None:
    if target.is_cpu:
        # torch would start a team of threads of its own for this, which fights with the team that computes.
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


class PinnedStore:
    """A copy of all records in page-locked host memory, one buffer a layer, for DMA at full speed.

    Raises: ConfigError if the machine does not let that many bytes be pinned.
    """

    def __init__(self, source: MappedStore, progress: Progress = no_progress) -> None:
        self.layout = source.layout
        self.expert_nbytes = source.expert_nbytes
        keys = list(self.expert_nbytes)
        experts = 1 + max(key.expert for key in keys)
        self._records: dict[int, Tensor] = {}
        for layer in dict.fromkeys(key.layer for key in keys):
            self._pin(layer, experts)
        total = len(keys) * self.layout.record_nbytes
        for done, key in enumerate(keys, start=1):
            source.copy_range(key, 0, self.layout.record_nbytes, self._records[key.layer][key.expert])
            progress("pinning experts", done * self.layout.record_nbytes, total)

    def copy_range(self, key: ExpertKey, start: int, stop: int, record: Tensor) -> int:
        record[start:stop].copy_(self._records[key.layer][key.expert, start:stop], non_blocking=True)
        return stop - start

    def close(self) -> None:
        for records in self._records.values():
            torch.cuda.cudart().cudaHostUnregister(records.data_ptr())
        self._records.clear()

    def _pin(self, layer: int, experts: int) -> None:
        # torch's pinned allocator rounds up to a power of two; registering plain memory does not.
        records = torch.empty(experts, self.layout.record_nbytes, dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(records.data_ptr(), records.numel(), 0))
        if status != 0:
            self.close()
            raise ConfigError(
                f"cannot pin {format_bytes(records.numel())} of host memory (CUDA error {status}); "
                "raise the limit of locked memory (ulimit -l), or free some memory"
            )
        self._records[layer] = records
