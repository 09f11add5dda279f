"""The picture of a study of more rows than lines can be told apart: how the runs of each row ended, a line of dots for each.

Rows that keep as many weights stand together under a heading, the best first, since a list of all would rank rows that are no rivals.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from statistics import fmean
from typing import Any

from .measures import Measure
from .study import Measured
from .study_drawing import GROUND, MARKS, TEXT, TITLE, WIDTH, name_the_far, plain_axes, seeds_words, shares
from .study_looks import look_of

__all__ = ["ends_of"]

_SLOT, _AROUND = 0.2, 1.3  # inches: of a row or a heading, and of what stands above and below


def ends_of(
    title: str,
    measure: Measure,
    rows: Mapping[str, Sequence[Measured]],
    alone: Container[str],
    methods: Mapping[str, str],
) -> Any:
    """The picture as matplotlib has it: the scores of all rows, and mask changes of those whose masks can be compared."""
    from matplotlib.figure import Figure

    best = sorted(rows, key=lambda label: fmean(run.score for run in rows[label]), reverse=measure.higher)
    groups = shares({label: fmean(run.kept for run in rows[label]) for label in best})
    slots = _slots(groups)
    count = len(rows) + len(groups)
    figure: Any = Figure(figsize=(WIDTH, _SLOT * count + _AROUND), layout="constrained")
    seeds = seeds_words([len(runs) for runs in rows.values()])
    figure.suptitle(f"{title}\nby the share of weights that is kept, the best row of each first; {seeds} a row", fontsize=TITLE)
    score, changes = figure.subplots(1, 2, sharey=True, width_ratios=(2.2, 1))
    scores = {slots[label]: [measure.factor * run.score for run in rows[label]] for label in best}
    moved = {slots[label]: [run.sad for run in rows[label] if label not in alone] for label in best}
    for axes, values, words in (
        (score, scores, f"{measure.words}, every run and the mean (bar)"),
        (changes, moved, "mask changes per weight"),
    ):
        for label in slots:
            look, found, slot = look_of(methods[label]), values[slots[label]], slots[label]
            axes.plot(found, [slot] * len(found), marker=look.marker, color=look.colour, linestyle="none", **MARKS)
            axes.plot([fmean(found)] if found else [], [slot] if found else [], "|", color="black", markersize=11)
        axes.set(xlabel=words, yticks=list(slots.values()), yticklabels=list(slots), ylim=(count - 0.5, -0.5))
        plain_axes(axes)
        axes.tick_params(axis="y", length=0)
        _draw_ground(axes, groups, slots)
    for words, labels in groups:
        score.annotate(words, (0, slots[labels[0]] - 1), (4, 0), ("axes fraction", "data"), "offset points", va="center", fontsize=TEXT,
                       fontweight="bold")  # fmt: skip
    name_the_far(score, scores, measure.digits)
    changes.set_xlim(left=-0.03 * changes.get_xlim()[1])  # dots at zero are whole
    return figure


def _slots(groups: Sequence[tuple[str, Sequence[str]]]) -> dict[str, int]:
    """Where each row stands, from above: below the heading of its group."""
    slots: dict[str, int] = {}
    for number, (_, labels) in enumerate(groups, start=1):
        slots |= {label: len(slots) + number + place for place, label in enumerate(labels)}
    return slots


def _draw_ground(axes: Any, groups: Sequence[tuple[str, Sequence[str]]], slots: Mapping[str, int]) -> None:
    """Under every second group, from its heading on, so that one sees where it ends."""
    for _, labels in groups[::2]:
        axes.axhspan(slots[labels[0]] - 1.5, slots[labels[-1]] + 0.5, color=GROUND, zorder=0, linewidth=0)
