"""BENCHMARKS.md says what the result files say."""

from pathlib import Path

import pytest

from outrider.bench.tables import markdown
from outrider.errors import CheckpointError

ROOT = Path(__file__).parent.parent


def test_benchmarks_are_rendered_from_the_results() -> None:
    assert (ROOT / "BENCHMARKS.md").read_text() == markdown(ROOT / "benchmarks" / "results")


def test_a_broken_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "residency-x.json").write_text('{"rows": []}')
    with pytest.raises(CheckpointError, match=r"residency-x\.json"):
        markdown(tmp_path)
