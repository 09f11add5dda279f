"""The second picture of a study of lambdas (Fig. 4): the score by lambda. Lambda 0 is STE, and a negative one lies to the left of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .compare import Stat, stat
from .measures import Measure
from .study import Measured
from .study_drawing import OUTSIDE, SMALL, TEXT, TITLE, WIDTH, far_words, plain_axes, seeds_words, without_far, write_png
from .study_looks import LEVEL, LOOKS, Look, key_of, looks_of

__all__ = ["Point", "draw_lambda", "figure_of", "lines_of"]

# A row's name, "lambda 0.0002" or "2:4, lambda -2e-05". Not what has another thing changed beside it ("2:4, decoupled, lambda 1").
_LAMBDA = re.compile(r"(?:(?P<pattern>\d+:\d+), )?lambda (?P<value>-?\d[\d.e+-]*)")
_FEWEST = 3  # lambdas that make a curve; STE and SR-STE, two of them, are what most studies compare
_NEAR = 0.055  # of the width: numbers below the axis that are nearer than that would touch
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Point:
    """A row: its lambda and the scores of its runs."""

    decay: float
    score: Stat
    runs: tuple[float, ...]


def lines_of(rows: Mapping[str, Sequence[Measured]], patterns: Mapping[str, str] = _NOTHING) -> dict[str, list[Point]]:
    """By pattern, the rows whose names are lambdas, from the smallest on. Empty where no pattern has three of them.

    patterns   of the rows, for those whose names do not tell it, since they are of the pattern that the study is about.
    """
    lines: dict[str, list[Point]] = {}
    for label, runs in rows.items():
        found, scores = _LAMBDA.fullmatch(label), tuple(run.score for run in runs)
        if found is not None and (score := stat(scores)) is not None:
            line = lines.setdefault(found["pattern"] or patterns.get(label) or "SR-STE", [])
            line.append(Point(float(found["value"]), score, scores))
    if max(map(len, lines.values()), default=0) < _FEWEST:
        return {}
    return {name: sorted(line, key=lambda point: point.decay) for name, line in lines.items()}


def figure_of(
    title: str,
    measure: Measure,
    rows: Mapping[str, Sequence[Measured]],
    patterns: Mapping[str, str] = _NOTHING,
) -> Any:
    """The picture as matplotlib has it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure: Any = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    axes = figure.subplots()
    lines = lines_of(rows, patterns)
    looks, ste = looks_of(dict.fromkeys(lines, "srste")), LOOKS["ste"]
    for name, points in lines.items():
        look = looks[name]
        for point in points:  # of the line of SR-STE the one at zero is STE
            own = look if point.decay else replace(ste, fill=look.fill)
            dots = [measure.factor * run for run in point.runs]
            style = {
                "color": own.colour,
                "marker": own.marker,
                "fillstyle": own.fill,
                "alpha": 0.6,
                "markersize": 6,
                "markeredgewidth": 0.8,
            }
            axes.plot([point.decay] * len(dots), dots, linestyle="none", **style)
        means = [measure.factor * point.score.mean for point in points]
        spreads = [measure.factor * (point.score.spread or 0.0) for point in points]
        bars: dict[str, Any] = {"color": look.colour, "linestyle": look.line, "linewidth": 1.3, "elinewidth": 1, "capsize": 3}
        axes.errorbar([point.decay for point in points], means, yerr=spreads, label=name, marker="_", markersize=14, **bars)
    dense = [measure.factor * run.score for run in rows.get("dense", ())]
    level = stat(dense)
    if level is not None:
        axes.axhline(level.mean, color=LEVEL.colour, linestyle=LEVEL.line, linewidth=1.2)
    decays = sorted({point.decay for points in lines.values() for point in points})
    # Straight between zero and the smallest of them, and from there on logarithmic. The straight part is half a decade long to each side
    # (matplotlib counts it in 10/9 of one).
    axes.set_xscale("symlog", linthresh=min(abs(decay) for decay in decays if decay), linscale=0.45)
    axes.margins(x=0.09)
    axes.set(xlabel="lambda (logarithmic to both sides of 0, which is STE)", ylabel=measure.words)
    shown = _apart(axes, decays)
    axes.set_xticks(shown, labels=[_words(decay) for decay in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    is_cut = _name_the_far(axes, lines, measure, dense)
    how = (
        f"mean and spread over {seeds_words([point.score.n for points in lines.values() for point in points])}, every run a mark"
        + f"; {OUTSIDE}" * is_cut
    )
    axes.set_title(f"{title}\n{how}", fontsize=TITLE)
    plain_axes(axes)
    _draw_legend(figure, looks, "" if level is None else f"dense: {level.mean:.{measure.digits}f}")  # its line may lie outside
    return figure


def _draw_legend(figure: Any, looks: Mapping[str, Look], dense: str) -> None:
    keys = [key_of(look, name if name == "SR-STE" else f"SR-STE {name}") for name, look in looks.items()]
    keys.append(key_of(replace(LOOKS["ste"], line="none"), "STE (lambda 0)"))
    keys += [key_of(LEVEL, dense)] * bool(dense)
    figure.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=TEXT, frameon=False, handlelength=3.5)


def _words(decay: float) -> str:
    """As people write it: 4.5e-4, and not 0.00045 or 4.5e-04."""
    mantissa, exponent = f"{decay:e}".split("e")
    return f"{decay:g}" if decay == 0 or abs(decay) >= 0.1 else f"{float(mantissa):g}e{int(exponent)}"


def _apart(axes: Any, decays: Sequence[float]) -> list[float]:
    """Those of these places, in order, that can be written below the axis side by side: zero, and outwards from it what has room."""
    scale = axes.xaxis.get_transform()
    low, high = scale.transform(axes.get_xlim())
    place = dict(zip(decays, scale.transform(decays) / (high - low), strict=True))
    shown: list[float] = []
    for decay in sorted(decays, key=abs):
        if all(abs(place[decay] - place[other]) > _NEAR for other in shown):
            shown.append(decay)
    return sorted(shown)


def _name_the_far(axes: Any, lines: Mapping[str, Sequence[Point]], measure: Measure, others: Sequence[float]) -> bool:
    """Where a few runs would squeeze all others into a corner, end the axis before them and write them at its edge; whether it is so."""
    scores = [measure.factor * run for points in lines.values() for point in points for run in point.runs]
    if (limits := without_far([*scores, *others])) is None:
        return False
    axes.set_ylim(limits)
    said: dict[tuple[float, str], list[str]] = {}
    for name, points in lines.items():
        for point in points:
            for side, words in far_words([measure.factor * run for run in point.runs], limits, measure.digits):
                said.setdefault((point.decay, side), []).append(f"{name}\n{words}" if len(lines) > 1 else words)
    for (decay, edge), texts in said.items():
        words = "\n".join(texts).replace(", ", ",\n").replace(" to ", " to\n")  # narrow: what is beside it may be far, too
        text, y, shift, align = (f"{words}\n▾", 0, 3, "bottom") if edge == "low" else (f"▴\n{words}", 1, -3, "top")
        axes.annotate(text, (decay, y), (0, shift), ("data", "axes fraction"), "offset points", ha="center", va=align, fontsize=SMALL)
    return True


def draw_lambda(
    title: str,
    measure: Measure,
    rows: Mapping[str, Sequence[Measured]],
    path: Path,
    patterns: Mapping[str, str] = _NOTHING,
) -> bool:
    """Write a PNG, where there is a curve to show; whether there is."""
    if not lines_of(rows, patterns):
        path.unlink(missing_ok=True)  # of a time when there was
        return False
    write_png(figure_of(title, measure, rows, patterns), path)
    return True
