"""The comparison of the page as plain text, for a terminal of 80 columns: what `nofm report` prints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..columns import table_in_parts, wrapped
from . import curves
from .compare import group_runs
from .evaluations import headlines
from .measured_on import data_of, measured_alike
from .notices import about_comparing
from .numbers import total_sad
from .read import load
from .sections import KEPT, evaluated_cell, found_cell, found_names, kept_share, starts
from .units import NONE, Unit, plus_minus, unit_of, unit_of_evaluation

__all__ = ["table"]

_JOINED = "\N{NO-BREAK SPACE}"  # no line ends there


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
    beside = [] if measured_alike(groups) else [[words.replace("training images ", "")] for words in data_of(groups)]
    on = ["measured on"] * bool(beside)
    moves = "mask changes of all weights (SAD)"
    head = ["", "seeds", final_head, *on, *heads, *kept, moves, *(f"{name} found" for name in settled)]
    rows = []
    for group, measured in zip(groups, beside or [[] for _ in groups], strict=True):
        final = NONE if metric is None or unit is None else unit.stat(group.stat(partial(curves.final, metric=metric)))
        sad = group.stat(total_sad)
        moved = NONE if sad is None else plus_minus(sad, lambda value: f"{value:,.0f}")
        seeds = len(group.finished) if len(group.finished) == len(group.runs) else f"{len(group.finished)} of {len(group.runs)}"
        elsewhere = [evaluated_cell(*key, group) for key in evaluated]
        shares = [kept_share(of, group) for of in KEPT.values()]
        rows.append([group.label, str(seeds), final, *measured, *elsewhere, *shares, moved, *(found_cell(name, group) for name in settled)])
    lines = table_in_parts(head, rows)
    if any(len(group.finished) > 1 for group in groups):
        lines.append("mean ± standard deviation over seeds")
    if any(curves.averages(run) for group in groups for run in group.runs):
        lines.append("final metrics are of the moving average of the weights, where a run has one")
    notes = [*starts(groups), *(f"note: {sentence}" for sentence in about_comparing(groups))]
    return "\n".join([*lines, *(line for note in notes for line in wrapped(note, indent="  "))])


def _with_unit(unit: Unit) -> str:
    """What is counted and in what, which stay in one line."""
    return f"{unit.words}{_JOINED}{unit.unit}" if unit.unit else unit.words
