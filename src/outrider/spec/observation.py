"""What a round reads from a target forward: the drafter's features and the experts that the router chose."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from outrider.core import ExpertKey

Union = frozenset[ExpertKey]


class Observation:
    """Collects the residual stream after `tap_layers` and every layer's routes; one for each forward."""

    def __init__(self, tap_layers: Sequence[int]) -> None:
        self._taps: dict[int, Tensor | None] = dict.fromkeys(tap_layers)
        self._routes: dict[int, Tensor] = {}

    def residual(self, layer: int, x: Tensor) -> None:
        """Keep `x` [rows, hidden] if `layer` is tapped."""
        if layer in self._taps:
            self._taps[layer] = x

    def routed(self, layer: int, expert_ids: Tensor) -> None:
        """Keep the routes int64 [rows, k] of `layer`."""
        self._routes[layer] = expert_ids

    def features(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), taps * hidden]: the taps of some rows, joined in their listed order."""
        at = torch.tensor(rows, dtype=torch.int64)
        taps = [tap for tap in self._taps.values() if tap is not None]
        if len(taps) < len(self._taps):
            raise RuntimeError("the target ran without one of the tapped layers")
        return torch.cat([tap[at.to(tap.device)] for tap in taps], dim=-1)

    def routes(self) -> dict[int, list[list[int]]]:
        """Layer -> expert ids of each row."""
        if not self._routes:
            return {}
        every = torch.cat(list(self._routes.values()), dim=1).tolist()  # one read for all layers
        stops = list(accumulate(ids.shape[1] for ids in self._routes.values()))
        spans = zip([0, *stops], stops, strict=False)
        return {layer: [row[a:b] for row in every] for layer, (a, b) in zip(self._routes, spans, strict=True)}


def union_of(routes: Mapping[int, Sequence[Sequence[int]]], rows: range) -> Union:
    """Every (layer, expert) that one of `rows` goes to."""
    return frozenset(ExpertKey(layer, e) for layer, ids in routes.items() for r in rows for e in ids[r])


def nbytes_of(union: Iterable[ExpertKey], expert_nbytes: Mapping[ExpertKey, int]) -> int:
    """Exact stored bytes of the experts in `union`.

    Raises: ValueError for one that the map does not hold.
    """
    total = 0
    for key in union:
        if key not in expert_nbytes:
            raise ValueError(f"layer {key.layer} has no expert {key.expert} of known size")
        total += expert_nbytes[key]
    return total
