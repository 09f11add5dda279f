"""The PNG of a report: every word lies inside the picture and beside the others, and numbers are written as people write them.

Studies' pictures are held to the same in test_study_figure.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from test_report_numbers import EVENTS, write_run

from nofm.report import picture
from nofm.report.compare import Group, group_runs
from nofm.report.read import Run, load

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


def configurations(folder: Path, count: int, words: str = "") -> list[Group]:
    """So many groups of one run each, with these words in their names."""
    method = {"kind": "srste"}
    return group_runs(
        [load(write_run(folder / f"{n}", config={"sparsity": {"method": method | {"mode": f"{words}{n}"}}})) for n in range(count)]
    )


def looks(axes: Any) -> list[Any]:
    return [(line.get_color(), line.get_linestyle(), line._unscaled_dash_pattern) for line in axes.lines]


@pytest.mark.parametrize("words", ["", "a rather long name ", 8 * "a name that no column has room for, "], ids=["short", "long", "longest"])
@pytest.mark.parametrize("count", [1, 2, 5, 20, 32])
def test_one_legend_of_a_report_names_all_curves_below_them_and_leaves_them_their_room(count, words, tmp_path):
    groups = configurations(tmp_path, count, words)
    figure = picture.figure_of(groups)
    assert_readable(figure)
    (legend,) = figure.legends
    assert [axes.get_legend() for axes in figure.axes] == [None, None]
    assert [" ".join(text.get_text().split()) for text in legend.get_texts()] == [group.label for group in groups]
    box = legend.get_window_extent()
    assert min(box.x0, box.y0, figure.bbox.x1 - box.x1) >= -1
    for axes in figure.axes:
        assert axes.get_tightbbox().y0 > box.y1 - 1
        assert 2.8 < axes.bbox.height / figure.dpi < 3.2, "inches, however many names there are"
        assert len(set(looks(axes))) == count, "no two alike"
    assert (box.height / figure.dpi < 1.5) or words or count > 20, "short names stand side by side"


def test_a_long_title_of_a_report_leaves_the_curves_their_room(tmp_path):
    runs = [load(write_run(tmp_path / f"{n}", recipe=f"imagenet/a-network-of-a-long-name-{n}")) for n in range(12)]
    figure = picture.figure_of(group_runs(runs))
    assert_readable(figure)
    assert figure.axes[0].get_title().count("\n") >= 4
    assert min(axes.bbox.height for axes in figure.axes) / figure.dpi > 2.8
