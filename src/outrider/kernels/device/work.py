"""What `resolve` leaves for the expert kernels: entries (one expert each, with its address), and the pairs of each.

A *pair* is row * k + rank: one row's visit to one expert. Entries are ordered: resident experts, then fetched ones,
then those that are read where they lie; in each group by ascending expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """Of one layer.

    Attributes:
        address: int64 [entries], where the expert's record lies, in device or mapped host memory.
        start: int32 [entries + 1], first of its `pairs`.
        pairs: int32 [R * k].
        bounds: int32 [5]: 0, entries that are resident, entries in all, 0, entries in all.
        sources, targets: int64 [entries], addresses of what has to be fetched; fetches: int32 [1], how many.
    """

    address: Tensor
    start: Tensor
    pairs: Tensor
    bounds: Tensor
    sources: Tensor
    targets: Tensor
    fetches: Tensor

    @classmethod
    def empty(cls, experts: int, pairs: int, device: torch.device) -> "Work":
        """Room for the union of all `experts` and `pairs` pairs."""

        def zeros(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return cls(
            zeros(experts, torch.int64),
            zeros(experts + 1, torch.int32),
            zeros(pairs, torch.int32),
            zeros(5, torch.int32),
            zeros(experts, torch.int64),
            zeros(experts, torch.int64),
            zeros(1, torch.int32),
        )

    @property
    def resident(self) -> Tensor:
        """Bounds of the resident entries, int32 [2]."""
        return self.bounds[:2]

    @property
    def absent(self) -> Tensor:
        """Bounds of the entries that were not resident, int32 [2]."""
        return self.bounds[1:3]

    @property
    def every(self) -> Tensor:
        """Bounds of all entries, int32 [2]."""
        return self.bounds[3:]
