"""The picture of a study that shows scores by the share of weights kept: which rows make a line, and when there is one at all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from test_pictures_fit import assert_readable
from test_report_numbers import EVENTS, write_run

from nofm.report import study_drawing, study_kept
from nofm.report.compare import Stat
from nofm.report.measures import MEASURES
from nofm.report.read import load
from nofm.report.study import Measured, measured
from nofm.report.study_kept import Point, draw_kept, lines_of
from nofm.report.study_looks import LOOKS

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


def test_the_legend_says_who_trains_longer_than_the_others(rows):
    def lasting(epochs: float, *labels: str) -> dict[str, list[Measured]]:
        return {label: [dataclasses.replace(run, epochs=epochs) for run in rows[label]] for label in labels}

    def names(shown: dict[str, list[Measured]]) -> list[str]:
        return [text.get_text() for text in study_kept.figure_of("t", MEASURE, shown).legends[0].get_texts()]

    alike = lasting(60.0, *rows)
    assert names(alike) == names(rows), "a run that does not tell its length is not marked"
    assert names(alike | lasting(280.0, "STR, exponent 20")) == names(alike), "one of its two rows is as long as the others"
    longer = lasting(280.0, "STR, exponent 20", "STR, exponent 2.5")
    assert names(alike | longer) == [name + " (280 epochs)" * (name == "STR") for name in names(alike)]


def test_rows_of_a_method_are_a_line_from_the_sparsest_on(rows):
    lines = lines_of(rows)
    assert set(lines) == {"SR-STE", "RigL (ERK)", "STE, unstructured", "STR"}  # not dense, not what has no runs or tells no sparsity
    assert lines["SR-STE"][0] == Point(0.0625, Stat(0.88, None, 1), "1:16")
    assert lines["SR-STE"][1] == Point(0.25, Stat(pytest.approx(0.91), pytest.approx(0.02 / 2**0.5), 2), "2:8")
    assert [point.kept for point in lines["STR"]] == pytest.approx([0.06, 0.205])
    assert [lines[name][0].words for name in ("STR", "STE, unstructured")] == ["exponent 20", "95 %"]


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
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["5", "6.25", "20", "25"]  # 6, of one row, and 20.5 give way
    assert "logarithmic" in figure.axes[0].get_xlabel()
    assert "over 1 to 2 seeds" in figure.axes[0].get_title()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*lines_of(rows), "dense"]
    assert draw_kept("A study", MEASURE, rows, tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")


def marks(axes: Any) -> dict[str, list[Any]]:
    """The error bars of each method, from its sparsest row on."""
    found: dict[str, list[Any]] = {}
    for container in axes.containers:
        found.setdefault(container.get_label(), []).append(container)
    return {name: sorted(own, key=lambda container: container[0].get_xdata()[0]) for name, own in found.items()}


def test_points_lie_where_they_were_measured(rows):
    axes = study_kept.figure_of("A study", MEASURE, rows).axes[0]
    drawn = marks(axes)["SR-STE"]
    assert [tuple(dot.get_xydata()[0]) for dot, _, _ in drawn] == [
        pytest.approx((6.25, MEASURE.factor * 0.88)),
        pytest.approx((25, MEASURE.factor * 0.91)),
    ]
    heights = [top - bottom for _, _, (bars,) in drawn for (_, bottom), (_, top) in bars.get_segments()]
    assert heights == pytest.approx([0, 2 * MEASURE.factor * 0.02 / 2**0.5])
    dense = next(line for line in axes.lines if line.get_linestyle() == ":")
    assert list(dense.get_ydata()) == pytest.approx([MEASURE.factor * 0.95] * 2)


NAMES = "ABCDEFGHIJKL"
CROWDS = {  # scores of twelve methods at two sparsities, and of one beside them at a third
    "all the same": [0.9] * 12,
    "near one another": [0.9 + number / 400 for number in range(12)],
    "in pairs": [0.9 + number // 2 / 50 for number in range(12)],
    "with long bars": [0.9 + (5 * number) % 12 / 100 for number in range(12)],
}


@pytest.mark.parametrize("scores", CROWDS.values(), ids=CROWDS)
def test_no_marker_covers_another(scores, run):
    """Rivals at 95 % keep as many weights, and stand beside one another and not on one another; STR beside them stays where it is."""
    spread = 0.06 if scores is CROWDS["with long bars"] else 0.001
    rows = {f"{name} {percent} %": [run(1 - percent / 100, score + sign * spread) for sign in (-1, 1)]
            for name, score in zip(NAMES, scores, strict=True) for percent in (80, 95)}  # fmt: skip
    rows |= {"STR, exponent 1": [run(0.1, 0.9)], "dense": [run(1.0, 0.99)]}
    axes = study_kept.figure_of("A study", MEASURE, rows).axes[0]
    FigureCanvasAgg(axes.figure).draw()
    drawn = [(name, own[0]) for name, containers in marks(axes).items() for own in containers]
    assert len(drawn) == 25
    size = max(dot.get_markersize() for _, dot in drawn) * axes.figure.dpi / 72
    places = [(name, *axes.transData.transform(dot.get_xydata()[0])) for name, dot in drawn]
    for (one, x, y), (other, beside, above) in itertools.combinations(places, 2):
        assert abs(x - beside) >= size or abs(y - above) >= size, (one, other)
    for name, x, y in places:
        assert axes.bbox.x0 + size / 2 < x < axes.bbox.x1 - size / 2, name
        assert axes.bbox.y0 < y < axes.bbox.y1, name
    (alone,) = (dot for name, dot in drawn if name == "STR")
    assert alone.get_xdata()[0] == pytest.approx(10)
    assert [dot.get_ydata()[0] for name, dot in drawn if name == "A"] == pytest.approx([MEASURE.factor * scores[0]] * 2)
    for name in NAMES:
        sparse, less = (dot.get_xdata()[0] for other, dot in drawn if other == name)
        assert sparse < 5**0.5 * 10**0.5 < 10**0.5 * 20**0.5 < less, "each is nearest to its own share"
    grounds = [patch.get_extents() for patch in axes.patches]
    assert [sum(ground.x0 < x < ground.x1 for _, x, _ in places) for ground in grounds] == [12, 12]


def test_rows_that_are_alone_at_their_share_stay_there_beside_a_crowd(run):
    """As STR does, at 5.35 % and the score of five rivals at 5 %."""
    rows = {f"{name} {percent} %": [run(1 - percent / 100, 0.9)] for name in "ABCDE" for percent in (80, 95)}
    rows |= {"STR, exponent 3": [run(0.0535, 0.9)], "STR, exponent 4": [run(0.0411, 0.9)]}
    drawn = marks(study_kept.figure_of("A study", MEASURE, rows).axes[0])
    assert [own[0].get_xdata()[0] for own in drawn["STR"]] == pytest.approx([4.11, 5.35])


def test_markers_that_are_apart_stand_at_their_share(run):
    rows = {f"{name} {percent} %": [run(1 - percent / 100, 0.8 + number / 20)] for number, name in enumerate("ABC") for percent in (80, 95)}
    axes = study_kept.figure_of("A study", MEASURE, rows).axes[0]
    assert [own[0].get_xdata()[0] for containers in marks(axes).values() for own in containers] == pytest.approx([5, 20] * 3)
    assert not axes.patches


def test_no_two_methods_look_alike(run):
    rows = {f"{name} {percent} %": [run(1 - percent / 100, 0.9)] for name in "ABCDEFGHIJKLMNOP" for percent in (80, 95)}
    axes = study_kept.figure_of("A study", MEASURE, rows).axes[0]
    looks = {
        name: {(own[0].get_color(), own[0].get_marker(), own[0].get_fillstyle()) for own in found} for name, found in marks(axes).items()
    }
    assert len(looks) == 16
    assert sorted(map(len, looks.values())) == [1] * 16, "one for each"
    assert len(set.union(*looks.values())) == 16


def test_two_kinds_of_one_method_share_its_colour(rows, run):
    rows |= {"RigL (uniform) 80 %": [run(0.2, 0.8)], "RigL (uniform) 95 %": [run(0.05, 0.7)]}
    methods = {label: "rigl" for label in rows if "RigL" in label}
    drawn = marks(study_kept.figure_of("A study", MEASURE, rows, methods).axes[0])
    (one, _), (other, _) = drawn["RigL (ERK)"], drawn["RigL (uniform)"]
    assert one[0].get_color() == other[0].get_color() == LOOKS["rigl"].colour
    assert (one[0].get_fillstyle(), other[0].get_fillstyle()) == ("full", "none")


def patterns(run) -> dict[str, list[Measured]]:
    return {f"{name} {pattern}": [run(kept, score)] for name in ("A", "B") for pattern, kept, score in
            (("2:4", 0.5, 0.8), ("4:8", 0.5, 0.9), ("1:4", 0.25, 0.7))}  # fmt: skip


def test_a_line_goes_through_the_mean_of_rows_that_keep_as_many(run):
    axes = study_kept.figure_of("A study", MEASURE, patterns(run)).axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) == 2]
    assert len(lines) == 2
    for line in lines:
        assert sorted(line.get_ydata()) == pytest.approx([MEASURE.factor * 0.7, MEASURE.factor * 0.85])


def test_patterns_are_named_where_a_method_has_two_that_keep_as_many(run):
    figure = study_kept.figure_of("A study", MEASURE, patterns(run))
    assert_readable(figure)
    assert sorted(text.get_text() for text in figure.axes[0].texts if text.get_text()) == ["2:4", "2:4", "4:8", "4:8"]


def test_runs_that_came_to_no_number_are_left_out(rows, run):
    lost = {**rows, "SNIP 80 %": [run(0.2, math.nan)], "SNIP 95 %": [run(0.05, math.nan)]}
    assert lines_of(lost) == lines_of(rows)


def test_rows_that_have_lost_all_weights_are_left_out(rows, run, tmp_path):
    """A logarithmic axis has no place for 0."""
    empty = {**rows, "STR, exponent 36": [run(0.0, 0.1)]}
    assert lines_of(empty) == lines_of(rows)
    assert draw_kept("t", MEASURE, empty, tmp_path / "kept.png")


def test_markers_make_way_to_where_no_other_share_is_near():
    """Six rows of one height at 20 %, and 25 % three places beside them: none may come to stand there, as if it kept as many."""

    def mark(centre: float, low: float = 0.0) -> study_kept._Mark:
        return study_kept._Mark("a row", 1.0, 0.5, 0.0, "", centre, (low, low + 6.0), (low, low + 6.0))

    for side in (1, -1):
        crowd = [mark(100.0 + side * 3 * study_kept._PITCH, low=50.0), *(mark(100.0) for _ in range(6))]
        alone, *places = study_kept._side_by_side(crowd)
        assert (alone, sorted(side * place for place in places)) == (0, [-3, -2, -1, 0, 1, 2])


def test_ticks_are_left_out_where_the_last_one_is_near():
    """Near is a share of the axis: 5 and 5.6 are far apart where it ends at 10, and not where it begins at 0.4 and ends at 100."""
    assert study_drawing.apart([5, 5.6, 6.25, 7, 8, 9, 10]) == [5, 5.6, 6.25, 7, 8, 9, 10]
    assert study_drawing.apart([0.4, 1.24, 4.11, 5, 5.35, 6.25, 25, 100]) == [0.4, 1.24, 4.11, 5, 6.25, 25, 100]
    assert study_drawing.apart([0.4, 1.24, 4.11, 5, 5.35, 6.25, 25, 100], 0.1) == [0.4, 1.24, 4.11, 25, 100]
    assert (study_drawing.apart([]), study_drawing.apart([5])) == ([], [5])
    assert study_drawing.apart([0.4, 4.11, 20, 21, 23.7, 25], first=[25, 0.4, 20]) == [0.4, 4.11, 20, 25], "as the first ones were"


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
