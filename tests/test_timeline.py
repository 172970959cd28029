"""A step's timeline: stamps in their order, spans and shares from them, and a result that can be drawn later."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outrider.bench import timeline
from outrider.bench.timeline import MARKS, Span, spans_of
from outrider.cli import app
from outrider.errors import CheckpointError
from outrider.kernels.device.stamp import stamp


def log(step: int) -> torch.Tensor:
    """Two layers; the second has no fetch. Nanoseconds."""
    first = dict(zip(MARKS, (1000, 1000, 1100, 1120, 1920, 1500, 1950, 2200), strict=True))
    second = {"layer": 2200, "routed": 2700, "resolved": 2800, "resident": 3200 + step}
    lines = [[own.get(mark, 0) for mark in MARKS] for own in (first, second, {"layer": 3200 + step})]
    return torch.tensor(lines, dtype=torch.int64)


def test_spans_of_stamps() -> None:
    spans = list(spans_of(log(0)))
    assert Span("fetch", 0, 1, 120e-9, 920e-9) in spans
    assert Span("waiting for bytes", 0, 0, 500e-9, 950e-9) in spans
    assert Span("resident experts", 1, 0, 1800e-9, 2200e-9) in spans
    assert [span.what for span in spans if span.layer == 1] == ["attention and router", "resolve", "resident experts"]
    result = timeline._result("gpt-oss-20b", "50%", "uniform", 1024, [log(step) for step in (30, 0, 90)])
    assert result.step_seconds == pytest.approx(2230e-9)
    assert result.shares["resident experts"] == pytest.approx(830e-9) and result.shares[
        "absent experts"
    ] == pytest.approx(250e-9)
    table = timeline.render(result)
    assert table.row_count == 6


def test_a_result_is_drawn_later(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = timeline._result("gpt-oss-20b", "50%", "uniform", 1024, [log(0)])
    path = tmp_path / "t.json"
    path.write_text(json.dumps(result.to_dict()))
    assert timeline.read_timeline(path) == result
    done = CliRunner().invoke(app, ["bench", "timeline", str(path), "--plot", str(tmp_path / "t.png")])
    assert done.exit_code == 0 and (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    path.write_text('{"spans": []}')
    with pytest.raises(CheckpointError, match="is not a result of 'outrider bench timeline'"):
        timeline.read_timeline(path)


def test_a_stamp_is_written_where_it_belongs() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    marks = timeline.Marks(2, device)
    for layer, reached in ((0, "layer"), (0, "absent"), (1, "routed")):
        marks(layer, reached)
    places = marks.log.flatten().nonzero().flatten().tolist()
    assert places == [0, MARKS.index("absent"), len(MARKS) + MARKS.index("routed")]
    if device.type == "cuda":
        assert marks.log[0, 0] < marks.log[0, -1] < marks.log[1, 1]
    with pytest.raises(ValueError, match="not in tuple"):
        marks(0, "nowhere")
    stamp(marks.log, len(MARKS) * 2)
    assert marks.log[2, 0] > 0
