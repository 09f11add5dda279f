"""figure.png of a study: what stands beside what, and that every word of it can be read, in the studies under results/ too."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text
from test_pictures_fit import assert_readable

from nofm.report import study_drawing, study_figure, study_kept, study_lambda, study_layers, study_pictures, study_shapes
from nofm.report.measures import MEASURES
from nofm.report.study import Measured
from nofm.report.study_curves import Curves
from nofm.report.study_drawing import percent_words, seeds_words, shares
from nofm.report.study_looks import LOOKS

MEASURE = MEASURES["classification"]
RESULTS = Path(__file__).parents[2] / "results"
RUN = Measured("", 0, "1", "accuracy", 90.0, 1.0, 0.5, 100, None, 60.0, None, None, "2", "a gpu")


def bars(axes: Any) -> list[Any]:
    return [line for line in axes.lines if line.get_marker() == "|"]


def dots(axes: Any) -> list[Any]:
    return [line for line in axes.lines if line.get_marker() != "|"]


def names(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


# ---- rows that keep as many weights ----


def test_rows_that_keep_as_many_weights_are_together():
    kept = {"a": 0.2, "STR 20": 0.0618, "1:16": 0.0625, "dense": 1.0, "b": 0.2, "95 %": 0.05, "STR 3": 0.0535}
    assert shares(kept) == [
        ("all weights kept", ["dense"]),
        ("20 % of weights kept", ["a", "b"]),
        ("6.2 % of weights kept", ["STR 20", "1:16"]),
        ("5.35 % of weights kept", ["STR 3"]),
        ("5 % of weights kept", ["95 %"]),
    ]


def test_a_share_is_written_as_exactly_as_it_is_one():
    assert percent_words([0.125, 0.125]) == "12.5"
    assert percent_words([0.0618, 0.0625]) == "6.2"
    assert percent_words([0.0496, 0.0503]) == "5"
    assert percent_words([0.198, 0.202]) == "20"
    assert percent_words([0.144, 0.146]) == "14.4 to 14.6"


def test_how_many_seeds():
    assert [seeds_words(counts) for counts in ([5, 5], [1, 5, 3], [1])] == ["5 seeds", "1 to 5 seeds", "1 seed"]


# ---- many rows: how they ended ----


def many(kept: float = 1.0, spread: float = math.inf) -> dict[str, Any]:
    """Thirteen rows of two methods, of one to three runs, that keep this share of their weights or some less."""
    found = {}
    for number in range(13):
        name = f"{('GMP', 'a row of a rather long name, RigL')[number % 2]} {number} %"
        ends = [replace(RUN, seed=seed, score=80 + (7 * number) % 13 + seed / 4, sad=number + seed / 9) for seed in range(1 + number % 3)]
        found[name] = ([], [replace(end, kept=kept * (1 - number % 3 / spread)) for end in ends])
    return found


METHODS_OF_MANY = {label: "gmp" if label.startswith("GMP") else "rigl" for label in many()}


@pytest.mark.parametrize(
    ("kept", "groups"),
    [((1.0, math.inf), 1), ((0.25, 3), 3), ((0.0625, 90), 2)],
    ids=["as many", "8, 17 and 25 %", "about 6 %"],
)
@pytest.mark.parametrize("task", ["classification", "flow"])
def test_more_rows_than_lines_can_be_told_apart_are_dots_in_order_of_share_and_score(task, kept, groups):
    measure, rows = MEASURES[task], many(*kept)
    figure = study_figure.figure_of("A study of many rows: a recipe", measure, rows, (), METHODS_OF_MANY)
    assert_readable(figure)
    score, changes = figure.axes
    together = shares({label: fmean(run.kept for run in runs) for label, (_, runs) in rows.items()})
    assert len(together) == groups
    means = {label: fmean(run.score for run in runs) for label, (_, runs) in rows.items()}
    order = [label for _, own in together for label in sorted(own, key=means.__getitem__, reverse=task == "classification")]
    assert names(score) == order
    assert [text.get_text() for text in score.texts] == [words for words, _ in together]
    assert [text.get_text() for text in changes.get_yticklabels() if text.get_visible()] == []
    places = {label: order.index(label) + 1 + number for number, (_, own) in enumerate(together) for label in own}
    for axes, value in ((score, lambda run: run.score), (changes, lambda run: run.sad)):
        assert [list(line.get_xdata()) for line in dots(axes)] == [list(map(value, rows[label][1])) for label in order]
        assert [line.get_xdata()[0] for line in bars(axes)] == [pytest.approx(fmean(map(value, rows[label][1]))) for label in order]
        assert [set(line.get_ydata()) for line in dots(axes)] == [{places[label]} for label in order]
        assert {line.get_color() for line in dots(axes)} == {LOOKS["gmp"].colour, LOOKS["rigl"].colour}
        grounds = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
        assert len(grounds) == -(-groups // 2), "under every second group"
    for text, (_, own) in zip(score.texts, together, strict=True):
        assert text.xy[1] == places[own[0]] - 1 if own[0] == order[0] else text.xy[1] < min(places[label] for label in own)


def test_dots_at_zero_are_whole():
    changes = study_figure.figure_of("A study", MEASURES["flow"], many()).axes[1]
    FigureCanvasAgg(changes.figure).draw()
    room = changes.transData.transform((0, 0))[0] - changes.bbox.x0
    assert 3 < room * 72 / changes.figure.dpi < 12, "points, of which a dot has six"


def test_masks_that_cannot_be_compared_have_no_dots():
    alone = next(iter(METHODS_OF_MANY))
    score, changes = study_figure.figure_of("A study", MEASURES["flow"], many(), {alone}).axes
    place = names(score).index(alone)
    assert [len(dots(axes)[place].get_xdata()) for axes in (score, changes)] == [1, 0]


# ---- runs far from all others ----


def with_scores(scores: dict[int, list[float]]) -> tuple[dict[str, Any], dict[int, str]]:
    """Thirteen rows of scores from 85 to 91, but for these; and their names by number."""
    rows = many()
    for number, (label, (_, runs)) in enumerate(rows.items()):
        ends = scores.get(number, [85 + number / 2, 85.2 + number / 2])
        rows[label] = ([], [replace(runs[0], seed=seed, score=score) for seed, score in enumerate(ends)])
    return rows, dict(enumerate(rows))


FAR: dict[str, tuple[dict[int, list[float]], dict[int, str]]] = {
    "none": ({}, {}),
    "not so far": ({3: [74.0]}, {}),
    "one run": ({3: [7.8]}, {3: "◂ 7.80"}),
    "a row": ({3: [9.1, 7.8, 10.0]}, {3: "◂ 7.80 to 10.00, mean 8.97"}),
    "one run of a row": ({3: [7.8, 90.0]}, {3: "◂ 7.80, mean 48.90"}),
    "two rows": ({3: [7.8], 5: [8.0, 8.0]}, {3: "◂ 7.80", 5: "◂ 8.00, mean 8.00"}),
    "above": ({3: [300.0, 400.0]}, {3: "300.00 to 400.00, mean 350.00 ▸"}),
    "on both sides": ({3: [7.8], 4: [400.0]}, {3: "◂ 7.80", 4: "400.00 ▸"}),
    "no number": ({3: [math.nan], 4: [7.8]}, {4: "◂ 7.80"}),
}


def said(axes: Any) -> dict[str, str]:
    """The words at the edge, by row."""
    row = dict(zip(axes.get_yticks(), names(axes), strict=True))
    return {row[text.xy[1]]: text.get_text() for text in axes.texts if text.get_text() and text.xy[1] in row}


@pytest.mark.parametrize("count", [12, 13], ids=["beside lines", "of many rows"])
@pytest.mark.parametrize(("scores", "words"), FAR.values(), ids=FAR)
def test_a_run_far_from_all_others_is_a_number_at_the_edge(scores, words, count):
    """Of Fig. 4 the largest negative lambda, 40 points below all others, had left them a fifth of the axis."""
    rows, labels = with_scores(scores)
    figure = study_figure.figure_of("A study", MEASURE, dict(list(rows.items())[:count]))
    assert_readable(figure)
    score = figure.axes[0]
    assert said(score) == {labels[number]: text for number, text in words.items()}
    assert (study_drawing.OUTSIDE in score.get_xlabel()) == bool(words)
    low, high = score.get_xlim()
    assert low < 85 < 85.2 + (count - 1) / 2 < high
    assert high - low < (12 if words else 20), "the others have most of the axis"
    for text in (text for text in score.texts if text.get_text() in words.values()):
        box = text.get_window_extent()
        assert score.bbox.x0 < box.x0 < box.x1 < score.bbox.x1
        assert (box.x0 - score.bbox.x0 < 5) == text.get_text().startswith("◂")


def test_rows_that_are_all_but_one_the_same_have_an_axis():
    rows, _ = with_scores({number: [90.0] for number in range(12)} | {12: [7.8]})
    low, high = study_figure.figure_of("A study", MEASURE, rows).axes[0].get_xlim()
    assert low < 7.8 < 90 < high


# ---- few rows: lines of panels by share ----

METHODS = {"dense": "dense", "SR-STE 2:4": "srste", "STE 2:4": "ste", "SR-STE 4:8": "srste", "SR-STE 1:4": "srste", "STE 1:4": "ste"}
PATTERNS = {"dense": "1:4", "SR-STE 2:4": "2:4", "STE 2:4": "2:4", "SR-STE 4:8": "4:8", "SR-STE 1:4": "1:4", "STE 1:4": "1:4"}
KEPT = {"dense": 1.0, "SR-STE 1:4": 0.25, "STE 1:4": 0.25}


def few() -> dict[str, Any]:
    curves = [Curves({1: 80.0, 2: 90.0}, {1: 0.1, 2: 0.2}, {}, 1.0)]
    return {
        label: (curves, [replace(RUN, kept=KEPT.get(label, 0.5), score=88 + number + seed / 4) for seed in range(2)])
        for number, label in enumerate(METHODS)
    }


@pytest.fixture
def panels() -> list[list[Any]]:
    figure = study_figure.figure_of("A study", MEASURE, few(), (), METHODS, PATTERNS)
    assert_readable(figure)
    assert len(figure.axes) == 6
    return [figure.axes[:3], figure.axes[3:]]


def test_rivals_stand_in_one_line_with_dense_at_its_head(panels):
    assert [line[0].get_title() for line in panels] == ["50 % of weights kept", "25 % of weights kept"]
    assert [names(line[0]) for line in panels] == [["dense", "SR-STE 2:4", "STE 2:4", "SR-STE 4:8"], ["dense", "SR-STE 1:4", "STE 1:4"]]
    for ends, score, _ in panels:
        assert [list(dot.get_xdata()) for dot in dots(ends)] == [[run.score for run in few()[label][1]] for label in names(ends)]
        assert [line.get_label() for line in score.lines] == names(ends)


def test_the_line_beside_a_name_is_the_one_of_its_curve(panels):
    for ends, score, _ in panels:
        keys = [(text.arrow_patch.get_edgecolor(), text.arrow_patch.get_linestyle()) for text in ends.texts]
        curves = [(line.get_color(), line.get_linestyle()) for line in score.lines]
        assert len(set(curves)) == len(curves), "each row has a look of its own"
        assert [(to_hex(colour), {"solid": "-", "dashed": "--"}.get(style, style)) for colour, style in keys] == curves
        assert [text.xy[1] for text in ends.texts] == list(range(len(curves)))


def test_dense_has_masks_beside_rows_of_the_pattern_that_it_is_watched_by(panels):
    assert [[line.get_label() for line in movement.lines] for _, _, movement in panels] == [
        ["SR-STE 2:4", "STE 2:4", "SR-STE 4:8"], ["dense", "SR-STE 1:4", "STE 1:4"],
    ]  # fmt: skip


def test_masks_that_no_others_compare_with_are_not_drawn():
    figure = study_figure.figure_of("A study", MEASURE, few(), ("STE 1:4",), METHODS)
    drawn = [{line.get_label() for line in axes.lines} for axes in (figure.axes[2], figure.axes[5])]
    assert drawn == [{"dense", "SR-STE 2:4", "STE 2:4", "SR-STE 4:8"}, {"dense", "SR-STE 1:4"}]


def test_dense_alone_and_rows_without_dense_have_a_picture():
    rows = few()
    for labels in (["dense"], ["SR-STE 2:4", "STE 2:4"]):
        figure = study_figure.figure_of("A study", MEASURE, {label: rows[label] for label in labels}, (), METHODS)
        assert names(figure.axes[0]) == labels


@pytest.mark.parametrize(("shares", "panels"), [(4, 12), (5, 2)])
def test_more_shares_than_fit_below_one_another_are_dots(shares, panels):
    rows = {f"row {number}": ([], [replace(RUN, kept=0.5**number)]) for number in range(1, 1 + shares)}
    assert len(study_figure.figure_of("A study", MEASURE, rows).axes) == panels


# ---- the studies under results/ ----


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("*/*/study.json")), ids=lambda file: "/".join(file.parts[-3:-1]))
def test_the_pictures_of_all_results_can_be_read(folder, monkeypatch):
    """From the committed lines; and the pictures there can be drawn anew by them."""
    figures = []
    for module in (study_figure, study_kept, study_lambda, study_layers, study_shapes):
        monkeypatch.setattr(module, "write_png", lambda figure, path: figures.append((figure, path.name)))
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    named = study_pictures.draw_again(folder.parent)
    assert [path.name for path in named] == [name for _, name in figures]
    for figure, _ in figures:
        assert_readable(figure)
        FigureCanvasAgg(figure).draw()
        assert figure.get_figwidth() == study_drawing.WIDTH
        tight = figure.get_tightbbox()
        assert tight.x0 > -0.02, "nothing is cut"
        assert tight.x1 < study_drawing.WIDTH + 0.02
        assert all(text.get_fontsize() >= study_drawing.SMALL for text in figure.findobj(Text) if text.get_text())
