"""The picture of a study that shows scores by the share of weights kept: which rows make a line, and when there is one at all."""

from __future__ import annotations

import dataclasses

import pytest
from test_pictures_fit import assert_readable
from test_report_numbers import EVENTS, write_run

from nofm.report import study_kept
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
        "RegNetX 002": [run(1.0, 0.9)],
        "lottery ticket": [run(0.2, 0.5)],
    }


def test_rows_of_a_method_are_a_line_from_the_sparsest_on(rows):
    lines = lines_of(rows)
    assert set(lines) == {"SR-STE", "RigL (ERK)", "STE, unstructured", "STR"}  # not dense, not what has no runs or tells no sparsity
    assert lines["SR-STE"] == [Point(0.0625, 0.88, 0.0), Point(0.25, pytest.approx(0.91), pytest.approx(0.02 / 2**0.5))]
    assert [point.kept for point in lines["STR"]] == pytest.approx([0.06, 0.205])


@pytest.mark.parametrize("missing", ["one sparsity", "one method"])
def test_there_is_no_picture_where_nothing_can_be_compared(rows, run, tmp_path, missing):
    few = {"SR-STE 2:4": [run(0.5, 0.9)], "SR-STE 4:8": [run(0.5, 0.8)], "STE 2:4": [run(0.5, 0.9)], "STE 4:8": [run(0.5, 0.8)]}
    if missing == "one method":
        few = {label: own for label, own in rows.items() if label.startswith("SR-STE") or "95" in label}
    assert lines_of(few) == {}
    assert not draw_kept("A study", MEASURE, few, tmp_path / "kept.png")
    assert not (tmp_path / "kept.png").exists()


def test_the_picture_can_be_read(rows, tmp_path):
    figure = study_kept.figure_of("A study of some length: a recipe", MEASURE, rows)
    assert_readable(figure)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["5", "6", "20", "25"]  # 6.2 lies too near
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {*lines_of(rows), "dense"}
    assert draw_kept("A study", MEASURE, rows, tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")
