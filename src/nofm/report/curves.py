"""Curves of a run: {step: value}, in the order of steps. Where a step was logged twice the later line counts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .read import Event, Run
from .start import start_of

__all__ = [
    "averages",
    "best",
    "evals",
    "final",
    "flip_rate",
    "flip_rate_by_layer",
    "higher_is_better",
    "metric_names",
    "sad",
    "sad_by_layer",
    "sad_from_start",
    "train",
]

Curve = dict[int, float]

_LOWER_IS_BETTER = ("loss", "error", "epe", "perplexity", "rmse", "mae", "outliers", "fl")


def train(run: Run, key: str = "loss") -> Curve:
    """A number of the train events, each a mean over the log interval."""
    return _curve((event, event.data.get(key)) for event in run.of("train"))


def evals(run: Run, metric: str, ema: bool = False) -> Curve:
    """A metric of the evaluations, of the weights themselves or of their moving average."""
    events = [event for event in run.of("eval") if bool(event.data.get("ema", False)) == ema]
    return _curve((event, event.data["metrics"].get(metric)) for event in events)


def metric_names(runs: Iterable[Run]) -> list[str]:
    """All metrics that these runs evaluate, the losses last: the first is the one to report."""
    names = dict.fromkeys(name for run in runs for event in run.of("eval") for name in event.data["metrics"])
    return sorted(names, key=lambda name: name.endswith("loss"))


def higher_is_better(metric: str) -> bool:
    """By the name of the metric: "accuracy" is, "loss" and "val_loss" are not."""
    return not any(word in metric.lower().split("_") for word in _LOWER_IS_BETTER)


def final(run: Run, metric: str) -> float | None:
    """The metric at the end, of the moving average where a run has one: what the end says, or else the last evaluation."""
    for event in reversed(run.of("end")):
        for name in (f"ema_{metric}", metric):
            if name in event.data["metrics"]:
                return _number(event.data["metrics"][name])
    for ema in (True, False):
        if curve := evals(run, metric, ema):
            return list(curve.values())[-1]
    return None


def averages(run: Run) -> bool:
    """Whether a run has ended with a moving average of its weights."""
    return any(name.startswith("ema_") for event in run.of("end") for name in event.data["metrics"])


def best(run: Run, metric: str) -> float | None:
    """The best of all evaluations of the network as sparse as it is in the end."""
    steps = _evaluated_sparse(run)
    values = [v for ema in (False, True) for step, v in evals(run, metric, ema).items() if step in steps and math.isfinite(v)]
    if not values:
        return None
    return max(values) if higher_is_better(metric) else min(values)


def _evaluated_sparse(run: Run) -> set[int]:
    """The steps after which a network with no more weights than in the end was evaluated. A run tells how many weights were used; of runs
    from before that was told, and of one that has not come to its sparsity, the configuration tells."""
    begin = 0 if (start := start_of(run)) is None else start.until
    used = {event.step: event.data.get("used") for event in run.of("eval")}
    last = max(used, default=0)
    if last < begin:
        return set()
    least = used.get(last)
    return {step for step, count in used.items() if (step >= begin if count is None or least is None else count <= least)}


def sad(run: Run) -> Curve:
    """SAD of all layers, added up from record to record since the start of the run."""
    total, added = 0.0, {}
    for event in _records(run):
        total += sum(event.data["changed"].values())
        added[event.step] = total
    return added


def sad_by_layer(run: Run, after: int = 0) -> dict[str, float]:
    """SAD of each layer, added up over the whole run, or over the records after a step."""
    added: dict[str, float] = {}
    for event in (record for record in _records(run) if record.step > after):
        for layer, changed in event.data["changed"].items():
            added[layer] = added.get(layer, 0) + changed
    return added


def sad_from_start(run: Run) -> dict[int, dict[str, float]]:
    """By step, for the few that a run tells it of: the share of each layer's weights whose mask is not the one that it was at the start,
    layers in the order of the network. Empty for runs of earlier versions."""
    weights = {layer.name: layer.weights for layer in run.layers}
    return {e.step: {layer: n / weights[layer] for layer, n in e.data["changed"].items()} for e in run.of("sad_from_start")}


def flip_rate(run: Run) -> Curve:
    """The share of sparse weights whose state changed, per step."""
    return {e.step: sum(e.data["changed"].values()) / e.data["weights"] / (e.step - e.data["since"]) for e in _records(run)}


def flip_rate_by_layer(run: Run) -> dict[str, Curve]:
    """The share of each layer's weights whose state changed, per step; layers in the order of the network."""
    records = _records(run)
    rates = {}
    for layer in run.layers:
        curve = {
            e.step: e.data["changed"][layer.name] / layer.weights / (e.step - e.data["since"])
            for e in records
            if layer.name in e.data["changed"]
        }
        if curve:
            rates[layer.name] = curve
    return rates


def _records(run: Run) -> list[Event]:
    """The sad events, one a step."""
    by_step = {event.step: event for event in run.of("sad")}
    return [by_step[step] for step in sorted(by_step)]


def _curve(points: Iterable[tuple[Event, object]]) -> Curve:
    curve = {event.step: number for event, value in points if (number := _number(value)) is not None}
    return dict(sorted(curve.items()))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
