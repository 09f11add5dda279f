"""All numbers of a report as plain data: `document(groups)` for the JSON file, and rows for the two CSV files.

Values are as the run folders have them: metrics in their own units, flip rates as shares of weights (the page shows percent).
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from . import curves
from .compare import Band, Group, Stat
from .evaluations import headlines
from .kernels import LayerShapes
from .read import Layer, Run, settled
from .start import start_of

__all__ = [
    "computes_dense",
    "cost_of",
    "curves_csv",
    "document",
    "mean_flip_rate",
    "runs_csv",
    "speed",
    "to_json",
    "total_sad",
    "unit_of_speed",
]


def total_sad(run: Run) -> float | None:
    """SAD added up over the run."""
    return list(curve.values())[-1] if (curve := curves.sad(run)) else None


def mean_flip_rate(run: Run) -> float | None:
    """The share of sparse weights that changed a step, over all steps that SAD was measured on."""
    records = {event.step: event for event in run.of("sad")}.values()
    steps = sum(event.step - event.data["since"] for event in records)
    return sum(sum(e.data["changed"].values()) / e.data["weights"] for e in records) / steps if steps else None


def speed(run: Run) -> float | None:
    """Images a second: the median over the log intervals, which a slow first one does not move."""
    return median(values) if (values := list(curves.train(run, "images_per_second").values())) else None


def unit_of_speed(run: Run) -> str:
    """What a run counts by the second: images, tokens or pairs."""
    return next((str(event.data.get("unit", "images")) for event in run.of("start")), "images")


def computes_dense(run: Run) -> bool:
    """Whether the method of the run is the dense baseline, whose masks are only watched."""
    name = run.method.get("kind")
    return str(name).lower() == "dense"


def cost_of(run: Run) -> dict[str, float]:
    """Weights of the listed layers, those of the sparse ones among them, and multiply-adds: all, and what the network computes with
    in the end. A tied layer counts once. Layers that a budget was spent on to keep them dense are among those that it is a share of."""
    counted = [layer for layer in run.layers if not layer.note.startswith("tied")]
    sparse = [layer for layer in counted if layer.pattern]
    spared = [layer for layer in counted if layer.note.startswith("rule ")] if _has_budget(run) else []
    weights, pruned = sum(layer.weights for layer in counted), 0
    if not computes_dense(run):
        pruned = sum(layer.weights for layer in sparse) - _kept(run, sparse)
    sparse_weights = sum(layer.weights for layer in (*sparse, *spared))
    cost: dict[str, float] = {
        "weights": weights,
        "weights_kept": weights - pruned,
        "sparse_weights": sparse_weights,
        "sparse_weights_kept": sparse_weights - pruned,
    }
    kept = macs_kept(run)
    return cost if kept is None else cost | {"macs": run.info["cost"]["macs"], "macs_kept": kept}


def _has_budget(run: Run) -> bool:
    return run.info["config"].get("sparsity", {}).get("budget") is not None


def macs_kept(run: Run) -> float | None:
    """Multiply-adds of a forward with the weights that the network keeps, where that is known.

    A pattern tells them when a run begins. Where a method prunes anywhere they follow from what each layer keeps in the end.
    """
    cost, sparse = run.info["cost"] or {}, [layer for layer in run.layers if layer.pattern]
    if not {"macs", "macs_sparse"} <= cost.keys():
        return None
    if computes_dense(run):
        return float(cost["macs"])
    if not any(layer.unstructured for layer in sparse):
        return float(cost["macs_sparse"])
    saved = [layer.macs - layer.macs_kept for layer in sparse if layer.macs is not None and layer.macs_kept is not None]
    return float(cost["macs"] - sum(saved)) if len(saved) == len(sparse) else None


def _kept(run: Run, sparse: Sequence[Layer]) -> int:
    """Of sparse layers: as the end of the run says, for methods that prune on the way, or else as its beginning does."""
    ends = [event.data["kept"] for event in run.of("end") if "kept" in event.data]
    return int(ends[-1]) if ends else sum(layer.kept for layer in sparse)


def document(groups: Sequence[Group], names: Mapping[Path, str], shapes: dict[str, list[LayerShapes]]) -> dict[str, Any]:
    """Everything the page shows, for machines."""
    metrics = curves.metric_names(run for group in groups for run in group.runs)
    return {
        "format": 1,
        "metric": metrics[0] if metrics else None,
        "groups": [_group(group, metrics, names) for group in groups],
        "runs": [_run(run, group.label, metrics, names) for group in groups for run in group.runs],
        "kernel_shapes": {label: [asdict(layer) for layer in layers] for label, layers in shapes.items()},
    }


def _group(group: Group, metrics: Sequence[str], names: Mapping[Path, str]) -> dict[str, Any]:
    bands = {"train/loss": group.band(curves.train), "sad": group.band(curves.sad), "flip_rate": group.band(curves.flip_rate)}
    for metric in metrics:
        for ema in (False, True):
            bands[f"eval/{metric}{'/ema' if ema else ''}"] = group.band(partial(curves.evals, metric=metric, ema=ema))
    final: dict[str, Stat | None] = {}
    for metric in metrics:
        final[f"final/{metric}"] = group.stat(partial(curves.final, metric=metric))
        final[f"best/{metric}"] = group.stat(partial(curves.best, metric=metric))
    final |= {"sad": group.stat(total_sad), "flip_rate": group.stat(mean_flip_rate), "seconds": group.stat(lambda run: run.seconds)}
    for name, metric in headlines(run.evaluations for run in group.runs):
        final[f"evaluation/{name}/{metric}"] = group.stat(lambda run, name=name, metric=metric: run.evaluated(name, metric))  # type: ignore[misc]
    for name, key in settled(run.found for run in group.runs).items():
        final[key] = group.stat(lambda run, name=name: run.found.get(name))  # type: ignore[misc]
    return {
        "label": group.label,
        "settings": dict(group.settings),
        "runs": [names[run.folder] for run in group.runs],
        "seeds": [run.seed for run in group.runs],
        "numbers": {name: None if value is None else asdict(value) for name, value in final.items()},
        "curves": {name: _band(value) for name, value in bands.items() if value.steps},
    }


def _band(band: Band) -> dict[str, Any]:
    return {"steps": band.steps, "mean": [s.mean for s in band.stats], "spread": [s.spread for s in band.stats]}


def _run(run: Run, label: str, metrics: Sequence[str], names: Mapping[Path, str]) -> dict[str, Any]:
    keys = ("recipe", "command", "earlier", "versions", "commit", "workdir_commit", "hardware", "started", "config", "cost")
    return {
        "name": names[run.folder],
        "group": label,
        "seed": run.seed,
        "status": run.status,
        "steps": run.last_step,
        "resumes": run.resumes,
        "seconds": run.seconds,
        "images_per_second": speed(run),
        "final": {metric: curves.final(run, metric) for metric in metrics},
        "best": {metric: curves.best(run, metric) for metric in metrics},
        "sparse_from": _sparse_from(run),
        "sad": total_sad(run),
        "sad_by_layer": curves.sad_by_layer(run),
        "flip_rate": mean_flip_rate(run),
        "found": run.found,
        "evaluations": {found.name: dict(found.metrics) for found in run.evaluations},
        "kept": cost_of(run),
        **{key: run.info[key] for key in keys},
        "layers": [asdict(layer) for layer in run.layers],
        "curves": [{"curve": name, "layer": layer, "steps": list(c), "values": list(c.values())} for name, layer, c in _curves_of(run)],
    }


def _sparse_from(run: Run) -> int | None:
    """From which step on a network is as sparse as it will be; None where only its training tells, for STR."""
    if (start := start_of(run)) is not None:
        return start.until
    return None if run.method.get("kind") == "str" else 0


def _curves_of(run: Run) -> Iterator[tuple[str, str, curves.Curve]]:
    """Name, layer ("" for all together) and values of every curve of a run."""
    found = [("train/loss", "", curves.train(run))]
    found += [(f"train/{key}", "", curves.train(run, key)) for key in ("lr", "images_per_second")]
    for metric in curves.metric_names([run]):
        found += [(f"eval/{metric}{'/ema' if ema else ''}", "", curves.evals(run, metric, ema)) for ema in (False, True)]
    found += [("sad", "", curves.sad(run)), ("flip_rate", "", curves.flip_rate(run))]
    found += [("flip_rate", layer, curve) for layer, curve in curves.flip_rate_by_layer(run).items()]
    return (row for row in found if row[2])


def to_json(data: dict[str, Any]) -> str:
    """JSON that every reader takes: numbers that are not finite become null."""
    return json.dumps(_finite(data), indent=1, allow_nan=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def runs_csv(data: dict[str, Any]) -> str:
    """One row a run."""
    metrics = list(data["runs"][0]["final"])
    header = ["run", "group", "seed", "status", "steps", *(f"{which}/{m}" for which in ("final", "best") for m in metrics), "sparse_from"]
    header += ["sad", "flip_rate", "seconds", "images_per_second", "nofm", "torch", "commit", "workdir_commit", "device", "command"]
    evaluated = sorted({(name, metric) for run in data["runs"] for name, found in run["evaluations"].items() for metric in found})
    found = settled(run["found"] for run in data["runs"])
    header += [*found.values(), *(f"{name}.{metric}" for name, metric in evaluated)]
    rows = []
    for run in data["runs"]:
        row = [run["name"], run["group"], run["seed"], run["status"], run["steps"]]
        row += [*(run[which][m] for which in ("final", "best") for m in metrics), run["sparse_from"]]
        row += [run["sad"], run["flip_rate"], run["seconds"], run["images_per_second"]]
        row += [run["versions"].get("nofm"), run["versions"].get("torch"), run["commit"], run["workdir_commit"]]
        commands = [*(before["command"] for before in run["earlier"]), run["command"]]
        row += [run["hardware"].get("name"), "; ".join(" ".join(map(str, words)) for words in commands)]
        row += [run["found"].get(name) for name in found]
        rows.append([*row, *(run["evaluations"].get(name, {}).get(metric) for name, metric in evaluated)])
    return _csv(header, rows)


def curves_csv(data: dict[str, Any]) -> str:
    """One row a point of a curve of a run."""
    rows = (
        [run["name"], run["group"], run["seed"], curve["curve"], curve["layer"], step, value]
        for run in data["runs"]
        for curve in run["curves"]
        for step, value in zip(curve["steps"], curve["values"], strict=True)
    )
    return _csv(["run", "group", "seed", "curve", "layer", "step", "value"], rows)


def _csv(header: list[str], rows: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
