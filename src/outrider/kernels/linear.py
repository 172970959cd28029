"""Dense projection whose rows do not know each other.

A row's bits must not depend on how many rows are computed beside it, or speculation and batching would change tokens.
Matrix libraries take other paths for very few rows (a vector product sums in another order), so rows are padded to
tiles of `ROW_TILE`; from there on the CPU library gives each row the same bits in any batch (tests pin it).
"""

import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16


def pad_rows(x: Tensor) -> Tensor:
    """`x` [rows, ...] with zero rows up to a multiple of `ROW_TILE`."""
    missing = -x.shape[0] % ROW_TILE
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out]; all of one dtype. Returns [rows, out]."""
    return F.linear(pad_rows(x), weight, bias)[: x.shape[0]]
