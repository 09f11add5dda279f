"""The picture of a study: the score over epochs, mask movement over epochs, and where every run ended.

Of more rows than a reader can follow as lines, how they ended only: a line of dots for each, the best first.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean, quantiles
from types import MappingProxyType
from typing import Any, Literal

from .compare import band, stretches, thin_band
from .curves import Curve
from .figures import log_ticks
from .files import write_whole
from .measures import Measure
from .study import Measured
from .study_curves import Curves

__all__ = ["COLOURS", "MANY_COLOURS", "apart", "draw", "far_words", "figure_of", "without_far", "write_png"]

_POINTS = 200
_MOST_LINES = 12  # that can be told apart where they cross; table 1 has eleven
_LINES = ("-", "--", ":", "-.")
# In every figure, whatever the order of its rows: the paper's method is solid, and what it is held against, STE, dashed.
_METHOD_LINES = {"srste": "-", "ste": "--"}
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
MANY_COLOURS = (*COLOURS, "#7f9000", "#8c1c59", "#00646e")  # where nothing but colours tells methods apart; table 3 has twelve of them
_DENSE = "#222222"  # which none of them comes near


def draw(
    title: str,
    measure: Measure,
    rows: Mapping[str, tuple[Sequence[Curves], Sequence[Measured]]],
    path: Path,
    alone: Container[str] = (),
    methods: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a PNG. Each row: the curves of the runs that have any, and the numbers of all.

    alone     rows whose masks no other row's can be compared with.
    methods   of the rows.
    """
    write_png(figure_of(title, measure, rows, alone, methods), path)


def write_png(figure: Any, path: Path) -> None:
    """A picture of matplotlib's, whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    write_whole(path, drawn.getvalue())


def figure_of(
    title: str,
    measure: Measure,
    rows: Mapping[str, tuple[Sequence[Curves], Sequence[Measured]]],
    alone: Container[str] = (),
    methods: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """The picture as matplotlib has it."""
    from matplotlib.figure import Figure

    if len(rows) > _MOST_LINES:
        return _ends(title, measure, {label: numbers for label, (_, numbers) in rows.items()}, alone, methods)
    figure: Any = Figure(figsize=(15, max(4.2, 0.24 * len(rows) + 1.6)), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    figure.suptitle(title)
    styles = _styles(rows, methods)
    for number, (label, (curves, numbers)) in enumerate(rows.items()):
        style = styles[label]
        if curves:
            epoch = curves[0].epoch
            _draw(left, [_scaled(run.score, measure.factor) for run in curves], epoch, label, style)
            if label not in alone:
                _draw(middle, [_scaled(run.flips, 100) for run in curves], epoch, label, style, positive=True)
        final = [measure.factor * run.score for run in numbers]
        right.plot(final, [number] * len(final), "o", color=style["color"], alpha=0.5, markersize=5)
        right.plot([sum(final) / len(final)], [number], "|", color="black", markersize=12)
    left.set(xlabel="epoch", ylabel=measure.words, title="Test score, mean over seeds")
    middle.set(xlabel="epoch", ylabel="weights that change side in a step (%)", title="Mask movement", yscale="log")
    log_ticks(middle)
    right.set(
        xlabel=f"{measure.words}, at the end",
        title="Every run (dots) and the mean (bar)",
        yticks=range(len(rows)),
        ylim=(len(rows) - 0.5, -0.5),
    )
    right.set_yticklabels(list(rows))
    _name_the_far(right, [[measure.factor * run.score for run in numbers] for _, numbers in rows.values()], measure.digits)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _ends(title: str, measure: Measure, rows: Mapping[str, Sequence[Measured]], alone: Container[str], methods: Mapping[str, str]) -> Any:
    """How the runs of each row ended, a line of dots for each: score, mask changes, weights kept. Rows of one method share a colour, or
    rows of one pattern where all are of one method."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    # What is shown, of all rows or of those whose masks can be compared.
    columns: list[tuple[str, Callable[[Measured], float], Container[str]]] = [
        (f"{measure.words}, at the end", lambda run: measure.factor * run.score, ()),
        ("mask changes per weight, whole run", lambda run: run.sad, alone),
        ("weights kept in sparse layers (%), log", lambda run: 100 * run.kept, ()),
    ]
    order = sorted(rows, key=lambda label: fmean(run.score for run in rows[label]), reverse=measure.higher)
    subject = {label: methods.get(label, label) for label in rows}
    if len(set(subject.values()) - {"dense"}) == 1:
        subject = {label: name if name == "dense" else _pattern_of(label) for label, name in subject.items()}
    colours = dict(zip(dict.fromkeys(subject.values()), cycle(MANY_COLOURS), strict=False)) | {"dense": _DENSE}
    figure: Any = Figure(figsize=(15, 0.26 * len(rows) + 1.6), layout="constrained")
    figure.suptitle(f"{title}\nEvery run (dots) and the mean (bar), the best row first")
    for axes, (words, value, without) in zip(figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1)), columns, strict=True):
        for place, label in enumerate(order):
            found = [value(run) for run in rows[label] if label not in without]
            axes.plot(found, [place] * len(found), "o", color=colours[subject[label]], alpha=0.8, markersize=5)
            axes.plot([fmean(found)] if found else [], [place] if found else [], "|", color="black", markersize=12)
        axes.set(xlabel=words, yticks=range(len(order)), yticklabels=order, ylim=(len(order) - 0.5, -0.5))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    score, changes, kept = figure.axes
    _name_the_far(score, [[measure.factor * run.score for run in rows[label]] for label in order], measure.digits)
    changes.set_xlim(left=-0.02 * changes.get_xlim()[1])  # dots at zero are whole
    kept.set_xscale("log")  # 5 % and 6 % are as far apart as 50 and 60
    kept.set_xticks(apart(sorted({float(f"{100 * run.kept:.3g}") for runs in rows.values() for run in runs}), 0.1))
    kept.xaxis.set_minor_locator(NullLocator())
    kept.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure


def apart(places: Sequence[float], share: float = 0.033) -> list[float]:
    """Of these places on a logarithmic axis, in order, those that are far enough from the one before for both to be written: by this share
    of the way from the first to the last."""
    least = (places[-1] / places[0]) ** share if places and places[0] > 0 else 1.0
    shown: list[float] = []
    for place in places:
        if not shown or place > least * shown[-1]:
            shown.append(place)
    return shown


def _name_the_far(axes: Any, lines: Sequence[Sequence[float]], digits: int) -> None:
    """Where a few values would squeeze all others into a corner, end the axis before them and write them at its edge."""
    limits = without_far([value for line in lines for value in line])
    if limits is None:
        return
    axes.set_xlim(limits)
    axes.set_title("\n".join(filter(None, [axes.get_title(), "numbers at the edge: runs that lie outside"])), fontsize=9)
    for place, values in enumerate(lines):
        for side, words in far_words(values, limits, digits):
            text, x, shift, align = (f"◂ {words}", 0, 3, "left") if side == "low" else (f"{words} ▸", 1, -3, "right")
            axes.annotate(text, (x, place), (shift, 0), ("axes fraction", "data"), "offset points", ha=align, va="center", fontsize=8)


def far_words(values: Sequence[float], limits: tuple[float, float], digits: int) -> Iterator[tuple[Literal["low", "high"], str]]:
    """The runs of a row that lie outside of `limits`, and on which side: "44.44 to 47.84, mean 46.59"."""
    low, high = limits
    mean = fmean(values)
    sides: tuple[tuple[Literal["low", "high"], list[float], bool], ...] = (
        ("low", [value for value in values if value < low], mean < low),
        ("high", [value for value in values if value > high], mean > high),
    )
    for side, far, is_mean_far in sides:
        if far:
            words = " to ".join(f"{value:.{digits}f}" for value in sorted({min(far), max(far)}))
            yield side, words + (f", mean {mean:.{digits}f}" if is_mean_far and len(values) > 1 else "")


def without_far(found: Sequence[float]) -> tuple[float, float] | None:
    """Limits of an axis without the values that are beyond the quartiles by more than three times the distance of these, and with room
    for words in their place; None where the others have a third of the axis all the same."""
    values = sorted(filter(math.isfinite, found))
    first, _, third = quantiles(values, n=4) if len(values) > 1 else (0.0, 0.0, 0.0)
    near = [value for value in values if abs(value - (first + third) / 2) <= 3.5 * (third - first)]
    span = near[-1] - near[0] if near else 0.0
    if not 0 < 3 * span < values[-1] - values[0]:
        return None
    return near[0] - (0.3 if values[0] < near[0] else 0.05) * span, near[-1] + (0.3 if near[-1] < values[-1] else 0.05) * span


def _pattern_of(label: str) -> str:
    """The N:M that a row's name speaks of; the name itself where it speaks of none."""
    return found[0] if (found := re.search(r"\d+:\d+", label)) else label


def _styles(labels: Iterable[str], methods: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """A colour and a kind of line for each row, no two alike up to forty. Two rows of one pattern share a colour, so that
    it is methods that the lines tell apart."""
    pattern = {label: _pattern_of(label) for label in labels}
    pairs = all(count <= 2 for count in Counter(pattern.values()).values())
    subject = pattern if pairs else {label: label for label in pattern}
    place = {name: number for number, name in enumerate(dict.fromkeys(subject.values()))}
    styles: dict[str, dict[str, str]] = {}
    # Rows choose their lines: while there are colours those of the two methods first.
    for label in sorted(subject, key=lambda label: (place[subject[label]] // len(COLOURS), methods.get(label) not in _METHOD_LINES)):
        colour, own = COLOURS[place[subject[label]] % len(COLOURS)], _METHOD_LINES.get(methods.get(label, ""), "-")
        choices = [{"color": colour, "linestyle": line} for line in (own, *_LINES)]
        styles[label] = next((style for style in choices if style not in styles.values()), choices[0])
    return styles


def _scaled(curve: Curve, factor: float) -> Curve:
    return {step: factor * value for step, value in curve.items()}


def _draw(axes: Any, curves: Sequence[Curve], epoch: float, label: str, style: Mapping[str, Any], positive: bool = False) -> None:
    mean = thin_band(band([curve for curve in curves if curve]), _POINTS)
    for number, part in enumerate(stretches(mean, positive)):
        dot = "o" if len(part.steps) == 1 else None  # one point makes no line
        epochs, means = [step / epoch for step in part.steps], [stat.mean for stat in part.stats]
        axes.plot(epochs, means, label=None if number else label, linewidth=1.3, marker=dot, markersize=2.5, **style)
