"""The second picture of a study whose methods come at several sparsities: the score by the share of weights that is kept.

Rivals at one sparsity keep exactly as many weights, so their markers would lie on one another. Those that would stand side by side, as
near to their share as they can.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, mode
from types import MappingProxyType
from typing import Any, TypeVar

from .compare import Stat, stat
from .measures import Measure
from .study import Measured
from .study_drawing import GROUND, SMALL, TEXT, TITLE, WIDTH, apart, percent_words, plain_axes, seeds_words, shares, write_png
from .study_looks import LEVEL, Look, key_of, looks_of

__all__ = ["Point", "draw_kept", "figure_of", "lines_of"]

_MARKER, _PITCH, _LETTER = 6.0, 8.0, 6.0  # points: of a marker, from one to the next beside it, of a letter of the words above one
_FAR = 2  # places from its share
_T = TypeVar("_T")
_NOTHING: Mapping[str, str] = MappingProxyType({})
_SPARSITY = re.compile(r",? exponent [\d.]+$| \d+:\d+$| [\d.]+ %$")  # the end of a row's name: STR's exponent, 2:8 or 95 %


@dataclass(frozen=True)
class Point:
    """A row: the share of weights that its runs keep on average, their score, and what its name says of the share."""

    kept: float
    score: Stat
    words: str


def lines_of(rows: Mapping[str, Sequence[Measured]]) -> dict[str, list[Point]]:
    """By method, as far as the names of rows tell it: its rows from the sparsest on. Dense rows are not among them, nor those that have
    lost all weights, as STR's may: shares are drawn on a logarithmic axis, which has no place for 0.

    Empty where there is nothing to compare: fewer than two methods that come at two sparsities.
    """
    lines: dict[str, list[Point]] = {}
    for label, runs in rows.items():
        kept, score = stat(run.kept for run in runs), stat(run.score for run in runs)
        if kept is not None and score is not None and math.isfinite(score.mean) and 0 < kept.mean < 1 and (said := _SPARSITY.search(label)):
            lines.setdefault(_SPARSITY.sub("", label), []).append(Point(kept.mean, score, said[0].strip(" ,")))
    several = [line for line in lines.values() if len({round(point.kept, 3) for point in line}) > 1]
    return {name: sorted(line, key=lambda point: point.kept) for name, line in lines.items()} if len(several) > 1 else {}


def figure_of(title: str, measure: Measure, rows: Mapping[str, Sequence[Measured]], methods: Mapping[str, str] = _NOTHING) -> Any:
    """The picture as matplotlib has it."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    axes = figure.subplots()
    lines = lines_of(rows)
    own = {_SPARSITY.sub("", label): methods.get(label, _SPARSITY.sub("", label)) for label in rows}
    looks = looks_of({name: own[name] for name in lines})
    seeds = seeds_words([point.score.n for points in lines.values() for point in points])
    axes.set_title(f"{title}\nmean and spread over {seeds} (no bar: one run)", fontsize=TITLE)
    axes.set_xlabel("weights kept in sparse layers (%), logarithmic; rows that keep as many stand side by side, lines join their means")
    axes.set_ylabel(measure.words)
    dense = stat(measure.factor * run.score for run in rows.get("dense", ()))
    dense = dense if dense is not None and math.isfinite(dense.mean) else None
    if dense is not None:
        axes.axhline(dense.mean, color=LEVEL.colour, linestyle=LEVEL.line, linewidth=1.2)
    _set_limits(axes, [point for points in lines.values() for point in points], measure.factor, dense)
    plain_axes(axes)
    longer = _other_lengths(rows)
    keys = [key_of(look, name + longer.get(name, "")) for name, look in looks.items()] + [key_of(LEVEL, "dense")] * (dense is not None)
    figure.legend(handles=keys, loc="outside right upper", fontsize=TEXT, frameon=False, handlelength=3)
    figure.draw_without_rendering()  # only now it is known how large the axes are, and so how wide a marker is on them
    marks = [_mark(axes, name, point, points, measure.factor) for name, points in lines.items() for point in points]
    marks = [mark for group in sorted(_together([mark.x for mark in marks], marks), key=len) for mark in group]
    _draw_marks(axes, marks, _side_by_side(marks), looks)
    return figure


def _other_lengths(rows: Mapping[str, Sequence[Measured]]) -> dict[str, str]:
    """How long the methods train that do not train as long as most rows: a picture would compare them without a word."""
    told = [(_SPARSITY.sub("", label), run.epochs) for label, runs in rows.items() for run in runs if math.isfinite(run.epochs)]
    usual = mode(epochs for _, epochs in told) if told else math.nan
    own = {name: {epochs for other, epochs in told if other == name} for name, _ in told}
    return {name: f" ({min(lengths):.4g} epochs)" for name, lengths in own.items() if len(lengths) == 1 and usual not in lengths}


def _set_limits(axes: Any, points: Sequence[Point], factor: float, dense: Stat | None) -> None:
    """Room for all that will be drawn, and a tick for each share, as far as there is room for it: the ends, and where most rows are."""
    from matplotlib.ticker import NullLocator

    kept = sorted(point.kept for point in points)
    ends = [factor * (point.score.mean + sign * (point.score.spread or 0.0)) for point in points for sign in (-1, 1)]
    ends += [dense.mean] if dense is not None else []
    beside, around = (kept[-1] / kept[0]) ** 0.11, 0.07 * (max(ends) - min(ends) or 1.0)
    axes.set(xscale="log", xlim=(100 * kept[0] / beside, 100 * kept[-1] * beside), ylim=(min(ends) - around, max(ends) + around))
    groups = {100 * fmean(group): group for group in _together(kept, list(kept))}
    by_rows = sorted(groups, key=lambda place: (place not in (min(groups), max(groups)), -len(groups[place]), place))
    axes.set_xticks(shown := apart(sorted(groups), first=by_rows), labels=[percent_words(groups[place]) for place in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _together(kept: Sequence[float], things: Sequence[_T]) -> list[list[_T]]:
    """Things whose rows keep as many weights, by the shares of all of them."""
    groups = shares({str(number): share for number, share in enumerate(kept)})
    return [[things[int(number)] for number in group] for _, group in groups]


@dataclass(frozen=True)
class _Mark:
    """A point as it is drawn, without its method: where it stands on the axes, and what it covers there from below to above, in points:
    the marker, and that with the bar of its spread and the words above this."""

    name: str
    x: float
    y: float
    spread: float
    words: str  # its pattern, where its method has several that keep as many
    centre: float
    marker: tuple[float, float]
    whole: tuple[float, float]


def _mark(axes: Any, name: str, point: Point, line: Sequence[Point], factor: float) -> _Mark:
    x, y, spread = 100 * point.kept, factor * point.score.mean, factor * (point.score.spread or 0.0)
    (own,) = (group for group in _together([other.kept for other in line], line) if point in group)
    words = point.words if len(own) > 1 else ""
    (centre, low), (_, high) = 72 / axes.figure.dpi * axes.transData.transform([(x, y - spread), (x, y + spread)])
    below, above = (low + high - _MARKER) / 2, (low + high + _MARKER) / 2
    return _Mark(name, x, y, spread, words, centre, (below, above), (min(low, below), max(high, above) + _LETTER * len(words)))


def _side_by_side(marks: Sequence[_Mark]) -> list[int]:
    """How many places each stands beside where it was measured: as few as it can so that it touches none of those before it, for which
    reason those that are alone at their share come first. Where that would be far from its share, bars may touch, and markers may not."""
    taken: list[tuple[float, _Mark]] = []
    moved: list[int] = []
    for mark in marks:
        side = _roomier_side(mark, marks)
        places = sorted(range(-len(marks), len(marks) + 1), key=lambda place: (abs(place), -side * place))
        near = [(place, True) for place in places if abs(place) <= _FAR]
        for place, whole in [*near, *((place, False) for place in places)]:
            centre = mark.centre + place * _PITCH
            if not any(abs(centre - at) < _PITCH - 0.01 and _touch(mark, other, whole) for at, other in taken):
                taken.append((centre, mark))
                moved.append(place)
                break
    return moved


def _roomier_side(mark: _Mark, marks: Sequence[_Mark]) -> int:
    """Where the next share is farther away, 1 for more weights: a mark that has to make way should not come to stand at another share."""
    distances = [other.centre - mark.centre for other in marks if abs(other.centre - mark.centre) > _FAR * _PITCH]
    more, fewer = ([abs(distance) for distance in distances if distance * sign > 0] for sign in (1, -1))
    return 1 if min(more, default=math.inf) >= min(fewer, default=math.inf) else -1


def _touch(one: _Mark, other: _Mark, whole: bool) -> bool:
    (low, high), (least, most) = (one.whole, other.whole) if whole else (one.marker, other.marker)
    return low <= most and least <= high


def _draw_marks(axes: Any, marks: Sequence[_Mark], places: Sequence[int], looks: Mapping[str, Look]) -> None:
    pixels = axes.transData.transform([(mark.x, mark.y) for mark in marks])
    pixels[:, 0] += [_PITCH * axes.figure.dpi / 72 * place for place in places]
    found = list(zip(marks, map(float, axes.transData.inverted().transform(pixels)[:, 0]), strict=True))
    for group in _together([mark.x for mark in marks], found):
        if len({x for _, x in group}) > 1:
            _draw_ground(axes, [x for _, x in group])
    for name, look in looks.items():
        own = [(mark, x) for mark, x in found if mark.name == name]
        for mark, x in own:
            style = {"color": look.colour, "marker": look.marker, "fillstyle": look.fill, "markersize": _MARKER, "elinewidth": 1.2}
            _, _, bars = axes.errorbar([x], [mark.y], yerr=[mark.spread], label=name, zorder=3, **style)
            bars[0].set_zorder(2.5)  # below all markers
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
            axes.annotate(mark.words, (x, mark.y + mark.spread), (0, 4), textcoords="offset points", rotation=90, ha="center", va="bottom",
                          fontsize=SMALL, bbox=ground if mark.words else None)  # fmt: skip
        groups = _together([mark.x for mark, _ in own], own)  # 2:4 and 4:8 keep as many: the line goes through their mean
        through = [(fmean(x for _, x in group), fmean(mark.y for mark, _ in group)) for group in groups]
        axes.plot(*zip(*through, strict=True), color=look.colour, linestyle=look.line, linewidth=1, alpha=0.6, zorder=2)


def _draw_ground(axes: Any, places: Sequence[float]) -> None:
    """Under markers that stand side by side and are of one share."""
    by_half = axes.figure.dpi / 72 * _PITCH / 2
    ends = axes.transData.transform([(min(places), 0), (max(places), 0)])[:, 0] + (-by_half, by_half)
    (left, _), (right, _) = axes.transData.inverted().transform([(end, 0) for end in ends])
    axes.axvspan(left, right, color=GROUND, zorder=0, linewidth=0)


def draw_kept(
    title: str, measure: Measure, rows: Mapping[str, Sequence[Measured]], path: Path, methods: Mapping[str, str] = _NOTHING
) -> bool:
    """Write a PNG, where there is something to compare; whether there is."""
    if not lines_of(rows):
        path.unlink(missing_ok=True)  # of a time when there was
        return False
    write_png(figure_of(title, measure, rows, methods), path)
    return True
