"""The memory behind the pages: one key and one value tensor a layer."""

from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.attention import KEY_SPLIT
from outrider.kvcache.pages import PAGE_SIZE, PagePool, PageTable, pages_for


class KVShape(Protocol):
    """What keys and values look like: of a target, or of a drafter, whose context lies in the same pages."""

    @property
    def num_layers(self) -> int:
        """Layers that attend."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of each."""

    @property
    def head_dim(self) -> int:
        """Size of a head."""


def kv_bytes_per_token(config: KVShape, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVStorage:
    """Keys and values [layers][pages * PAGE_SIZE, kv_heads, head_dim] on `device` for the pages of `pool`.

    Several storages may share a pool: a page then holds its tokens' keys and values in each of them, and whoever grows
    or truncates a page table does it for all. `more_pages` follow those of the pool and belong to whoever asked for
    them. Zeroed at the start, so that a page costs no memory on a CPU until
    it is used.
    """

    def __init__(
        self, config: KVShape, pool: PagePool, dtype: torch.dtype, device: torch.device, more_pages: int = 0
    ) -> None:
        shape = ((pool.num_pages + more_pages) * PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.pool = pool
        self.page_nbytes = PAGE_SIZE * kv_bytes_per_token(config, dtype)
        self._keys = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self._values = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]

    @property
    def occupancy_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self.pool.num_used * self.page_nbytes

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of `layer` themselves, each [token slots, kv_heads, head_dim]."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [rows, kv_heads, head_dim] at int64 token slots [rows]."""
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)

    def gather(self, layer: int, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of int64 `pages`, each [len(pages) * PAGE_SIZE, kv_heads, head_dim].

        From `length` tokens on they are zero: what earlier owners left there must not reach a weighted sum, where
        even a weight of zero would pass a NaN on.
        """
        keys, values = self._keys[layer], self._values[layer]
        by_page = (-1, PAGE_SIZE, *keys.shape[1:])
        keys, values = (t.view(by_page)[pages].flatten(0, 1) for t in (keys, values))
        keys[length:], values[length:] = 0, 0
        return keys, values

    def padded_pages(self, table: PageTable, beyond: int = 0) -> list[int]:
        """The table's pages, filled up with page 0 to whole attention splits that hold `beyond` more tokens."""
        splits = -(-(table.length + beyond) // KEY_SPLIT)
        return table.pages + [0] * (splits * pages_for(KEY_SPLIT) - len(table.pages))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks for zeroed pages, which cost nothing until they are written; torch.zeros writes them all.
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
