"""The comparison of the page as plain text: what `nofm report` prints.

Heads of columns say what is counted in words, which are longer than the numbers below them: they are broken into lines, so that the table
of a few configurations fits a terminal of 80 columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from . import curves
from .compare import group_runs
from .evaluations import headlines
from .notices import about_comparing
from .numbers import total_sad
from .read import load
from .sections import KEPT, evaluated_cell, found_cell, found_names, kept_share, starts
from .units import NONE, Unit, plus_minus, unit_of, unit_of_evaluation

__all__ = ["table"]

_JOINED = "\N{NO-BREAK SPACE}"
_HEAD = 14  # letters in a line of a head, where the numbers below it are no wider


def table(runs: Sequence[Path | str]) -> str:
    """One row for each configuration: final metric, weights kept, SAD of the whole run, what a method has found by itself; with
    mean and spread over the seeds."""
    groups = group_runs([load(Path(run)) for run in runs])
    metric = next(iter(curves.metric_names(run for group in groups for run in group.runs)), None)
    unit = None if metric is None else unit_of(metric)
    kept = [f"weights kept in {which} layers" for which in KEPT]
    evaluated = headlines(run.evaluations for group in groups for run in group.runs)
    heads = [_with_unit(unit_of_evaluation(*key)) for key in evaluated]
    final_head = "no metric yet" if unit is None else f"final {_with_unit(unit)}"
    settled = found_names(groups)
    head = ["", "seeds", final_head, *heads, *kept, "mask changes of all weights (SAD)", *(f"{name} found" for name in settled)]
    rows = []
    for group in groups:
        final = NONE if metric is None or unit is None else unit.stat(group.stat(partial(curves.final, metric=metric)))
        sad = group.stat(total_sad)
        moved = NONE if sad is None else plus_minus(sad, lambda value: f"{value:,.0f}")
        seeds = len(group.finished) if len(group.finished) == len(group.runs) else f"{len(group.finished)} of {len(group.runs)}"
        elsewhere = [evaluated_cell(*key, group) for key in evaluated]
        shares = [kept_share(of, group) for of in KEPT.values()]
        rows.append([group.label, str(seeds), final, *elsewhere, *shares, moved, *(found_cell(name, group) for name in settled)])
    rows = [*_stacked(head, rows), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip() for row in rows]
    if any(len(group.finished) > 1 for group in groups):
        lines.append("mean ± standard deviation over seeds")
    if any(curves.averages(run) for group in groups for run in group.runs):
        lines.append("final metrics are of the moving average of the weights, where a run has one")
    lines += starts(groups)
    return "\n".join([*lines, *(f"note: {sentence}" for sentence in about_comparing(groups))])


def _stacked(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The lines of a head, whose last words stand right above the numbers."""
    columns = [textwrap.wrap(words, max(_HEAD, *map(len, cells))) for words, *cells in zip(head, *rows, strict=True)]
    height = max(map(len, columns))
    lines = zip(*([""] * (height - len(column)) + column for column in columns), strict=True)
    return [[words.replace(_JOINED, " ") for words in line] for line in lines]


def _with_unit(unit: Unit) -> str:
    """What is counted and in what, which stay in one line."""
    return f"{unit.words}{_JOINED}{unit.unit}" if unit.unit else unit.words
