"""The picture of a study: where every run ended, the score over epochs, and mask movement over epochs.

Rows that keep as many weights stand together, a line of panels for each share, since only these are rivals; dense, which all are held
against, stands in every line. Of more rows than a reader can follow as lines there is how they ended only (study_ends.py).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, TypeAlias

from .compare import band, stretches, thin_band
from .curves import Curve
from .figures import log_ticks
from .measures import Measure
from .study import Measured
from .study_curves import Curves
from .study_drawing import MARKS, TEXT, TITLE, WIDTH, name_the_far, plain_axes, seeds_words, shares, write_png
from .study_ends import ends_of
from .study_looks import Look, looks_of

__all__ = ["draw", "figure_of"]

_POINTS = 200
_MOST_LINES, _MOST_SHARES = 12, 4  # that can be told apart where they cross (table 1 has eleven), and that fit below one another
_KEY_BEGINS, _KEY_ENDS = 32, 6  # points from the axis to the left, where the line of a row stands beside its name
_NOTHING: Mapping[str, str] = MappingProxyType({})
Drawn: TypeAlias = Mapping[str, tuple[Sequence[Curves], Sequence[Measured]]]


def draw(
    title: str,
    measure: Measure,
    rows: Drawn,
    path: Path,
    alone: Container[str] = (),
    methods: Mapping[str, str] = _NOTHING,
    patterns: Mapping[str, str] = _NOTHING,
    measured_on: str = "test",
) -> None:
    """Write a PNG. Each row: the curves of the runs that have any, and the numbers of all.

    alone      rows whose masks no other row's can be compared with.
    methods    of the rows.
    patterns   of the rows' masks; of dense ones, that they are watched by.
    measured_on  the data of the scores.
    """
    write_png(figure_of(title, measure, rows, alone, methods, patterns, measured_on), path)


def figure_of(
    title: str,
    measure: Measure,
    rows: Drawn,
    alone: Container[str] = (),
    methods: Mapping[str, str] = _NOTHING,
    patterns: Mapping[str, str] = _NOTHING,
    measured_on: str = "test",
) -> Any:
    """The picture as matplotlib has it."""
    from matplotlib.figure import Figure

    methods = {label: methods.get(label, label) for label in rows}
    groups = _groups(rows, methods)
    if len(rows) > _MOST_LINES or len(groups) > _MOST_SHARES:
        return ends_of(title, measure, {label: numbers for label, (_, numbers) in rows.items()}, alone, methods)
    heights = [max(2.1, 0.24 * len(labels) + 0.6) for _, labels in groups]
    figure: Any = Figure(figsize=(WIDTH, sum(heights) + 0.9), layout="constrained")
    seeds = seeds_words([len(numbers) for _, numbers in rows.values()])
    figure.suptitle(
        f"{title}\nleft: every run and the mean (bar); curves: the mean of {seeds}, by the line beside the name", fontsize=TITLE
    )
    for line, (words, labels) in zip(figure.subplots(len(groups), 3, height_ratios=heights, squeeze=False), groups, strict=True):
        group = {label: rows[label] for label in labels}
        looks, ends = looks_of({label: methods[label] for label in labels}), {label: numbers for label, (_, numbers) in group.items()}
        _draw_ends(line[0], measure, ends, looks)
        line[0].set_title(words, fontsize=TEXT, fontweight="bold")
        line[1].set_title(f"{measure.words}, {measured_on}", fontsize=TEXT)
        _draw_curves(line[1:], measure, group, looks, _not_compared(labels, alone, patterns, methods))
    return figure


def _groups(rows: Drawn, methods: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """The rows by the share that they keep, with dense at the head of each; dense by itself where there is nothing else."""
    found = shares({label: fmean(run.kept for run in numbers) for label, (_, numbers) in rows.items()})
    dense = [label for label in rows if methods[label] == "dense"]
    groups = [(words, sparse) for words, labels in found if (sparse := [label for label in labels if label not in dense])]
    return [(words, [*dense, *labels]) for words, labels in groups] or found


def _not_compared(labels: Sequence[str], alone: Container[str], patterns: Mapping[str, str], methods: Mapping[str, str]) -> set[str]:
    """Rows of a line whose masks compare with no other's there: dense, where it is watched by a pattern that none of them has."""
    theirs = {patterns[label] for label in labels if methods[label] != "dense" and patterns.get(label)}
    elsewhere = {label for label in labels if methods[label] == "dense" and theirs and patterns.get(label, "") not in {"", *theirs}}
    return elsewhere | {label for label in labels if label in alone}


def _draw_ends(axes: Any, measure: Measure, rows: Mapping[str, Sequence[Measured]], looks: Mapping[str, Look]) -> None:
    """Where every run ended, by row; beside each name the key to its curve."""
    values = {place: [measure.factor * run.score for run in runs] for place, runs in enumerate(rows.values())}
    for (place, found), look in zip(values.items(), (looks[label] for label in rows), strict=True):
        axes.plot(found, [place] * len(found), marker=look.marker, color=look.colour, linestyle="none", **MARKS)
        axes.plot([fmean(found)], [place], "|", color="black", markersize=11)
        key = {"arrowstyle": "-", "color": look.colour, "linestyle": look.line, "linewidth": 1.5, "shrinkA": 0, "shrinkB": _KEY_ENDS}
        axes.annotate("", (0, place), (-_KEY_BEGINS, 0), ("axes fraction", "data"), "offset points", arrowprops=key)
    axes.set(xlabel=f"{measure.words}, at the end", yticks=range(len(rows)), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticklabels(list(rows))
    plain_axes(axes)
    axes.tick_params(axis="y", pad=_KEY_BEGINS + 3, length=0)
    name_the_far(axes, values, measure.digits)


def _draw_curves(panels: Sequence[Any], measure: Measure, rows: Drawn, looks: Mapping[str, Look], without: Container[str]) -> None:
    """The score and the movement of masks over epochs, the latter of rows whose masks can be compared."""
    score, movement = panels
    for label, (curves, _) in rows.items():
        if curves:
            epoch = curves[0].epoch
            _draw(score, [_scaled(run.score, measure.factor) for run in curves], epoch, label, looks[label])
            if label not in without:
                _draw(movement, [_scaled(run.flips, 100) for run in curves], epoch, label, looks[label], positive=True)
    movement.set_title("mask changes in a step (%)", fontsize=TEXT)
    movement.set_yscale("log")
    log_ticks(movement)
    for axes in panels:
        axes.set_xlabel("epoch")
        plain_axes(axes)


def _scaled(curve: Curve, factor: float) -> Curve:
    return {step: factor * value for step, value in curve.items()}


def _draw(axes: Any, curves: Sequence[Curve], epoch: float, label: str, look: Look, positive: bool = False) -> None:
    mean = thin_band(band([curve for curve in curves if curve]), _POINTS)
    for number, part in enumerate(stretches(mean, positive)):
        style = {"color": look.colour, "linestyle": look.line, "marker": "o" if len(part.steps) == 1 else None}  # one point makes no line
        epochs, means = [step / epoch for step in part.steps], [stat.mean for stat in part.stats]
        axes.plot(epochs, means, label=None if number else label, linewidth=1.4, markersize=2.5, **style)
