"""The two curves that tell most, as one PNG with a white ground: the first metric, and below it how fast masks move.

One legend for both stands below them, and the picture is as much higher as it needs, so that the curves have their room.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any

from . import curves
from .compare import Band, Group, stretches
from .figures import log_ticks, series_colour
from .measured_on import are_held_out, data_of_all, measured_alike
from .sections import marks_of
from .units import unit_of

__all__ = ["drawn", "figure_of"]

_COLOURS = ("#555555", "#d95f02", "#1b7f79", "#7a4fb5", "#c2287f", "#2f6fb3", "#8a6d00", "#a33b20")
_LINES: tuple[Any, ...] = ("-", "--", "-.", (0, (6, 1.2, 1, 1.2, 1, 1.2)))  # for groups that share a colour; dots are for marks
_MARK = "from here on as sparse as in the end"
_MARK_COLOURS = {series_colour(index): colour for index, colour in enumerate(_COLOURS)} | {"muted": "black"}
_WIDTH, _HEIGHT = 7.0, 7.0  # inches, the height without the legend
_LETTERS = 80  # that a line of the title has room for, and a name in the smaller type of the legend
_TITLE, _NAME = 10, 9  # points of their type
_MOST_COLUMNS = 4


def drawn(groups: Sequence[Group]) -> bytes:
    """The bytes of the picture: mean and spread over the seeds of each group."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar in a name is a dollar
        file = io.BytesIO()
        figure_of(groups).savefig(file, format="png", dpi=130, metadata={"Software": None})
    return file.getvalue()


def figure_of(groups: Sequence[Group]) -> Any:
    """The picture as matplotlib has it."""
    from matplotlib.figure import Figure

    runs = [run for group in groups for run in group.runs]
    metric = next(iter(curves.metric_names(runs)), None)
    patterns = ", ".join(dict.fromkeys(layer.words for run in runs for layer in run.layers if layer.pattern))
    figure: Any = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for index, group in enumerate(groups):
        colour, line = _COLOURS[index % len(_COLOURS)], _LINES[index // len(_COLOURS) % len(_LINES)]
        if metric is not None:
            most = 100.0 if unit_of(metric).unit == "%" else math.inf
            _draw(above, group.label, group.band(partial(curves.evals, metric=metric)), colour, 1.0, most, line=line)
        _draw(below, group.label, group.band(curves.flip_rate), colour, 100.0, math.inf, positive=True, line=line)
    end = max(axes.dataLim.x1 for axes in (above, below))
    marks = [(mark.step, _MARK_COLOURS[mark.colour]) for mark in marks_of(groups) if mark.step <= end]
    for step, colour in marks:
        for axes in (above, below):
            axes.axvline(step, color=colour, linestyle=":", linewidth=1.2)
    if marks:  # one entry for all of them, in their colour where they have the same
        colour = marks[0][1] if len({colour for _, colour in marks}) == 1 else "black"
        above.plot([], [], color=colour, linestyle=":", linewidth=1.2, label=_MARK)
    if metric is not None:
        above.set_ylabel(unit_of(metric).axis)
        if unit_of(metric).unit == "%":
            above.set_ylim(_end_in_view(groups, metric), 100.5)
    title = f"{', '.join(dict.fromkeys(run.info['recipe'] for run in runs))}, {patterns} sparse layers; mean and spread of seeds"
    title += f"; measured on {data_of_all(groups)}" if are_held_out(groups) or not measured_alike(groups) else ""
    above.set_title(textwrap.fill(title, _LETTERS), fontsize=_TITLE)
    below.set(ylabel="weights whose mask flips (% a step)", xlabel="step", yscale="log")
    below.set_title("Mask movement: SAD between records, per weight and step", fontsize=_TITLE)
    log_ticks(below)
    for axes in (above, below):
        axes.grid(alpha=0.25)
    _add_legend(figure)
    return figure


def _add_legend(figure: Any) -> None:
    """One legend for all axes, below them, in as many columns as the width has room for. The picture grows by its height, and by the
    lines of a title that has more than one."""
    keys = {name: key for axes in figure.axes for key, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if _MARK in keys:
        keys[_MARK] = keys.pop(_MARK)  # after the curves
    names = [textwrap.fill(name, _LETTERS) for name in keys]
    for columns in range(min(_MOST_COLUMNS, len(keys)), 0, -1):
        legend = figure.legend(
            keys.values(), names, loc="outside lower center", ncols=columns, fontsize=_NAME, frameon=False, handlelength=3
        )
        box = legend.get_window_extent()
        if columns == 1 or box.width <= figure.bbox.width:
            more_lines = sum(axes.get_title().count("\n") for axes in figure.axes)
            figure.set_figheight(_HEIGHT + box.height / figure.dpi + 1.2 * more_lines * _TITLE / 72)
            return
        legend.remove()


def _draw(axes: Any, name: str, band: Band, colour: str, scale: float, most: float, positive: bool = False, line: Any = "-") -> None:
    for number, part in enumerate(stretches(band, positive)):
        middle, spread = [scale * s.mean for s in part.stats], [scale * (s.spread or 0.0) for s in part.stats]
        dot = "o" if len(middle) == 1 else None  # one point makes no line
        axes.plot(part.steps, middle, label=None if number else name, color=colour, linestyle=line, marker=dot, markersize=3)
        low, high = ([min(most, m + sign * s) for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(part.steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _end_in_view(groups: Sequence[Group], metric: str) -> float:
    """Where the axis of a share begins: the last three quarters of all curves are in view, the first climb may not be."""
    late = [
        s.mean
        for group in groups
        if (band := group.band(partial(curves.evals, metric=metric))).stats
        for s in band.stats[len(band.stats) // 4 :]
    ]
    return max(0.0, min(late, default=0.0) - 2)
