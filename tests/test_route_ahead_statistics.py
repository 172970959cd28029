"""S3 with its numbers: coverage, waste and bytes of what was prefetched for a verify."""

import pytest

from outrider.core import ExpertKey
from outrider.route_ahead.statistics import RouteAheadStatistics
from outrider.stats import RouteAheadStats

ROWS = [[0, 1], [2, 5], [5, 7]]  # the union is {0, 1, 2, 5, 7}


def keys(*experts: int, layer: int = 0) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def verified(kept: int, predicted: list[ExpertKey], sizes: dict[ExpertKey, int] | None = None) -> RouteAheadStats:
    """One step whose routes are `ROWS` in layer 0, of which the first `kept` rows stay."""
    statistics = RouteAheadStatistics(sizes)
    statistics.predict(predicted)
    statistics.begin_step()
    statistics.observe(0, ROWS)
    statistics.commit(range(kept))
    return statistics.stats()


@pytest.mark.parametrize(("kept", "wasted"), [(3, 0), (1, 3), (9, 0), (0, 5)])
def test_waste_follows_the_rows_that_are_kept(kept: int, wasted: int) -> None:
    stats = verified(kept, keys(0, 1, 2, 5, 7))
    assert stats.wasted == wasted
    assert stats.kept == 5 - wasted
    assert (stats.predicted, stats.actual, stats.covered, stats.coverage) == (5, 5, 5, 1.0)
    assert stats.waste_ratio == wasted / 5


def test_one_of_two_layers_prefetched_is_half_covered() -> None:
    statistics = RouteAheadStatistics()
    statistics.predict(keys(3, 4))
    statistics.begin_step()
    statistics.observe(0, [[3, 4]])
    statistics.observe(1, [[5, 6]])
    statistics.commit([0])
    stats = statistics.stats()
    assert stats.coverage == 0.5
    assert (stats.steps, stats.layers_observed, stats.actual, stats.covered) == (1, 2, 4, 2)


def test_bytes_are_exact() -> None:
    sizes = {ExpertKey(0, 0): 1024, ExpertKey(0, 1): 4096}
    statistics = RouteAheadStatistics(sizes)
    statistics.predict(keys(0, 1))
    statistics.begin_step()
    statistics.observe(0, [[0], [1]])
    statistics.commit([0])
    stats = statistics.stats()
    assert stats.route_ahead_predicted_bytes == 5120
    assert stats.route_ahead_kept_bytes == 1024
    assert stats.route_ahead_wasted_bytes == 4096


def test_what_was_not_observed_is_none() -> None:
    stats = RouteAheadStatistics().stats()
    assert stats.coverage is None and stats.waste_ratio is None
    assert stats.route_ahead_predicted_bytes is None and stats.route_ahead_wasted_bytes is None
    assert verified(3, []).waste_ratio is None and verified(3, []).coverage == 0.0


def test_beginning_a_step_drops_what_was_not_committed() -> None:
    statistics = RouteAheadStatistics()
    statistics.predict(keys(0, 1, 2))
    statistics.begin_step()
    statistics.observe(0, ROWS)
    statistics.begin_step()
    statistics.observe(0, [[6]])
    statistics.commit([0])
    stats = statistics.stats()
    assert (stats.steps, stats.predicted, stats.actual, stats.wasted) == (1, 0, 1, 0)


def test_what_is_predicted_between_two_steps_belongs_to_the_second() -> None:
    statistics = RouteAheadStatistics()
    for predicted in ([0, 1], [7]):
        statistics.predict(keys(*predicted))
        statistics.begin_step()
        statistics.observe(0, ROWS)
        statistics.commit(range(1))
    stats = statistics.stats()
    assert (stats.steps, stats.predicted, stats.kept, stats.wasted) == (2, 3, 2, 1)


def test_sums_can_be_zeroed_and_order_is_checked() -> None:
    statistics = RouteAheadStatistics()
    with pytest.raises(RuntimeError, match="no step is open"):
        statistics.commit([])
    with pytest.raises(RuntimeError, match="no step is open"):
        statistics.observe(0, ROWS)
    statistics.begin_step()
    statistics.observe(0, ROWS)
    statistics.commit([0])
    statistics.reset()
    assert statistics.stats().steps == 0 and statistics.stats().coverage is None


def test_predictions_of_a_step_count_in_it_also_in_layers_that_were_not_run() -> None:
    statistics = RouteAheadStatistics()
    statistics.predict(keys(0))
    statistics.begin_step()
    statistics.predict(keys(1))
    statistics.predict(keys(4, 5, layer=7))
    statistics.observe(0, [[0, 1]])
    statistics.commit([0])
    first = statistics.stats()
    assert (first.predicted, first.covered, first.kept, first.wasted) == (4, 2, 2, 2)
    statistics.begin_step()
    statistics.observe(0, [[0, 1]])
    statistics.commit([0])
    assert statistics.stats().predicted == 4


def test_an_abandoned_step_leaves_its_predictions_to_the_next() -> None:
    statistics = RouteAheadStatistics()
    statistics.predict(keys(0))
    statistics.begin_step()
    statistics.predict(keys(1))
    statistics.observe(0, [[0]])
    statistics.abandon()
    statistics.predict(keys(2))
    with pytest.raises(RuntimeError, match="no step is open"):
        statistics.commit([0])
    statistics.begin_step()
    statistics.observe(0, [[0, 1, 2]])
    statistics.commit([0])
    seen = statistics.stats()
    assert (seen.steps, seen.predicted, seen.covered, seen.actual) == (1, 3, 3, 3)


def test_reset_zeroes_every_count() -> None:
    statistics = RouteAheadStatistics({ExpertKey(0, e): 10 for e in range(3)})
    nothing = statistics.stats()
    statistics.predict(keys(0, 2))
    statistics.begin_step()
    statistics.observe(0, [[0, 1]])
    statistics.commit([0])
    assert statistics.stats() != nothing
    statistics.reset()
    assert statistics.stats() == nothing
