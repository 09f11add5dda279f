"""The second picture of a study whose methods come at several sparsities: the score by the share of weights that is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from .compare import Stat, stat
from .measures import Measure
from .study import Measured
from .study_figure import MANY_COLOURS, apart, write_png

__all__ = ["Point", "draw_kept", "figure_of", "lines_of"]

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")  # ten, and thirteen colours: pairs of the two come again after 130 lines
_SPARSITY = re.compile(r",? exponent [\d.]+$| \d+:\d+$| [\d.]+ %$")  # the end of a row's name: STR's exponent, 2:8 or 95 %


@dataclass(frozen=True)
class Point:
    """A row: the share of weights that its runs keep on average, and their score."""

    kept: float
    score: Stat


def lines_of(rows: Mapping[str, Sequence[Measured]]) -> dict[str, list[Point]]:
    """By method, as far as the names of rows tell it: its rows from the sparsest on. Dense rows are not among them.

    Empty where there is nothing to compare: fewer than two methods that come at two sparsities.
    """
    lines: dict[str, list[Point]] = {}
    for label, runs in rows.items():
        kept, score = stat(run.kept for run in runs), stat(run.score for run in runs)
        if kept is not None and score is not None and kept.mean < 1 and _SPARSITY.search(label):
            lines.setdefault(_SPARSITY.sub("", label), []).append(Point(kept.mean, score))
    several = [line for line in lines.values() if len({round(point.kept, 3) for point in line}) > 1]
    return {name: sorted(line, key=lambda point: point.kept) for name, line in lines.items()} if len(several) > 1 else {}


def figure_of(title: str, measure: Measure, rows: Mapping[str, Sequence[Measured]]) -> Any:
    """The picture as matplotlib has it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure: Any = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    lines = lines_of(rows)
    for number, (name, points) in enumerate(lines.items()):
        colour, marker = MANY_COLOURS[number % len(MANY_COLOURS)], _MARKERS[number % len(_MARKERS)]
        kept, scores = [100 * point.kept for point in points], [measure.factor * point.score.mean for point in points]
        spreads = [measure.factor * (point.score.spread or 0.0) for point in points]
        axes.errorbar(kept, scores, yerr=spreads, label=name, color=colour, marker=marker, markersize=5, linestyle="none", capsize=2)
        places = sorted(set(kept))  # 2:4 and 4:8 keep as many: the line goes through their mean
        through = [fmean(score for at, score in zip(kept, scores, strict=True) if at == place) for place in places]
        axes.plot(places, through, color=colour, linewidth=1.2)
    if dense := stat(run.score for run in rows.get("dense", ())):
        axes.axhline(measure.factor * dense.mean, color="black", linestyle=":", linewidth=1, label="dense")
    axes.set(
        xscale="log",
        xlabel="weights kept in sparse layers (%)",
        ylabel=measure.words,
        title=f"{title}\nmean and spread over seeds (no bar: one run)",
    )
    axes.set_xticks(apart(sorted({float(f"{100 * point.kept:.3g}") for points in lines.values() for point in points})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=9, frameon=False)
    return figure


def draw_kept(title: str, measure: Measure, rows: Mapping[str, Sequence[Measured]], path: Path) -> bool:
    """Write a PNG, where there is something to compare; whether there is."""
    if not lines_of(rows):
        path.unlink(missing_ok=True)  # of a time when there was
        return False
    write_png(figure_of(title, measure, rows), path)
    return True
