"""S3: what was prefetched for a verify, against what its routers asked for and what of it was kept."""

from collections.abc import Iterable, Mapping, Sequence

from outrider.core import ExpertKey
from outrider.stats import RouteAheadStats

Layers = dict[int, set[int]]


class RouteAheadStatistics:
    """A `core.RouteSink`. `expert_nbytes` gives exact sizes; without it byte figures are None."""

    def __init__(self, expert_nbytes: Mapping[ExpertKey, int] | None = None) -> None:
        self._nbytes = expert_nbytes
        self._ahead: Layers = {}
        self._predicted: Layers = {}
        self._routes: dict[int, Sequence[Sequence[int]]] = {}
        self._open = False
        self.reset()

    def reset(self) -> None:
        """Zero all counts; the open step stays."""
        self._steps = self._layers = 0
        self._actual = self._covered = 0
        self._counts = {"predicted": 0, "kept": 0, "wasted": 0}
        self._bytes = {"predicted": 0, "kept": 0, "wasted": 0}

    def predict(self, keys: Iterable[ExpertKey]) -> None:
        """Experts that were prefetched for the open step, or for the next one if none is open."""
        target = self._predicted if self._open else self._ahead
        for key in keys:
            target.setdefault(key.layer, set()).add(key.expert)

    def begin_step(self) -> None:
        """A step begins, with what was predicted since the last one; what was not committed is dropped."""
        self._predicted, self._ahead = self._ahead, {}
        self._routes = {}
        self._open = True

    def abandon(self) -> None:
        """The open step failed; what was predicted for it is predicted for the next one."""
        for layer, experts in self._predicted.items():
            self._ahead.setdefault(layer, set()).update(experts)
        self._predicted, self._open = {}, False

    def observe(self, layer: int, routes: Sequence[Sequence[int]]) -> None:
        """The experts of each row in `layer`. Raises: RuntimeError outside a step."""
        if not self._open:
            raise RuntimeError("no step is open; call begin_step first")
        self._routes[layer] = routes

    def commit(self, kept_rows: Sequence[int]) -> None:
        """Count the open step; rows of `kept_rows` that do not exist are ignored.

        Raises: RuntimeError outside a step.
        """
        if not self._open:
            raise RuntimeError("no step is open; call begin_step first")
        self._open = False
        self._steps += 1
        self._layers += len(self._routes)
        for layer in self._routes.keys() | self._predicted.keys():
            rows = self._routes.get(layer, ())
            predicted = self._predicted.get(layer, set())
            actual = {expert for row in rows for expert in row}
            used = {expert for row in kept_rows if 0 <= row < len(rows) for expert in rows[row]}
            self._actual += len(actual)
            self._covered += len(predicted & actual)
            self._add("predicted", layer, predicted)
            self._add("kept", layer, predicted & used)
            self._add("wasted", layer, predicted - used)

    def stats(self) -> RouteAheadStats:
        """The sums so far; reading changes nothing."""
        counts, sizes = self._counts, self._bytes if self._nbytes is not None else dict.fromkeys(self._bytes)
        return RouteAheadStats(
            steps=self._steps,
            layers_observed=self._layers,
            **counts,
            actual=self._actual,
            covered=self._covered,
            coverage=self._covered / self._actual if self._actual else None,
            waste_ratio=counts["wasted"] / counts["predicted"] if counts["predicted"] else None,
            route_ahead_predicted_bytes=sizes["predicted"],
            route_ahead_kept_bytes=sizes["kept"],
            route_ahead_wasted_bytes=sizes["wasted"],
        )

    def _add(self, what: str, layer: int, experts: set[int]) -> None:
        self._counts[what] += len(experts)
        if self._nbytes is not None:
            self._bytes[what] += sum(self._nbytes[ExpertKey(layer, expert)] for expert in experts)
