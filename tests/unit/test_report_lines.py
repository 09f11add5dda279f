"""Lines of a figure end where there is nothing to draw: a logarithmic axis has no zero, and a mean may be no number."""

from __future__ import annotations

import math
import re

import pytest
from matplotlib.figure import Figure
from test_report_numbers import EVENTS, write_run

from nofm.report import picture, study_figure
from nofm.report.compare import Band, Stat, band, group_runs, stretches, thin_band
from nofm.report.figures import Line, curves
from nofm.report.read import load
from nofm.report.sections import learning, movement
from nofm.report.study_looks import look_of
from nofm.report.units import unit_of

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
    study_figure._draw(axes, two, 10.0, "a", look_of("dense"), positive)
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


PLAIN = [event for event in EVENTS if not event.get("ema")]


@pytest.mark.parametrize(("count", "averaging"), [(2, 0), (2, 1), (8, 7), (16, 1), (16, 15), (20, 0), (20, 20), (32, 0)])
def test_the_page_names_every_configuration_and_no_two_look_alike(count, averaging, tmp_path):
    runs = [write_run(tmp_path / f"{n}", EVENTS if n < averaging else PLAIN, config={"width": n}) for n in range(count)]
    groups = group_runs([load(run) for run in runs])
    names = [group.label for group in groups]
    drawn = [*learning(groups, ["accuracy"], {"accuracy": unit_of("accuracy")}), *movement(groups)["total"]]
    assert [each.title for each in drawn] == ["Accuracy", "Training loss", "SAD, all layers", "Flip rate"]
    for each in drawn:
        assert {key.name.removesuffix(", moving average") for key in each.legend} == set(names)
        assert len({(key.colour, key.drawn) for key in each.legend}) == len(each.legend) >= count


@pytest.mark.parametrize(("count", "named"), [(12, [f"layer {n}" for n in range(12)]), (13, ["layer 0", "layer 12"])])
def test_of_many_layers_the_page_names_the_first_and_the_last(count, named, tmp_path):
    layers = [
        {"name": f"layer {n}", "kind": "Linear", "shape": [2, 8], "pattern": "2:4", "groups": 4, "kept": 8, "note": ""}
        for n in range(count)
    ]
    changed = {layer["name"]: 2 for layer in layers}
    events = [event | {"changed": changed} if event["event"] == "sad" else event for event in EVENTS]
    (drawn,) = movement(group_runs([load(write_run(tmp_path / "run", events, layers=layers))]))["layers"]
    assert [key.name for key in drawn.legend] == named
    assert drawn.caption == ("From the first to the last of 13 layers." if count == 13 else "")
