"""The picture of a study that shows scores by the share of weights kept: which rows make a line, and when there is one at all."""

from __future__ import annotations

import dataclasses

import pytest
from test_pictures_fit import assert_readable
from test_report_numbers import EVENTS, write_run

from nofm.report import study_figure, study_kept
from nofm.report.compare import Stat
from nofm.report.measures import MEASURES
from nofm.report.read import load
from nofm.report.study import Measured, measured
from nofm.report.study_kept import Point, draw_kept, lines_of

MEASURE = MEASURES["classification"]


@pytest.fixture
def run(tmp_path):
    """Makes a run of so many weights kept and such a score."""
    one = measured("a row", "1", load(write_run(tmp_path / "run", EVENTS)), MEASURE)

    def made(kept: float, score: float) -> Measured:
        return dataclasses.replace(one, kept=kept, score=score)

    return made


@pytest.fixture
def rows(run) -> dict[str, list[Measured]]:
    return {
        "dense": [run(1.0, 0.95)],
        "SR-STE 2:8": [run(0.25, 0.90), run(0.25, 0.92)],
        "SR-STE 1:16": [run(0.0625, 0.88)],
        "RigL (ERK) 80 %": [run(0.2, 0.85)],
        "RigL (ERK) 93.75 %": [run(0.0625, 0.84)],
        "STE, unstructured 95 %": [run(0.05, 0.80)],
        "STR, exponent 2.5": [run(0.2, 0.91), run(0.21, 0.91)],
        "STR, exponent 20": [run(0.06, 0.87)],
        "GMP 80 %": [],
        "watched by 2:4": [run(1.0, 0.9)],
        "lottery ticket": [run(0.2, 0.5)],
    }


def test_rows_of_a_method_are_a_line_from_the_sparsest_on(rows):
    lines = lines_of(rows)
    assert set(lines) == {"SR-STE", "RigL (ERK)", "STE, unstructured", "STR"}  # not dense, not what has no runs or tells no sparsity
    assert lines["SR-STE"][0] == Point(0.0625, Stat(0.88, None, 1))
    assert lines["SR-STE"][1] == Point(0.25, Stat(pytest.approx(0.91), pytest.approx(0.02 / 2**0.5), 2))
    assert [point.kept for point in lines["STR"]] == pytest.approx([0.06, 0.205])


@pytest.mark.parametrize("missing", ["one sparsity", "one method"])
def test_there_is_no_picture_where_nothing_can_be_compared(rows, run, tmp_path, missing):
    few = {"SR-STE 2:4": [run(0.5, 0.9)], "SR-STE 4:8": [run(0.5, 0.8)], "STE 2:4": [run(0.5, 0.9)], "STE 4:8": [run(0.5, 0.8)]}
    if missing == "one method":
        few = {label: own for label, own in rows.items() if label.startswith("SR-STE") or "95" in label}
    assert lines_of(few) == {}
    (tmp_path / "kept.png").write_bytes(b"of a time when there was something")
    assert not draw_kept("A study", MEASURE, few, tmp_path / "kept.png")
    assert not (tmp_path / "kept.png").exists()


def test_the_picture_can_be_read(rows, tmp_path):
    figure = study_kept.figure_of("A study of some length: a recipe", MEASURE, rows)
    assert_readable(figure)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["5", "6", "20", "25"]  # 6.25 lies too near
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {*lines_of(rows), "dense"}
    assert draw_kept("A study", MEASURE, rows, tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


def test_points_lie_where_they_were_measured(rows):
    axes = study_kept.figure_of("A study", MEASURE, rows).axes[0]
    drawn = {container.get_label(): container for container in axes.containers}
    dots, _, (bars,) = drawn["SR-STE"]
    assert [tuple(place) for place in dots.get_xydata()] == [
        pytest.approx((6.25, MEASURE.factor * 0.88)),
        pytest.approx((25, MEASURE.factor * 0.91)),
    ]
    heights = [top - bottom for (_, bottom), (_, top) in bars.get_segments()]
    assert heights == pytest.approx([0, 2 * MEASURE.factor * 0.02 / 2**0.5])
    dense = next(line for line in axes.lines if line.get_label() == "dense")
    assert list(dense.get_ydata()) == pytest.approx([MEASURE.factor * 0.95] * 2)


def test_no_two_methods_look_alike(run):
    rows = {f"{name} {percent} %": [run(1 - percent / 100, 0.9)] for name in "ABCDEFGHIJKLMNOP" for percent in (80, 95)}
    axes = study_kept.figure_of("A study", MEASURE, rows).axes[0]
    looks = [(container[0].get_color(), container[0].get_marker()) for container in axes.containers]
    assert len(looks) == len(set(looks)) == 16


def test_a_line_goes_through_the_mean_of_rows_that_keep_as_many(run):
    rows = {f"{name} {pattern}": [run(kept, score)] for name in ("A", "B") for pattern, kept, score in
            (("2:4", 0.5, 0.8), ("4:8", 0.5, 0.9), ("1:4", 0.25, 0.7))}  # fmt: skip
    lines = [line for line in study_kept.figure_of("A study", MEASURE, rows).axes[0].lines if line.get_linestyle() == "-"]
    assert len(lines) == 2
    for line in lines:
        assert line.get_ydata().tolist() == pytest.approx([MEASURE.factor * 0.7, MEASURE.factor * 0.85])


def test_ticks_are_left_out_where_the_last_one_is_near():
    """Near is a share of the axis: 5 and 5.6 are far apart where it ends at 10, and not where it begins at 0.4 and ends at 100."""
    assert study_figure.apart([5, 5.6, 6.25, 7, 8, 9, 10]) == [5, 5.6, 6.25, 7, 8, 9, 10]
    assert study_figure.apart([0.4, 1.24, 4.11, 5, 5.35, 6.25, 25, 100]) == [0.4, 1.24, 4.11, 5, 6.25, 25, 100]
    assert study_figure.apart([0.4, 1.24, 4.11, 5, 5.35, 6.25, 25, 100], 0.1) == [0.4, 1.24, 4.11, 25, 100]
    assert (study_figure.apart([]), study_figure.apart([5])) == ([], [5])


def test_the_names_of_all_studies_are_read_right():
    """Sparsities end a name; lambdas and epochs do, too, and are none."""
    from nofm.recipes import find
    from nofm.recipes.studies import STUDIES

    bases = {"detection": "bccd/fasterrcnn", "segmentation": "nuclei/maskrcnn", "flow": "flow/stamps", "translation": "multi30k/small"}
    for name, study in STUDIES.items():
        base = find(bases.get(name, "imagenet/resnet50"))
        for row in study(base).rows:
            is_sparse = study_kept._SPARSITY.search(row.label) is not None
            ends = row.label.split()[-1]
            assert is_sparse == ("exponent" in row.label or ends == "%" or ":" in ends), (name, row.label)


def test_a_study_of_several_methods_and_sparsities_has_the_picture(tmp_path):
    from nofm.cli.main import main

    options = ["--engine.steps", "4", "--schedule.warmup", "1", "--engine.eval_every", "4", "--rows", "*STE 2:4|*STE 1:4"]
    assert main(["study", "table1", "--on", "digits", "--out", str(tmp_path), *options]) == 0
    assert (tmp_path / "table1" / "kept.png").read_bytes().startswith(b"\x89PNG")
