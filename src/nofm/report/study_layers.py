"""The paper's Fig. 3 of a study that claims something about the first steps: how far the masks of each layer are from their start after
1 and after 10 steps, a bar for each layer and row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from .compare import stat
from .curves import Curve
from .study import EARLY, Facts
from .study_curves import Curves
from .study_figure import COLOURS, write_png

__all__ = ["draw_layers", "figure_of", "rows_of"]

_STEPS = {"after_1": "1 step", "after_10": "10 steps"}


def rows_of(facts: Facts, curves: Mapping[str, Sequence[Curves]]) -> dict[str, list[Curves]]:
    """Of the rows that such claims are about the runs that tell it; empty where not all of these rows have one."""
    wanted = dict.fromkeys(claim[side] for claim in facts["claims"] if claim["metric"].startswith(EARLY) for side in ("first", "second"))
    told = {label: [run for run in curves.get(label, ()) if run.after_10] for label in wanted}
    return told if all(told.values()) else {}


def figure_of(title: str, rows: Mapping[str, Sequence[Curves]]) -> Any:
    """The picture as matplotlib has it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure: Any = Figure(figsize=(12, 4.2), layout="constrained")
    figure.suptitle(f"{title}\nMasks that are not as they were at the start, mean and spread over seeds")
    width, layers = 0.8 / len(rows), max(layer for runs in rows.values() for run in runs for layer in run.after_10)
    for axes, (name, words) in zip(figure.subplots(1, 2), _STEPS.items(), strict=True):
        for number, (label, runs) in enumerate(rows.items()):
            shares: list[Curve] = list(map(attrgetter(name), runs))
            stats = {layer: found for layer in shares[0] if (found := stat(100 * share[layer] for share in shares if layer in share))}
            places = [layer + (number - (len(rows) - 1) / 2) * width for layer in stats]
            spreads = [found.spread or 0.0 for found in stats.values()]
            means = [found.mean for found in stats.values()]
            axes.bar(places, means, width, yerr=spreads, color=COLOURS[number % len(COLOURS)], label=label, error_kw={"linewidth": 0.8})
        axes.set(title=f"after {words}", xlabel="sparse layer, in the order of the network", ylabel="weights of the layer (%)")
        axes.set_ylim(bottom=0)
        axes.set_xlim(0.4, layers + 0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3, axis="y")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def draw_layers(title: str, facts: Facts, curves: Mapping[str, Sequence[Curves]], path: Path) -> bool:
    """Write a PNG, where runs tell it; whether they do."""
    if not (rows := rows_of(facts, curves)):
        path.unlink(missing_ok=True)  # of runs that did
        return False
    write_png(figure_of(title, rows), path)
    return True
