"""Lines of a figure end where there is nothing to draw: a logarithmic axis has no zero, and a mean may be no number."""

from __future__ import annotations

import math
import re

import pytest
from matplotlib.figure import Figure

from nofm.report import picture, study_figure
from nofm.report.compare import Band, Stat, band, stretches, thin_band
from nofm.report.figures import Line, curves

VALUES = [4.0, 2.0, 0.0, 0.0, 3.0, math.nan, 5.0, 6.0]  # at steps 10, 20, ...
ABOVE_ZERO = [[10, 20], [50], [70, 80]]
FINITE = [[10, 20, 30, 40, 50], [70, 80]]


def found(values: list[float]) -> Band:
    return Band(tuple(range(10, 10 * len(values) + 1, 10)), tuple(Stat(value, None, 1) for value in values))


@pytest.mark.parametrize(("positive", "steps"), [(True, ABOVE_ZERO), (False, FINITE)], ids=["logarithmic", "linear"])
def test_stretches(positive, steps):
    parts = stretches(found(VALUES), positive)
    assert [list(part.steps) for part in parts] == steps
    assert [stat.mean for part in parts for stat in part.stats] == [VALUES[step // 10 - 1] for part in steps for step in part]
    assert stretches(found([0.0]), True) == stretches(found([]), True) == []


def test_thinning_averages_over_zeros_and_leaves_a_gap_where_all_are():
    thinned = thin_band(found([4.0, 0.0, 0.0, 0.0, 2.0, 2.0]), 3)
    assert (thinned.steps, [stat.mean for stat in thinned.stats]) == ((20, 40, 60), [2.0, 0.0, 2.0])


@pytest.mark.parametrize(("log", "count"), [(True, 3), (False, 2)], ids=["logarithmic", "linear"])
def test_a_line_of_the_page_breaks(log, count):
    svg = curves("Flip rate", "flips", [Line("a", found(VALUES), "s0")], log=log).svg
    drawn = re.findall(r"<path d=\"([^\"]*)\"[^>]*stroke: var\(--s0\); stroke-width: 1.8", svg)
    assert len(drawn) == count
    assert len(re.findall(r"<use[^>]*fill: var\(--s0\)", svg)) == log, "a step alone is a dot"


@pytest.mark.parametrize("positive", [True, False], ids=["logarithmic", "linear"])
def test_lines_of_the_pictures_break(positive):
    steps = ABOVE_ZERO if positive else FINITE
    axes = Figure().subplots()
    picture._draw(axes, "a", found(VALUES), "black", 100.0, math.inf, positive)
    assert [list(line.get_xdata()) for line in axes.lines] == steps
    assert list(axes.lines[-1].get_ydata()) == [500.0, 600.0]
    assert axes.get_legend_handles_labels()[1] == ["a"], "named once"

    axes = Figure().subplots()
    two = [dict(zip(range(10, 90, 10), VALUES, strict=True)) for _ in range(2)]
    two[1] |= {30: 1.0}  # one of two runs moves here, so there is a mean
    study_figure._draw(axes, two, 10.0, "a", {"color": "black"}, positive)
    seen = [[10, 20, 30], *steps[1:]] if positive else steps
    assert [[10 * x for x in line.get_xdata()] for line in axes.lines] == seen
    assert axes.get_legend_handles_labels()[1] == ["a"]
    assert [stat.mean for stat in band(two).stats][:3] == [4.0, 2.0, 0.5]


@pytest.mark.parametrize("log", [True, False], ids=["logarithmic", "linear"])
@pytest.mark.parametrize("values", [[0.0327, 0.0329], [3.0, 9.0], [123456.0, 123460.0], [2e-5, 3e-5], [1.0, 1.6]], ids=str)
def test_labels_of_the_page_lie_inside_their_drawing(values, log):
    svg = curves("Flip rate", "flips", [Line("a", found(values), "s0")], log=log).svg
    places = re.findall(r"<text style=\"[^\"]*text-anchor: end[^\"]*\" x=\"([\d.]+)\"[^>]*>([^<]+)</text>", svg)
    assert 2 <= len(places) <= 7
    labels = [label for _, label in places]
    assert len(set(labels)) == len(labels), "each tick has a number of its own"
    for x, label in places:
        assert float(x) >= 7.5 * len(label), f"{label!r} ends {x} px from the left edge"  # in 12.8 px type, the page's largest
