"""The paper's Fig. 3 of a study that claims something about the first steps: how far the masks of each layer are from their start after
1 and after 10 steps, a bar for each layer and row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .compare import stat
from .curves import Curve
from .study import EARLY, Facts
from .study_curves import Curves
from .study_drawing import TEXT, TITLE, WIDTH, plain_axes, seeds_words, write_png
from .study_looks import looks_of

__all__ = ["draw_layers", "figure_of", "rows_of"]

_STEPS = {"after_1": "1 step", "after_10": "10 steps"}
_NOTHING: Mapping[str, str] = MappingProxyType({})


def rows_of(facts: Facts, curves: Mapping[str, Sequence[Curves]]) -> dict[str, list[Curves]]:
    """Of the rows that such claims are about the runs that tell it; empty where not all of these rows have one."""
    wanted = dict.fromkeys(claim[side] for claim in facts["claims"] if claim["metric"].startswith(EARLY) for side in ("first", "second"))
    told = {label: [run for run in curves.get(label, ()) if run.after_10] for label in wanted}
    return told if all(told.values()) else {}


def figure_of(title: str, rows: Mapping[str, Sequence[Curves]], methods: Mapping[str, str] = _NOTHING, rate: str = "") -> Any:
    """The picture as matplotlib has it. `rate`: the learning rate in words, where study.json tells it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure: Any = Figure(figsize=(WIDTH, 4), layout="constrained")
    how = ", ".join([*([f"learning rate {rate}"] if rate else []), f"mean and spread over {seeds_words(list(map(len, rows.values())))}"])
    figure.suptitle(f"{title}\nMasks that are not as they were at the start; {how}", fontsize=TITLE)
    looks = looks_of({label: methods.get(label, label) for label in rows})
    width, layers = 0.8 / len(rows), max(layer for runs in rows.values() for run in runs for layer in run.after_10)
    for axes, (name, words) in zip(figure.subplots(1, 2), _STEPS.items(), strict=True):
        for number, (label, runs) in enumerate(rows.items()):
            shares: list[Curve] = list(map(attrgetter(name), runs))
            stats = {layer: found for layer in shares[0] if (found := stat(100 * share[layer] for share in shares if layer in share))}
            places = [layer + (number - (len(rows) - 1) / 2) * width for layer in stats]
            spreads = [found.spread or 0.0 for found in stats.values()]
            means = [found.mean for found in stats.values()]
            style = {"color": looks[label].colour, "error_kw": {"linewidth": 0.9, "ecolor": "#888888"}}
            axes.bar(places, means, width, yerr=_down_to_zero(means, spreads), label=label, **style)
        axes.set_title(f"after {words}", fontsize=TEXT, fontweight="bold")
        axes.set(xlabel="sparse layer, in the order of the network", ylabel="weights of the layer (%)")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0.4, layers + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        plain_axes(axes)
        axes.grid(visible=False, axis="x")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=TEXT, frameon=False)
    return figure


def _down_to_zero(means: Sequence[float], spreads: Sequence[float]) -> list[list[float]]:
    """How far bars reach down and up: no share is below zero."""
    return [[min(mean, spread) for mean, spread in zip(means, spreads, strict=True)], list(spreads)]


def draw_layers(
    title: str, facts: Facts, curves: Mapping[str, Sequence[Curves]], path: Path, methods: Mapping[str, str] = _NOTHING
) -> bool:
    """Write a PNG, where runs tell it; whether they do."""
    if not (rows := rows_of(facts, curves)):
        path.unlink(missing_ok=True)  # of runs that did
        return False
    write_png(figure_of(title, rows, methods, facts.get("rate", "")), path)
    return True
