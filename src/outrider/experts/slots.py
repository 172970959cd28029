"""The slots of one layer: which expert each holds, and the fetch that filled or is filling it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import ExpertWeights
from outrider.experts.fetch import Fetch
from outrider.experts.layout import ExpertLayout


@dataclass(eq=False)
class Slot:
    """A place for one expert on the device. `used`: a step has computed with the expert since it came."""

    index: int
    record: Tensor
    weights: ExpertWeights
    expert: int | None = None
    fetch: Fetch | None = None
    used: bool = False

    @property
    def loaded_by(self) -> Fetch:
        """The fetch of a slot that holds an expert."""
        assert self.fetch is not None
        return self.fetch


class LayerSlots:
    """`count` slots of layer `layer` in one uint8 [count, record_nbytes] buffer on `device`."""

    def __init__(self, layer: int, count: int, layout: ExpertLayout, device: torch.device) -> None:
        self.layer = layer
        records = torch.empty(count, layout.record_nbytes, dtype=torch.uint8, device=device)
        self.slots = [Slot(i, records[i], layout.view(records[i])) for i in range(count)]
        self.of_expert: dict[int, Slot] = {}

    def assign(self, slot: Slot, expert: int, fetch: Fetch) -> None:
        """Give an empty slot to `expert`, which `fetch` brings."""
        assert slot.expert is None and expert not in self.of_expert
        slot.expert, slot.fetch, slot.used = expert, fetch, False
        self.of_expert[expert] = slot

    def release(self, slot: Slot) -> None:
        """Empty a slot."""
        if slot.expert is not None:
            del self.of_expert[slot.expert]
        slot.expert, slot.fetch, slot.used = None, None, False
