"""What the pictures of a study share: their size, and how axes are ticked, cut and named."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, Literal

from .files import write_whole

__all__ = [
    "GROUND",
    "MARKS",
    "OUTSIDE",
    "SMALL",
    "TEXT",
    "TITLE",
    "WIDTH",
    "apart",
    "far_words",
    "name_the_far",
    "percent_words",
    "plain_axes",
    "seeds_words",
    "shares",
    "without_far",
    "write_png",
]

# Inches. A page shows a picture as about 900 pixels wide, 90 for each of these, where type of nine points has letters of eleven pixels.
WIDTH = 10.0
TITLE, TEXT, SMALL = 11, 9, 8  # points
GROUND = "#eef1f5"  # under what belongs together
MARKS: dict[str, Any] = {"alpha": 0.85, "markersize": 6.5, "markeredgewidth": 0.3, "markeredgecolor": "white"}  # of single runs
OUTSIDE = "numbers at the edge: runs that lie outside"
_AS_MANY = 1.02  # times as many weights are still as many: STR comes to 6.18 % where 1:16 has 6.25


def write_png(figure: Any, path: Path) -> None:
    """A picture of matplotlib's, whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    write_whole(path, drawn.getvalue())


def plain_axes(axes: Any) -> None:
    """The frame and the type that all axes have."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=TEXT)
    for words in (axes.xaxis.label, axes.yaxis.label):
        words.set_fontsize(TEXT)


def seeds_words(counts: Sequence[int]) -> str:
    """Of how many runs the rows are: "5 seeds", "1 to 5 seeds"."""
    words = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return f"{words} seed" if words == "1" else f"{words} seeds"


def shares(kept: Mapping[str, float]) -> list[tuple[str, list[str]]]:
    """Rows that keep as many weights, from the most on: what share that is in words, and their names in the order given."""
    groups: list[list[str]] = []
    for label in sorted(kept, key=lambda label: -kept[label]):
        if groups and kept[groups[-1][0]] <= _AS_MANY * kept[label]:
            groups[-1].append(label)
        else:
            groups.append([label])
    order = list(kept)
    return [(_share_words([kept[label] for label in group]), sorted(group, key=order.index)) for group in groups]


def _share_words(kept: Sequence[float]) -> str:
    return "all weights kept" if min(kept) >= 1 else f"{percent_words(kept)} % of weights kept"


def percent_words(kept: Sequence[float]) -> str:
    """Three digits of what is one share to three digits, two of what is so to two: 6.18 and 6.25 are 6.2; otherwise from where to where."""
    written = next((words for digits in "32" if len(words := {f"{100 * share:.{digits}g}" for share in kept}) == 1), None)
    return " to ".join(written or (f"{100 * end:.3g}" for end in (min(kept), max(kept))))


def apart(places: Sequence[float], share: float = 0.033, first: Sequence[float] = ()) -> list[float]:
    """Of these places on a logarithmic axis, in order, those that are far enough from each other to be written: by this share of the way
    from the first to the last. `first`: those that others must give way to."""
    least = (places[-1] / places[0]) ** share if places and places[0] > 0 else 1.0
    shown: list[float] = []
    for place in dict.fromkeys((*first, *places)):
        if all(max(place, other) > least * min(place, other) for other in shown):
            shown.append(place)
    return sorted(shown)


def name_the_far(axes: Any, lines: Mapping[int, Sequence[float]], digits: int) -> None:
    """Where a few values would squeeze all others into a corner, end the x axis before them and write them at its edge.

    lines   the values by where they stand on the y axis.
    """
    limits = without_far([value for line in lines.values() for value in line])
    if limits is None:
        return
    axes.set_xlim(limits)
    axes.set_xlabel("\n".join(filter(None, [axes.get_xlabel(), OUTSIDE])))
    for place, values in lines.items():
        for side, words in far_words(values, limits, digits):
            text, x, shift, align = (f"◂ {words}", 0, 3, "left") if side == "low" else (f"{words} ▸", 1, -3, "right")
            axes.annotate(text, (x, place), (shift, 0), ("axes fraction", "data"), "offset points", ha=align, va="center", fontsize=SMALL)


def far_words(values: Sequence[float], limits: tuple[float, float], digits: int) -> Iterator[tuple[Literal["low", "high"], str]]:
    """The runs of a row that lie outside of `limits`, and on which side: "44.44 to 47.84, mean 46.59"."""
    low, high = limits
    mean = fmean(values) if values else 0.0
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
