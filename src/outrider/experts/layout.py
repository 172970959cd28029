"""The one byte layout of an expert that loader, store, fetch and kernels share.

An expert is one contiguous record: its parts in stored form, each at a 256-byte aligned offset, so that an expert is
one address and one size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from outrider.core import ExpertPart

ALIGNMENT = 256


@dataclass(frozen=True)
class PlacedPart:
    """A part and where it lies in the record."""

    part: ExpertPart
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The part's torch dtype."""
        return torch_dtype(self.part.dtype)


@dataclass(frozen=True)
class ExpertLayout:
    """Where each part of an expert lies. `payload_nbytes` is exact, `record_nbytes` includes the padding."""

    parts: tuple[PlacedPart, ...]
    payload_nbytes: int
    record_nbytes: int

    @classmethod
    def of(cls, parts: Sequence[ExpertPart]) -> "ExpertLayout":
        """Lay out `parts` in their order."""
        placed, offset = [], 0
        for part in parts:
            nbytes = prod(part.shape) * torch_dtype(part.dtype).itemsize
            placed.append(PlacedPart(part, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(placed), sum(p.nbytes for p in placed), offset)

    def payload_between(self, start: int, stop: int) -> int:
        """Payload bytes, padding left out, of record bytes [start, stop)."""
        return sum(max(0, min(stop, p.offset + p.nbytes) - max(start, p.offset)) for p in self.parts)

    def view(self, record: Tensor) -> dict[str, Tensor]:
        """The parts of a uint8 [record_nbytes] record as tensors by name, sharing its memory."""
        return {
            p.part.name: record[p.offset : p.offset + p.nbytes].view(p.dtype).view(p.part.shape) for p in self.parts
        }


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
