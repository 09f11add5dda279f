"""The picture of a study of lambdas: which rows make a curve, where its points lie, and that all of it can be read."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from test_pictures_fit import assert_readable
from test_report_numbers import EVENTS, write_run

from nofm.recipes import find
from nofm.recipes.studies import STUDIES
from nofm.report import study_lambda
from nofm.report.compare import Stat
from nofm.report.measures import MEASURES
from nofm.report.read import load
from nofm.report.study import Measured, measured
from nofm.report.study_lambda import Point, draw_lambda, lines_of
from nofm.report.study_looks import LOOKS

MEASURE = MEASURES["detection"]  # whose scores are shown a hundred times as large
PATTERNS = {"lambda 0": "1:16", "lambda 0.0002": "1:16", "lambda 0.0016": "1:16", "lambda -2e-05": "1:16", "2:4, lambda 0": "2:4"}


@pytest.fixture
def runs(tmp_path):
    """Makes runs of such scores."""
    one = measured("a row", "1", load(write_run(tmp_path / "run", EVENTS)), MEASURES["classification"])

    def made(*scores: float) -> list[Measured]:
        return [dataclasses.replace(one, seed=seed, score=score) for seed, score in enumerate(scores)]

    return made


@pytest.fixture
def rows(runs) -> dict[str, list[Measured]]:
    return {
        "dense": runs(0.95, 0.97),
        "lambda 0": runs(0.85),
        "lambda 0.0002": runs(0.86, 0.88),
        "lambda -2e-05": runs(0.84, 0.85),
        "lambda 0.0016": runs(0.89),
        "lambda 0.0064": [],
        "2:4, lambda 0": runs(0.91),
        "1:16, lambda by flip rate": runs(0.2),
        "2:4, decoupled, lambda 1": runs(0.3),
    }


def test_rows_are_a_line_from_the_smallest_lambda_on(rows):
    lines = lines_of(rows, PATTERNS)
    assert list(lines) == ["1:16", "2:4"]  # not dense, not what has no runs or tells no lambda
    assert [point.decay for point in lines["1:16"]] == [-2e-5, 0, 2e-4, 1.6e-3]
    assert lines["1:16"][2] == Point(2e-4, Stat(pytest.approx(0.87), pytest.approx(0.02 / 2**0.5), 2), (0.86, 0.88))
    assert lines["2:4"] == [Point(0.0, Stat(0.91, None, 1), (0.91,))]
    assert list(lines_of(rows)) == ["SR-STE", "2:4"]  # of a study.json from before patterns were written down


def test_there_is_no_picture_of_two_lambdas(rows, tmp_path):
    few = {label: own for label, own in rows.items() if label not in ("lambda 0", "lambda 0.0002")}
    assert lines_of(few, PATTERNS) == {}
    (tmp_path / "lambda.png").write_bytes(b"of a time when there was something")
    assert not draw_lambda("A study", MEASURE, few, tmp_path / "lambda.png", PATTERNS)
    assert not (tmp_path / "lambda.png").exists()


def test_points_lie_where_they_were_measured(rows):
    axes = study_lambda.figure_of("A study", MEASURE, rows, PATTERNS).axes[0]
    drawn = {container.get_label(): container for container in axes.containers}
    means, _, (bars,) = drawn["1:16"]
    assert means.get_xdata().tolist() == [-2e-5, 0, 2e-4, 1.6e-3]
    assert means.get_ydata().tolist() == pytest.approx([84.5, 85, 87, 89])
    assert [top - bottom for (_, bottom), (_, top) in bars.get_segments()] == pytest.approx([2 / 2**0.5, 0, 4 / 2**0.5, 0])
    dots = {
        tuple(line.get_xdata()): list(line.get_ydata())
        for line in axes.lines
        if line.get_linestyle() == "None" and line.get_marker() in "s^" and max(line.get_ydata()) < 90
    }
    assert dots[2e-4, 2e-4] == pytest.approx([86, 88])
    assert sorted(len(places) for places in dots) == [1, 1, 2, 2]
    dense = next(line for line in axes.lines if line.get_linestyle() == ":")
    assert list(dense.get_ydata()) == pytest.approx([96, 96])
    keys = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert keys == ["SR-STE 1:16", "SR-STE 2:4", "STE (lambda 0)", "dense: 96.00"]
    own = {tuple(line.get_xdata()): line.get_color() for line in axes.lines if line.get_marker() in ("s", "^")}
    assert [own[places] for places in ((0,), (2e-4, 2e-4))] == [LOOKS["ste"].colour, LOOKS["srste"].colour]
    assert "mean and spread over 1 to 2 seeds, every run a mark" in axes.get_title()


def places(axes: Any, *decays: float) -> list[float]:
    axes.autoscale_view()  # which matplotlib leaves until it draws
    return [float(x) for x, _ in axes.transData.transform([(decay, 85.0) for decay in decays])]


def test_the_axis_is_logarithmic_to_both_sides_of_zero(rows):
    figure = study_lambda.figure_of("A study", MEASURE, rows, PATTERNS)
    assert_readable(figure)
    axes = figure.axes[0]
    negative, zero, smallest, ten, hundred = places(axes, -2e-5, 0, 2e-5, 2e-4, 2e-3)
    assert hundred - ten == pytest.approx(ten - smallest) == pytest.approx(2 * (smallest - zero))
    assert smallest - zero == pytest.approx(zero - negative)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["-2e-5", "0", "2e-4", "1.6e-3"]
    assert not axes.texts
    assert "edge" not in axes.get_title()


@pytest.mark.parametrize("recipe", ["cifar10/resnet20", "imagenet/resnet50"])
@pytest.mark.parametrize("far", [(), (-8e-4,), (-8e-4, -2e-4), (-8e-4, 6.4e-3)], ids=str)
def test_all_rows_of_fig_4_can_be_read(far, recipe, runs):
    """With runs that lost their network at some lambdas, at both patterns where the study has two."""
    study = STUDIES["fig4"](find(recipe))
    labels, patterns = [row.label for row in study.rows], {row.label: row.config.sparsity.pattern for row in study.rows}
    rows = {}
    for number, label in enumerate(labels):
        is_far = any(label.endswith(f"lambda {decay:g}") for decay in far)
        rows[label] = runs(0.44, 0.47, 0.48) if is_far else runs(*(0.85 + number / 400 + seed / 900 for seed in range(3)))
    figure = study_lambda.figure_of("Lambda at 1:16 (Fig. 4): a recipe", MEASURE, rows, patterns)
    assert_readable(figure)
    axes = figure.axes[0]
    assert {round(text.xy[0], 6): text.xy[1] for text in axes.texts} == dict.fromkeys(far, 0)
    for text in axes.texts:
        assert "44.00 to\n48.00,\nmean 46.33\n" in text.get_text()
        box = text.get_window_extent()
        assert axes.bbox.x0 < box.x0 < box.x1 < axes.bbox.x1
        assert axes.bbox.y0 < box.y0 < box.y1 < axes.bbox.y0 + axes.bbox.height / 3
    low, high = axes.get_ylim()
    others = [100 * run.score for label, own in rows.items() for run in own if run.score > 0.8 and label != "dense"]
    assert low < min(others) < max(others) < high, "all the others are there"
    assert 1.7 * (max(others) - min(others)) > high - low, "and have most of the axis"
    assert ("outside" in axes.get_title()) == bool(far)


def test_lambdas_that_are_too_near_to_be_written_side_by_side_are_dots_alone(runs):
    rows = {f"lambda {decay:g}": runs(0.9) for decay in (0, 1e-5, 1e-3, 1.1e-3, 1e-2)}
    axes = study_lambda.figure_of("A study", MEASURE, rows).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "1e-5", "1e-3", "1e-2"]


def test_a_run_above_all_others_and_one_that_is_no_number(runs):
    rows = {f"lambda {decay:g}": runs(0.9 + decay) for decay in (0, 1e-3, 2e-3, 4e-3, 8e-3)}
    rows |= {"lambda 0.016": runs(0.91, 9.0), "lambda 0.032": runs(math.nan)}
    figure = study_lambda.figure_of("A study", MEASURE, rows)
    assert_readable(figure)
    assert [(text.get_text(), text.xy) for text in figure.axes[0].texts] == [("▴\n900.00,\nmean 495.50", (0.016, 1))]


def test_only_the_study_of_lambdas_has_rows_that_are_lambdas():
    bases = {"detection": "bccd/fasterrcnn", "segmentation": "nuclei/maskrcnn", "flow": "flow/stamps", "translation": "multi30k/small"}
    for name, study in STUDIES.items():
        found = [row for row in study(find(bases.get(name, "imagenet/resnet50"))).rows if study_lambda._LAMBDA.fullmatch(row.label)]
        assert len(found) == (10 if name == "fig4" else 0), name


def test_a_study_of_lambdas_has_the_picture(tmp_path):
    from nofm.cli.main import main

    options = [
        "--engine.steps",
        "4",
        "--schedule.warmup",
        "1",
        "--engine.eval_every",
        "4",
        "--rows",
        "lambda 0|lambda 0.0002|lambda 0.0016",
    ]
    assert main(["study", "fig4", "--on", "digits", "--out", str(tmp_path), *options]) == 0
    assert (tmp_path / "fig4" / "lambda.png").read_bytes().startswith(b"\x89PNG")
