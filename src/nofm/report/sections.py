"""The upper half of the page, headline to curves: groups of runs in, plain values for the template out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from . import curves
from .compare import Band, Group, Stat
from .evaluations import headlines
from .figures import SERIES, Line, Mark, Picture, depth_colour, series_colour, strip
from .figures import curves as draw
from .measured_on import are_held_out, data_of, data_of_all, measured_alike
from .numbers import computes_dense, cost_of, mean_flip_rate, total_sad
from .read import Run, settled
from .start import start_of
from .units import NONE, Unit, big, duration, plus_minus, rate, unit_of_evaluation

__all__ = [
    "KEPT",
    "comparison",
    "evaluated_cell",
    "focus",
    "found_cell",
    "found_names",
    "head",
    "kept_share",
    "learning",
    "marks_of",
    "movement",
    "starts",
]

Units = Mapping[str, Unit]

# Two shares of weights, which a reader must not take for each other: which layers are counted, and their key in `cost_of`.
KEPT = {"sparse": "sparse_weights", "all": "weights"}
_MOST_LAYERS = 12  # that a legend names one by one


# ---- what was run, and what came out ----


def head(groups: Sequence[Group], metrics: Sequence[str], units: Units) -> dict[str, Any]:
    """The first screen: what was run, and the numbers of the best configuration."""
    runs = [run for group in groups for run in group.runs]
    lead, baseline = _lead(groups, metrics)
    alike = measured_alike(groups)  # or none is the best, which a notice says
    patterns = ", ".join(dict.fromkeys(layer.words for run in runs for layer in run.layers if layer.pattern))
    hardware = dict.fromkeys(str(run.info["hardware"].get("name") or run.info["hardware"].get("device") or "") for run in runs)
    many = f"{len(groups)} configurations, " if len(groups) > 1 else ""
    what = [
        f"{many}{len(runs)} run{'s' * (len(runs) > 1)}",
        f"{patterns} sparse" if patterns else "no sparse layer",
        f"{max(run.last_step for run in runs):,} steps",
        *hardware,
    ]
    return {
        "title": ", ".join(dict.fromkeys(run.info["recipe"] for run in runs)),
        "what": [part for part in what if part],
        "lead": lead.label if len(groups) > 1 and alike else "",
        "lead_words": "Best sparse configuration by mean" if baseline else "Best configuration by mean",
        "tiles": [*_metric_tiles(lead, baseline, metrics, units), *_cost_tiles(lead)] if alike else [],
    }


def _lead(groups: Sequence[Group], metrics: Sequence[str]) -> tuple[Group, Group | None]:
    """The group with the best final mean of the first metric, and the dense group that it is held against, if there is one."""
    baseline = next((group for group in groups if computes_dense(group.runs[0])), None) if len(groups) > 1 else None
    candidates = [group for group in groups if group is not baseline and not computes_dense(group.runs[0])] or list(groups)
    if not metrics:
        return candidates[0], baseline
    sign = 1 if curves.higher_is_better(metrics[0]) else -1
    stats = [(group.stat(partial(curves.final, metric=metrics[0])), group) for group in candidates]
    means = [(sign * found.mean, group) for found, group in stats if found is not None and math.isfinite(found.mean)]
    lead = max(means, key=lambda row: row[0])[1] if means else candidates[0]
    return lead, baseline if baseline is not lead else None


def _metric_tiles(lead: Group, baseline: Group | None, metrics: Sequence[str], units: Units) -> list[dict[str, str]]:
    """Means of final scores, as in the table: the best evaluation of any run would be picked on what it is measured on."""
    if not metrics:
        return []
    metric, unit, start = metrics[0], units[metrics[0]], start_of(lead.runs[0])
    found = lead.stat(partial(curves.final, metric=metric))
    if found is None:
        run = lead.runs[0]
        below = "the run has not finished" + (f": {start.words}" if start is not None and run.last_step < start.until else "")
        return [_tile(f"{unit.words} so far", unit.number(curves.final(run, metric)), unit.unit, below)]
    mean, _, deviation = unit.stat(found).partition(" ± ")
    spread = f"± {deviation} over {found.n} seeds" if deviation else "one seed, so no spread"
    spread += f"; of {data_of_all([lead])}" if are_held_out([lead]) else ""
    tiles = [_tile(f"final {unit.words}", mean, unit.unit, spread)]
    dense = baseline.stat(partial(curves.final, metric=metric)) if baseline else None
    if dense is not None:
        gap = unit.number(abs(found.mean - dense.mean))
        sign = "\N{MINUS SIGN}" if found.mean < dense.mean else "+"
        sign = sign if float(gap) else ""
        below = f"dense: {unit.stat(dense)} {unit.unit}".strip()
        tiles.append(_tile("against dense", sign + gap, "points" if unit.unit == "%" else unit.unit, below))
    return tiles


def _cost_tiles(lead: Group) -> list[dict[str, str]]:
    cost = cost_of(lead.runs[0])
    of_all = f"{_share(cost, 'weights')} % kept in all layers, {big(cost['weights_kept'])} of {big(cost['weights'])}"
    tiles = [_tile("weights kept in sparse layers", _share(cost, "sparse_weights"), "%" if cost["sparse_weights"] else "", of_all)]
    if "macs" in cost:
        tiles.append(_tile("multiply-adds kept", _share(cost, "macs"), "%", f"{big(cost['macs_kept'])} of {big(cost['macs'])}"))
    if (flips := lead.stat(mean_flip_rate)) is not None:
        tiles.append(_tile("flip rate", rate(flips.mean), "%", "of sparse weights a step"))
    return tiles


def _tile(name: str, number: str, unit: str, below: str) -> dict[str, str]:
    return {"name": name, "number": number, "unit": unit, "below": below}


def comparison(groups: Sequence[Group], metrics: Sequence[str], units: Units) -> dict[str, Any]:
    """One row a group, and a picture of all runs where there are several groups."""
    columns: list[tuple[str, Callable[[Group], str]]] = [("seeds", _seeds)]
    for index, metric in enumerate(metrics):
        unit = units[metric]
        for which in ("final",) if index else ("final", "best"):
            name = f"{which} {unit.words}" + (f", {unit.unit}" if unit.unit else "")
            columns.append((name, partial(_metric_cell, which, metric, unit)))
        if not index and not measured_alike(groups):
            columns.append(("measured on", _measured_on(groups)))
    for name, metric in headlines(run.evaluations for group in groups for run in group.runs):
        unit = unit_of_evaluation(name, metric)
        columns.append((unit.words + (f", {unit.unit}" if unit.unit else ""), partial(evaluated_cell, name, metric)))
    columns += [
        *((f"weights kept in {which} layers", partial(kept_share, of)) for which, of in KEPT.items()),
        ("mask changes of all weights (SAD), whole run", lambda group: _with_spread(group.stat(total_sad), big)),
        ("flip rate, % a step", lambda group: _flips(group.stat(mean_flip_rate))),
        ("time a run", lambda group: duration(found.mean if (found := group.stat(lambda run: run.seconds)) else None)),
    ]
    columns += [(f"{name} found", partial(found_cell, name)) for name in found_names(groups)]
    rows = [
        {"colour": series_colour(i), "label": group.label, "cells": [cell(group) for _, cell in columns]} for i, group in enumerate(groups)
    ]
    averaged = any(curves.averages(run) for group in groups for run in group.runs)
    header = ["configuration", *(name for name, _ in columns)]
    picture = _run_by_run(groups, metrics, units)
    return {"header": header, "rows": rows, "picture": picture, "picked": bool(metrics), "averaged": averaged, "starts": starts(groups)}


def _measured_on(groups: Sequence[Group]) -> Callable[[Group], str]:
    found = {group.label: words for group, words in zip(groups, data_of(groups), strict=True)}
    return lambda group: found[group.label]


def starts(groups: Sequence[Group]) -> list[str]:
    """What is different before the networks of a group are as sparse as in the end, for each group where something is."""
    return [f"{group.label}: {start.words}" for group in groups if (start := start_of(group.runs[0])) is not None]


def kept_share(of: str, group: Group) -> str:
    """The share of the weights that the networks of a group compute with, `of` a value of `KEPT`."""
    share = _share(cost_of(group.runs[0]), of)
    return share if share == NONE else f"{share} %"


def _share(cost: Mapping[str, float], of: str) -> str:
    return f"{100 * cost[f'{of}_kept'] / cost[of]:.1f}" if cost[of] else NONE


def _metric_cell(which: str, metric: str, unit: Unit, group: Group) -> str:
    return unit.stat(group.stat(partial(curves.final if which == "final" else curves.best, metric=metric)))


def evaluated_cell(name: str, metric: str, group: Group) -> str:
    """A metric of an evaluation over the seeds of a group; where only some have it, of how many."""
    found = group.stat(lambda run: run.evaluated(name, metric))
    some = f" ({found.n} of {len(group.finished)} seeds)" if found is not None and found.n < len(group.finished) else ""
    return unit_of_evaluation(name, metric).stat(found) + some


def found_names(groups: Sequence[Group]) -> list[str]:
    """The options that the method of some run has settled by itself."""
    return list(settled(run.found for group in groups for run in group.runs))


def found_cell(name: str, group: Group) -> str:
    """What the runs of a group have settled on."""
    return _with_spread(group.stat(lambda run: run.found.get(name)), lambda value: NONE if value is None else f"{value:.2g}")


def _seeds(group: Group) -> str:
    return str(len(group.runs)) if len(group.finished) == len(group.runs) else f"{len(group.finished)} of {len(group.runs)}"


def _with_spread(found: Stat | None, write: Callable[[float | None], str]) -> str:
    if found is None:
        return NONE
    return write(found.mean) + (f" ± {write(found.spread)}" if found.spread is not None else "")


def _flips(share: Stat | None) -> str:
    if share is None:
        return NONE
    if share.mean < 1e-5:  # too many zeros to read
        return _with_spread(share, rate)
    percent = Stat(100 * share.mean, None if share.spread is None else 100 * share.spread, share.n)
    return plus_minus(percent, lambda value: rate(value / 100))


def _run_by_run(groups: Sequence[Group], metrics: Sequence[str], units: Units) -> Picture | None:
    if len(groups) < 2 or not metrics:
        return None
    metric, unit = metrics[0], units[metrics[0]]
    values = [[v for run in group.finished if (v := curves.final(run, metric)) is not None] for group in groups]
    rows = [(group.label, series_colour(i), v) for i, (group, v) in enumerate(zip(groups, values, strict=True))]
    return replace(strip(f"Final {unit.words}, run by run", unit.axis, rows), caption=f"On {data_of_all(groups)}.")


# ---- curves ----


def marks_of(groups: Sequence[Group]) -> list[Mark]:
    """Where the starts of these groups end; those that end at the same step share a mark, which has no group's colour."""
    ends: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        if (start := start_of(group.runs[0])) is not None:
            ends.setdefault(start.until, []).append(index)
    marks = []
    for step, own in ends.items():
        names = f"{len(own)} configurations" if len(own) > 3 else ", ".join(groups[i].label for i in own)  # `starts` names them all
        whose = f"{names}: " if len(groups) > 1 else ""
        colour = series_colour(own[0]) if len(own) == 1 < len(groups) else "muted"
        marks.append(Mark(f"{whose}as sparse as in the end from step {step:,} on", step, colour))
    return marks


def _lines(groups: Sequence[Group], curve: Callable[[Run], curves.Curve], suffix: str = "", dash: int = 0) -> list[Line]:
    bands = [(index, group, group.band(curve)) for index, group in enumerate(groups)]
    return [Line(group.label + suffix, band, series_colour(i), (i // SERIES + i + dash) % 4) for i, group, band in bands if band.steps]


def _evaluated(groups: Sequence[Group], metric: str) -> list[Line]:
    """Evaluations of the last weights and of their average, or of the average alone where both of many groups would be a thicket."""
    of_average = partial(curves.evals, metric=metric, ema=True)
    plain = _lines(groups, partial(curves.evals, metric=metric))
    alone = not plain or (2 * len(plain) > SERIES and all(group.band(of_average).steps for group in groups))
    averaged = _lines(groups, of_average, ", moving average" if plain else "", 0 if alone else 2)
    return averaged if alone else plain + averaged


def learning(groups: Sequence[Group], metrics: Sequence[str], units: Units) -> list[Picture]:
    """Every metric of the evaluations, then the training loss."""
    pictures, marks = [], marks_of(groups)
    for metric in metrics:
        unit, loss = units[metric], metric.endswith("loss")
        lines = _evaluated(groups, metric)
        title = f"Evaluation {unit.words}" if loss else unit.title
        limits = None if loss else focus([line.band for line in lines], curves.higher_is_better(metric))
        outside = "" if limits is None else " The first steps lie outside the axis."
        caption = f"On {data_of_all(groups)}.{outside}{' Logarithmic axis.' * loss}"
        most = 100.0 if unit.unit == "%" else math.inf
        pictures.append(draw(title, unit.axis, lines, caption, log=loss, limits=limits, most=most, marks=marks))
    if trained := _lines(groups, curves.train):
        caption = "Means over the log interval. Logarithmic axis."
        pictures.append(draw("Training loss", "loss (unitless)", trained, caption, log=True, marks=marks))
    return pictures


def focus(bands: Sequence[Band], higher_is_better: bool) -> tuple[float, float] | None:
    """Limits of an axis that leave out the steep first fifth of training, where that would flatten all the rest; else None."""
    end = max((band.steps[-1] for band in bands if band.steps), default=0)
    rows = [(step, s.mean + sign * (s.spread or 0.0)) for b in bands for step, s in zip(b.steps, b.stats, strict=True) for sign in (-1, 1)]
    rows = [(step, value) for step, value in rows if math.isfinite(value)]
    late = [value for step, value in rows if step > end / 5]
    if not late:
        return None
    low, high = min(late), max(late)
    whole = max(v for _, v in rows) - min(v for _, v in rows)
    if whole <= 3 * (high - low) or high == low:
        return None
    margin = 0.06 * (high - low)
    outer = 0.15 * (high - low)  # room to see the curves come in
    return (low - outer, high + margin) if higher_is_better else (low - margin, high + outer)


def movement(groups: Sequence[Group]) -> dict[str, list[Picture]]:
    """SAD and flip rate of all layers, and of each layer, one picture a group on the same axis."""
    total, layers, marks = [], [], marks_of(groups)
    if added := _lines(groups, curves.sad):
        total.append(draw("SAD, all layers", "SAD since the start (weights)", added, "Added up from record to record.", marks=marks))
        caption = (
            "Weights that enter or leave a mask in a step. Logarithmic axis: a line breaks where nothing flips, and bands that reach zero "
            "are not drawn."
        )
        flips = _lines(groups, curves.flip_rate)
        total.append(draw("Flip rate", "flips (% of weights a step)", flips, caption, scale=100, log=True, marks=marks))
    by_group = [(group, _layer_lines(group)) for group in groups]
    values = [100 * s.mean for _, lines in by_group for line in lines for s in line.band.stats if s.mean > 0]
    limits = (min(values) / 1.3, max(values) * 1.3) if values else None
    for group, lines in by_group:
        if lines:
            title = "SAD by layer" + (f": {group.label}" if len(groups) > 1 else "")
            many = len(lines) > _MOST_LAYERS
            caption = f"From the first to the last of {len(lines)} layers." if many else ""
            y = "SAD (% of the layer's weights a step)"
            layers.append(draw(title, y, lines, caption, scale=100, log=True, limits=limits, ends_named=many, marks=marks_of([group])))
    return {"total": total, "layers": layers}


def _layer_lines(group: Group) -> list[Line]:
    rates = {run.folder: curves.flip_rate_by_layer(run) for run in group.runs}
    names = list(dict.fromkeys(name for by_layer in rates.values() for name in by_layer))
    bands = [group.band(lambda run, name=name: rates[run.folder].get(name, {})) for name in names]  # type: ignore[misc]
    # Only means: bands of many layers would hide one another.
    means = [Band(band.steps, tuple(Stat(s.mean, None, s.n) for s in band.stats)) for band in bands]
    return [Line(name, mean, depth_colour(i, len(names))) for i, (name, mean) in enumerate(zip(names, means, strict=True)) if mean.steps]
