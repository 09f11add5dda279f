"""curves.csv: how the score, the masks and the training loss of a study's runs went, so that its figures can be drawn again when the run
folders are gone, and one can see whether a score is bad in spite of a low loss or because of a high one. Two of its curves go over the
network and not over time: how far the masks of each layer were from their start after 1 and after 10 steps.

One line a run and curve, with its points as two lists, "step step ..." and "value value ...": thousands of lines of one point each would
be most of a table's folder. Runs are known by configuration and seed, as in runs.csv.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from .curves import Curve, evals, flip_rate, sad_from_start, train
from .errors import ReportError
from .measures import Measure
from .read import Run

__all__ = ["HALVES", "Curves", "KnownCurves", "curves_csv", "curves_of", "known_curves", "sad_of_halves"]

HALVES = ("sad:first half", "sad:second half")  # metrics of claims: the changes of each sparse weight in one half of the run


@dataclass(frozen=True, slots=True)
class Curves:
    """Of one run: the score of its evaluations, the share of weights that changed side in a step, the loss of training, and the steps of
    an epoch. Files of an earlier version have no loss. `after_1` and `after_10` are by the number of the sparse layer, from 1 on: the share
    of its weights whose mask differs from that of the start; empty for runs that do not tell it."""

    score: Curve
    flips: Curve
    loss: Curve
    epoch: float
    after_1: Curve = field(default_factory=dict)
    after_10: Curve = field(default_factory=dict)


KnownCurves: TypeAlias = dict[tuple[str, int], Curves]  # by configuration and seed
_CURVES, _MAY_BE = ("score", "flips", "loss"), ("after_1", "after_10")
_FIELDS = ("config", "seed", "epoch", "curve", "steps", "values")


def curves_of(run: Run, measure: Measure, averaged: bool) -> Curves:
    """The curves of a run folder; `averaged`: the score is that of the moving average."""
    last = run.of("train")[-1]
    early = sad_from_start(run)
    by_layer = (dict(enumerate(early.get(step, {}).values(), start=1)) for step in (1, 10))
    return Curves(evals(run, measure.name, averaged), flip_rate(run), train(run), last.step / last.data["epoch"], *by_layer)


def sad_of_halves(curves: Curves) -> dict[str, float]:
    """The changes of each sparse weight in both halves of a run; nothing where masks were not looked at in both."""
    steps = list(curves.flips)
    changes = {step: curves.flips[step] * (step - before) for before, step in zip([0, *steps], steps, strict=False)}
    middle = steps[-1] / 2 if steps else 0
    halves = [[change for step, change in changes.items() if (step > middle) is late] for late in (False, True)]
    return {name: sum(half) for name, half in zip(HALVES, halves, strict=True)} if all(halves) else {}


def curves_csv(known: Mapping[tuple[str, int], Curves]) -> str:
    """The file's text: six digits, more than a picture shows."""
    lines = [",".join(_FIELDS)]
    for (config, seed), found in known.items():
        for name in (*_CURVES, *(name for name in _MAY_BE if getattr(found, name))):
            curve: Curve = getattr(found, name)
            values = " ".join(f"{value:.6g}" for value in curve.values())
            lines.append(f"{config},{seed},{found.epoch:.9g},{name},{' '.join(map(str, curve))},{values}")
    return "\n".join([*lines, ""])


def known_curves(into: Path) -> KnownCurves:
    """Those of all studies in `into`."""
    known: KnownCurves = {}
    for path in sorted(into.glob("*/curves.csv")):
        for number, line in enumerate(csv.DictReader(path.read_text().splitlines()), start=2):
            try:
                key, steps = (line["config"], int(line["seed"])), map(int, line["steps"].split())
                curve = dict(zip(steps, map(float, line["values"].split()), strict=True))
                before, names = known.get(key, Curves({}, {}, {}, 1.0)), (*_CURVES, *_MAY_BE)
                name = names[names.index(line["curve"])]
                known[key] = replace(before, **{name: curve}, epoch=float(line["epoch"]))
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise ReportError(path, f"is no line of curves ({error!r}); `nofm study` writes it", number) from None
    return known
