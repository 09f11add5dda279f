"""The first lines of a run: what is trained on what, for how long and where, and what of it is sparse. Read from run.json, which is there
before the first step. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..report.measured_on import measured_on

__all__ = ["opening"]


def opening(run: Path, start: Mapping[str, Any]) -> list[str]:
    """The lines for a run's folder and its start event. Of a run.json that says less, or nothing, only which run it is."""
    resumed, before = start["resumed_from"], start.get("processes_before")
    head = f"run {run}" + ("" if resumed is None else f", resumed from step {resumed}")
    head += "" if before is None else f" of {before} processes by {start['processes']}, with new generators"
    try:
        info: dict[str, Any] = json.loads((run / "run.json").read_text())
        return [f"{head}: {', '.join(_what(info, start))}", _sparse(info)]
    except (OSError, ValueError, TypeError, KeyError):
        return [head]  # nothing that a run should end for


def _what(info: Mapping[str, Any], start: Mapping[str, Any]) -> Iterator[str]:
    config, hardware = info["config"], info["hardware"]
    if info["recipe"]:
        yield info["recipe"]
    yield f"{config['model']['name']} on {config['data']['name']}"
    if config["data"].get("held_out") is not None:  # which earlier runs do not know
        yield f"measured on {measured_on(config)}"
    if config["engine"]["epochs"] is not None:
        yield f"{config['engine']['epochs']:g} epochs"
    yield f"{start['steps']:,} steps of {config['engine']['batch_size']:,} {start['unit']}"
    yield f"seed {config['seed']}"
    several = f"{hardware['world_size']} x " if hardware["world_size"] > 1 else ""
    yield f"on {several}{hardware['device']} ({hardware['name']})"


def _sparse(info: Mapping[str, Any]) -> str:
    """Method and pattern, how many layers have it, and how many parameters are left."""
    sparsity, cost = info["config"]["sparsity"], info["cost"]
    method, layers = sparsity["method"], info["layers"]
    patterns = list(dict.fromkeys(layer["pattern"] for layer in layers if layer["pattern"]))
    given = {name: value for name, value in method.items() if name != "kind" and value is not None}
    options = "".join(f", {name} {value:g}" if isinstance(value, float) else f", {name} {value}" for name, value in given.items())
    share = f"{sum(bool(layer['pattern']) for layer in layers)} of {len(layers)} layers"
    params = "" if cost is None else f"{cost['params']:,} parameters"
    if method["kind"] == "dense":
        return f"dense{options}: {params or share}; SAD is of the {', '.join(patterns)} masks that pruning would give"
    if patterns == ["1:1"]:  # the method says how many are kept, and where
        return f"{method['kind']}{options}: {share} sparse, unstructured{params and f'; {params} before pruning'}"
    kept = f", {cost['params_sparse']:,} of {params} kept ({100 * cost['params_sparse'] / cost['params']:.1f} %)" if params else ""
    return f"{method['kind']} {', '.join(patterns)}{options}: {share} sparse{kept}"
