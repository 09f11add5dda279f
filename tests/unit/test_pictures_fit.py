"""The two kinds of PNG: every word lies inside the picture and beside the others, and numbers are written as people write them."""

from __future__ import annotations

import itertools
from typing import Any

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from test_report_numbers import EVENTS, write_run

from nofm.report import picture, study_figure
from nofm.report.compare import group_runs
from nofm.report.measures import MEASURES
from nofm.report.read import Run, load
from nofm.report.study import measured
from nofm.report.study_curves import curves_of

METHODS = ("dense", "srste", "ste", "asp", "gmp")


@pytest.fixture
def runs(tmp_path) -> dict[str, Run]:
    """Runs of long recipes and many layers' patterns, whose masks move by shares within one decade."""
    found = {}
    for number, method in enumerate(METHODS):
        events = [dict(event) for event in EVENTS]
        for event in events:
            if event["event"] == "train":
                event["epoch"] = event["step"] / 10
            if event["event"] == "sad":
                event["changed"] = {"a": event["step"] // 4 + number, "b": 0}
        config = {"sparsity": {"method": {"kind": method}}}
        folder = write_run(tmp_path / method, events, config=config, recipe=f"imagenet/a-network-of-a-long-name-{number}")
        found[method] = load(folder)
    return found


def words(figure: Any) -> list[tuple[str, Any]]:
    """All texts that are drawn, with their places. An axis has labels for ticks beyond its ends as well, which are not."""
    FigureCanvasAgg(figure).draw()
    beyond = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        beyond |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text() and text not in beyond]
    return [(text.get_text(), text.get_window_extent()) for text in texts]


def assert_readable(figure: Any) -> None:
    seen = words(figure)
    assert len(seen) > 15
    for text, box in seen:
        assert "$" not in text, text
        assert min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) >= -1, text
    for (one, a), (other, b) in itertools.combinations(seen, 2):
        assert not (a.x0 + 1 < b.x1 and b.x0 + 1 < a.x1 and a.y0 + 3 < b.y1 and b.y0 + 3 < a.y1), (one, other)


def test_the_curves_of_a_report(runs):
    with matplotlib.rc_context({"text.parse_math": False}):
        assert_readable(picture.figure_of(group_runs(list(runs.values()))))


def rows(runs: dict[str, Run]) -> dict[str, Any]:
    measure = MEASURES["classification"]
    return {f"{name} 2:4": ([curves_of(run, measure, False)], [measured(name, "1", run, measure)]) for name, run in runs.items()}


def test_the_figure_of_a_study(runs):
    assert_readable(study_figure.figure_of("A study", MEASURES["classification"], rows(runs)))


@pytest.mark.parametrize("alone", [(), ("dense 2:4",)], ids=["of one pattern", "dense watched by another"])
def test_a_study_draws_the_movement_of_masks_that_can_be_compared(runs, alone):
    left, middle, _ = study_figure.figure_of("A study", MEASURES["classification"], rows(runs), alone).axes
    drawn = [line.get_label() for line in middle.lines]
    assert drawn == [label for label in rows(runs) if label not in alone]
    assert [line.get_label() for line in left.lines] == list(rows(runs))
