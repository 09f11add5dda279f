"""The two kinds of PNG: every word lies inside the picture and beside the others, and numbers are written as people write them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from test_report_numbers import EVENTS, write_run

from nofm.report import picture, study_figure
from nofm.report.compare import Group, group_runs
from nofm.report.measures import MEASURES
from nofm.report.read import Run, load
from nofm.report.study import Measured, measured
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


def rows(runs: dict[str, Run]) -> dict[str, Any]:
    measure = MEASURES["classification"]
    return {f"{name} 2:4": ([curves_of(run, measure, False)], [measured(name, "1", run, measure)]) for name, run in runs.items()}


def test_the_figure_of_a_study(runs):
    assert_readable(study_figure.figure_of("A study", MEASURES["classification"], rows(runs)))


def many(kept: float = 1.0, spread: float = math.inf) -> dict[str, Any]:
    """Thirteen rows of two methods, of one to three runs, that keep this share of their weights or some less."""
    run = Measured("", 0, "1", "accuracy", 0.0, 0.0, kept, 100, None, 60.0, None, None, "2", "a gpu")
    found = {}
    for number in range(13):
        name = f"{('GMP', 'a row of a rather long name, RigL')[number % 2]} {number} %"
        ends = [replace(run, seed=seed, score=80 + (7 * number) % 13 + seed / 4, sad=number + seed / 9) for seed in range(1 + number % 3)]
        found[name] = ([], [replace(end, kept=kept * (1 - number % 3 / spread)) for end in ends])
    return found


METHODS_OF_MANY = {label: "gmp" if label.startswith("GMP") else "rigl" for label in many()}


@pytest.mark.parametrize("kept", [(1.0, math.inf), (0.25, 3), (0.0625, 90)], ids=["as many", "from 8 to 25 %", "about 6 %"])
@pytest.mark.parametrize("task", ["classification", "flow"])
def test_more_rows_than_lines_can_be_told_apart_are_dots_in_order(task, kept):
    measure, rows = MEASURES[task], many(*kept)
    figure = study_figure.figure_of("A study of many rows: a recipe", measure, rows, (), METHODS_OF_MANY)
    assert_readable(figure)
    score, changes, share = figure.axes
    means = {label: fmean(run.score for run in runs) for label, (_, runs) in rows.items()}
    order = [label.get_text() for label in score.get_yticklabels()]
    assert order == sorted(means, key=means.__getitem__, reverse=task == "classification")
    assert [text.get_text() for text in changes.get_yticklabels() if text.get_visible()] == []
    for axes, value in ((score, lambda run: run.score), (changes, lambda run: run.sad), (share, lambda run: 100 * run.kept)):
        dots, bars = axes.lines[::2], axes.lines[1::2]
        assert [list(line.get_xdata()) for line in dots] == [list(map(value, rows[label][1])) for label in order]
        assert [line.get_xdata()[0] for line in bars] == [pytest.approx(fmean(map(value, rows[label][1]))) for label in order]
        assert [set(line.get_ydata()) for line in dots] == [{place} for place in range(13)]
        assert len({line.get_color() for line in dots}) == 2, "one for each method"
    low, high = share.get_xlim()
    assert [tick for tick in share.get_xticks() if low <= tick <= high], "a scale without a number says nothing"


def seen(colour: str, alpha: float = 1.0) -> np.ndarray:
    """A colour on white as eyes tell it from others: in CIE L*a*b*, where a distance of two can be seen side by side."""
    blended = alpha * np.array(to_rgb(colour)) + 1 - alpha
    linear = np.where(blended <= 0.04045, blended / 12.92, ((blended + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]) @ linear)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("place", [0, 5, 12])
def test_dots_of_twelve_methods_and_dense_can_be_told_apart(place):
    rows = many()
    methods = {label: "dense" if number == place else f"method {number}" for number, label in enumerate(rows)}
    score = study_figure.figure_of("A study", MEASURES["flow"], rows, (), methods).axes[0]
    order = [text.get_text() for text in score.get_yticklabels()]
    dots = {methods[label]: seen(line.get_color(), line.get_alpha()) for label, line in zip(order, score.lines[::2], strict=True)}
    assert len(dots) == 13
    for one, other in itertools.combinations(dots, 2):
        assert np.linalg.norm(dots[one] - dots[other]) > 22, (one, other)
    assert np.linalg.norm(dots["dense"][1:]) < 1, "dense is grey wherever it stands"


def test_lines_of_many_methods_can_be_told_apart_and_from_the_black_one_of_dense():
    for one, other in itertools.combinations((*study_figure.MANY_COLOURS, "black"), 2):
        assert np.linalg.norm(seen(one) - seen(other)) > 22, (one, other)


def test_dots_at_zero_are_whole():
    changes = study_figure.figure_of("A study", MEASURES["flow"], many()).axes[1]
    FigureCanvasAgg(changes.figure).draw()
    room = changes.transData.transform((0, 0))[0] - changes.bbox.x0
    assert 3 < room * 72 / changes.figure.dpi < 12, "points, of which a dot has five"


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


@pytest.mark.parametrize(("scores", "words"), FAR.values(), ids=FAR)
def test_a_run_far_from_all_others_is_a_number_at_the_edge(scores, words):
    rows, names = with_scores(scores)
    figure = study_figure.figure_of("A study", MEASURES["classification"], rows)
    assert_readable(figure)
    score = figure.axes[0]
    order = [text.get_text() for text in score.get_yticklabels()]
    assert {order[text.xy[1]]: text.get_text() for text in score.texts} == {names[number]: text for number, text in words.items()}
    assert ("outside" in score.get_title()) == bool(words)
    low, high = score.get_xlim()
    assert low < 85 < 91.2 < high
    assert high - low < (12 if words else 20), "the others have most of the axis"
    for text in score.texts:
        box = text.get_window_extent()
        assert score.bbox.x0 < box.x0 < box.x1 < score.bbox.x1
        assert (box.x0 - score.bbox.x0 < 5) == text.get_text().startswith("◂")


@pytest.mark.parametrize(("scores", "words"), FAR.values(), ids=FAR)
def test_beside_lines_it_is_so_as_well(scores, words):
    """Of Fig. 4 the largest negative lambda, 40 points below all others, had left them a fifth of the axis."""
    rows, names = with_scores(scores)
    figure = study_figure.figure_of("A study", MEASURES["classification"], dict(list(rows.items())[:12]))
    assert_readable(figure)
    ends = figure.axes[2]
    assert {names[text.xy[1]]: text.get_text() for text in ends.texts} == {names[number]: text for number, text in words.items()}
    assert ends.get_title().split("\n") == [
        "Every run (dots) and the mean (bar)",
        *["numbers at the edge: runs that lie outside"] * bool(words),
    ]
    low, high = ends.get_xlim()
    assert low < 85 < 90.7 < high
    assert high - low < (12 if words else 20), "the others have most of the axis"


def test_rows_that_are_all_but_one_the_same_have_an_axis():
    rows, _ = with_scores({number: [90.0] for number in range(12)} | {12: [7.8]})
    low, high = study_figure.figure_of("A study", MEASURES["classification"], rows).axes[0].get_xlim()
    assert low < 7.8 < 90 < high


def test_dots_of_one_method_have_a_colour_for_each_pattern():
    rows = {f"{('1:16', '1:4')[number % 2]}, change {number}": runs for number, runs in enumerate(many().values())}
    score = study_figure.figure_of("A study", MEASURES["flow"], rows, (), dict.fromkeys(rows, "srste")).axes[0]
    patterns = [text.get_text().split(",")[0] for text in score.get_yticklabels()]
    colours = [line.get_color() for line in score.lines[::2]]
    assert len(set(colours)) == 2 == len(set(zip(patterns, colours, strict=True)))


def test_masks_that_cannot_be_compared_have_no_dots():
    alone = next(iter(METHODS_OF_MANY))
    score, changes, share = study_figure.figure_of("A study", MEASURES["flow"], many(), {alone}).axes
    place = [text.get_text() for text in score.get_yticklabels()].index(alone)
    assert [len(axes.lines[2 * place].get_xdata()) for axes in (score, changes, share)] == [1, 0, 1]


def test_twelve_rows_are_lines():
    few = dict(list(many().items())[:12])
    assert [axes.get_title() for axes in study_figure.figure_of("A study", MEASURES["flow"], few).axes][1] == "Mask movement"


LABELS = {  # and their methods
    "pairs": {"dense": "dense", "SR-STE 2:4": "srste", "STE 2:4": "ste", "SR-STE 1:4": "srste", "STE 1:4": "ste"},
    "the other way round": {"STE 2:4": "ste", "SR-STE 2:4": "srste", "STE 1:4": "ste", "SR-STE 1:4": "srste", "dense": "dense"},
    "by lambda": {"dense": "dense", "2:4, lambda 0": "ste", "2:4, lambda 1": "srste", "1:4, lambda 0": "ste"},
    "after a rival": {"GMP 2:4": "gmp", "SR-STE 2:4": "srste", "STE 1:4": "ste", "1:4, other": "other"},
    "without a pattern": {"STE": "ste", "Eq. 4: weight": "srste", "Eq. 5: sign": "srste"},
    "more than colours": {
        **{"dense": "dense", "STE 2:4": "ste", "SR-STE 2:4": "srste"},
        **{f"GMP {number} %": "gmp" for number in range(8)},
        **{"STE, unstructured": "ste_unstructured"},
        **{f"RigL {number} %": "rigl" for number in range(20)},
    },
}


@pytest.mark.parametrize("methods", LABELS.values(), ids=LABELS)
def test_methods_have_their_lines_in_every_figure(methods):
    styles = study_figure._styles(methods, methods)
    assert set(styles) == set(methods)
    for label, method in methods.items():
        assert styles[label]["linestyle"] == {"srste": "-", "ste": "--", "dense": "-"}.get(method, styles[label]["linestyle"]), label
    assert len({tuple(style.values()) for style in styles.values()}) == len(methods), "each row has a look of its own"


def test_where_colours_come_again_their_first_rows_keep_the_lines():
    labels = ["dense", *(f"lambda {number}" for number in range(12))]
    styles = study_figure._styles(labels, dict.fromkeys(labels[1:], "srste"))
    assert [styles[label]["linestyle"] for label in labels] == ["-"] * 10 + ["--"] * 3


def test_rows_of_one_pattern_share_a_colour():
    colours = [style["color"] for _, style in sorted(study_figure._styles(LABELS["pairs"], LABELS["pairs"]).items())]
    assert [colours.index(colour) for colour in colours] == [0, 1, 0, 1, 4]  # SR-STE 1:4 and 2:4, STE 1:4 and 2:4, dense


@pytest.mark.parametrize("alone", [(), ("dense 2:4",)], ids=["of one pattern", "dense watched by another"])
def test_a_study_draws_the_movement_of_masks_that_can_be_compared(runs, alone):
    left, middle, _ = study_figure.figure_of("A study", MEASURES["classification"], rows(runs), alone).axes
    drawn = [line.get_label() for line in middle.lines]
    assert drawn == [label for label in rows(runs) if label not in alone]
    assert [line.get_label() for line in left.lines] == list(rows(runs))
