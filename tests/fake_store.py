"""A store whose every byte is known, which logs what is read and can be stopped between two chunks."""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from outrider.core import ExpertKey, ExpertPart
from outrider.experts.fetch import HostBackend
from outrider.experts.host_provider import HostProvider
from outrider.experts.layout import ExpertLayout

PARTS = (ExpertPart("matrix", "uint8", (3, 100)), ExpertPart("bias", "bfloat16", (7,)))


class FakeStore:
    """`layers` x `experts` records of two parts (300 and 14 bytes, 768 with padding)."""

    def __init__(self, layers: int, experts: int) -> None:
        self.layout = ExpertLayout.of(PARTS)
        self._keys = [ExpertKey(layer, e) for layer in range(layers) for e in range(experts)]
        generator = torch.Generator().manual_seed(layers * 1000 + experts)
        shape = (len(self._keys), self.layout.record_nbytes)
        data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.records = dict(zip(self._keys, data, strict=True))
        self.log: list[tuple[ExpertKey, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self._turns = threading.Semaphore(0)
        self.fail = False

    @property
    def expert_nbytes(self) -> Mapping[ExpertKey, int]:
        return dict.fromkeys(self._keys, self.layout.payload_nbytes)

    def copy_range(self, key: ExpertKey, start: int, stop: int, record: Tensor) -> int:
        self.entered.release()
        while not self.gate.wait(timeout=0.002):
            if self._turns.acquire(blocking=False):
                break
        if self.fail:
            raise OSError("the disk is gone")
        self.log.append((key, start, stop))
        record[start:stop] = self.records[key][start:stop]
        return stop - start

    def step(self) -> None:
        """Let one chunk through the closed gate."""
        self._turns.release()

    def close(self) -> None:
        pass


def make_provider(
    store: FakeStore, slots: int, *, policy: str = "decayed-lfu", chunk: int = 256, experts: int | None = None
) -> HostProvider:
    """A provider with `slots` slots in each of the store's layers."""
    layers = {key.layer for key in store.records}
    count = experts or 1 + max(key.expert for key in store.records)
    backend = HostBackend(chunk)
    return HostProvider(store, dict.fromkeys(sorted(layers), slots), count, policy, backend, torch.device("cpu"))


def same_bytes(store: FakeStore, key: ExpertKey, weights: Mapping[str, Tensor]) -> bool:
    """Whether an expert's slot views hold the store's payload, byte for byte."""
    expected = store.layout.view(store.records[key])
    return all(
        torch.equal(weights[name].contiguous().view(torch.uint8), part.contiguous().view(torch.uint8))
        for name, part in expected.items()
    )
