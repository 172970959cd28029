"""The memory behind the pages: one key and one value tensor a layer."""

from math import prod

import numpy as np
import torch
from torch import Tensor

from outrider.config import ModelConfig
from outrider.kernels.attention import KEY_SPLIT
from outrider.kvcache.pages import PAGE_SIZE, PagePool, PageTable, pages_for


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVStorage:
    """Keys and values [layers][pages * PAGE_SIZE, kv_heads, head_dim] on `device`.

    Zeroed at the start, so that a page costs no memory on a CPU until it is used.
    """

    def __init__(self, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (num_pages * PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.pool = PagePool(num_pages)
        self.page_nbytes = PAGE_SIZE * kv_bytes_per_token(config, dtype)
        self._keys = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]
        self._values = [_zeros(shape, dtype, device) for _ in range(config.num_layers)]

    @property
    def occupancy_bytes(self) -> int:
        """Bytes of the pages in use."""
        return self.pool.num_used * self.page_nbytes

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

    def padded_pages(self, table: PageTable) -> list[int]:
        """The table's pages, filled up with page 0 to a whole number of attention splits."""
        splits = -(-table.length // KEY_SPLIT)
        return table.pages + [0] * (splits * pages_for(KEY_SPLIT) - len(table.pages))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks for zeroed pages, which cost nothing until they are written; torch.zeros writes them all.
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
