"""The lower half of the page: kernel shapes, layers and how to make it all again, as plain values for the template."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .compare import Group, differing
from .figures import kernel_picture, series_colour
from .kernels import LayerShapes
from .numbers import computes_dense, speed, unit_of_speed
from .read import Run
from .units import NONE, big, duration

__all__ = ["conditions", "kernels", "layer_tables", "settings"]

_LAYERS_DRAWN = 3  # rows of a kernel picture


def kernels(shapes: Mapping[str, list[LayerShapes]], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The kernel-shape pictures of each group's first run, of a few layers from first to last, and rows for all layers."""
    sections = []
    for index, group in enumerate(groups):
        if not (layers := shapes.get(group.label)):
            continue
        pictures = 2 if len(groups) == 1 else 1
        drawn = layers[:: -(-len(layers) // (pictures * _LAYERS_DRAWN))]
        chunks = [drawn[i : i + _LAYERS_DRAWN] for i in range(0, len(drawn), _LAYERS_DRAWN)]
        title = "Kernel shapes: " + (f"{group.label}, " if len(groups) > 1 else "") + f"seed {group.runs[0].seed}"
        titles = [title + (f" ({i} of {len(chunks)})" if len(chunks) > 1 else "") for i in range(1, len(chunks) + 1)]
        caption = "" if len(drawn) == len(layers) else f"{len(drawn)} of {len(layers)} layers are drawn."
        drawings = [kernel_picture(words, chunk, series_colour(index), caption) for words, chunk in zip(titles, chunks, strict=True)]
        sections.append({"label": group.label, "pictures": drawings, "rows": layers})
    return sections


def layer_tables(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Layers with pattern and cost: one table for all groups that share them."""
    tables: dict[str, dict[str, Any]] = {}
    for group in groups:
        run = group.runs[0]
        cost = run.info["cost"] or {}
        table = tables.setdefault(repr((run.layers, cost)), {"labels": [], "dense": [], "run": run, "cost": cost})
        table["labels"].append(group.label)
        table["dense"] += [group.label] if computes_dense(run) and len(groups) > 1 else []
    for table in tables.values():
        layers = table["run"].layers
        table["rows"] = [{"layer": layer, "macs": big(layer.macs), "macs_kept": big(layer.macs_kept)} for layer in layers]
        whole = any(layer.unstructured for layer in layers)  # when the cost was counted
        table["has_macs"], table["total"] = any(layer.macs for layer in layers), [] if whole else _total(table["cost"])
        table["title"] = ", ".join(table["labels"]) if len(tables) > 1 else ""
    return list(tables.values())


def _total(cost: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    without = "parameters without normalisation layers"
    for words, key in (("parameters", "params"), (without, "weights"), ("multiply-adds of one forward", "macs")):
        dense, sparse = cost.get(key), cost.get(f"{key}_sparse")
        if dense and sparse is not None:
            rows.append((words, big(dense), big(sparse), f"{100 * sparse / dense:.1f} %"))
    return rows


def settings(groups: Sequence[Group]) -> dict[str, Any]:
    """The settings in which the groups differ."""
    keys = differing([group.settings for group in groups])
    rows = [(key, [NONE if (value := group.settings.get(key)) is None else str(value) for group in groups]) for key in keys]
    return {"labels": [group.label for group in groups], "rows": rows}


def conditions(groups: Sequence[Group], names: Mapping[Path, str]) -> dict[str, Any]:
    """Under which conditions each run was made: what all share once, what differs in a column, and the commands."""
    runs = [(group, run) for group in groups for run in group.runs]
    facts = [_facts(run) for _, run in runs]
    keys = list(dict.fromkeys(key for each in facts for key in each))
    shared = [(key, facts[0].get(key, NONE)) for key in keys if len({each.get(key) for each in facts}) == 1]
    own = [key for key in keys if key not in dict(shared)]
    rows = [
        {
            "name": names[run.folder],
            "cells": [
                group.label,
                str(run.seed),
                run.status,
                duration(run.seconds),
                big(speed(run)),
                *(fact.get(key, NONE) for key in own),
            ],
        }
        for (group, run), fact in zip(runs, facts, strict=True)
    ]
    # Each once: one command may have made several runs (--seeds).
    commands = list(dict.fromkeys(_typed(words, begin) for _, run in runs for words, begin in run.commands))
    units = dict.fromkeys(unit_of_speed(run) for _, run in runs)
    header = ["run", "configuration", "seed", "status", "time", " or ".join(f"{unit}/s" for unit in units), *own]
    return {"shared": shared, "commands": commands, "header": header, "rows": rows}


def _typed(words: Sequence[str], begin: int) -> tuple[str, ...]:
    """A command as it is typed, and as a comment from which step on it changed the run."""
    return (*map(shlex.quote, words), *([f"# from step {begin:,} on"] if begin else []))


def _facts(run: Run) -> dict[str, str]:
    facts = {str(key): str(value) for key, value in run.info["versions"].items()}
    facts["commit of nofm"] = str(run.info["commit"] or "not recorded")
    facts |= {"commit of the working folder": own} if (own := run.info["workdir_commit"]) else {}
    words = {"name": "hardware", "cpus": "CPUs", "world_size": "processes"}
    facts |= {words.get(key, str(key)): str(value) for key, value in run.info["hardware"].items()}
    return facts | {"started": str(run.info["started"])} | ({"resumed": f"{run.resumes} times"} if run.resumes else {})
