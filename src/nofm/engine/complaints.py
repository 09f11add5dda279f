"""How a check complains: it yields (key, what is wrong with the value). Shared by `validate` and the problems. Needs no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from .config import RunConfig
from .resolve import near_path

__all__ = ["Complaints", "batch_divides", "folder", "number", "starting_weights", "value_of", "weights", "weights_file", "weights_of"]

Complaints: TypeAlias = Iterator[tuple[str, str]]


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def number(
    key: str, value: float | None, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = True
) -> Complaints:
    """One number in its range; None is in any."""
    if value is None:
        return
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below):  # a NaN is neither
        left = f"{low:g} < " if open_low else f"{low:g} <= "
        right = "" if high == math.inf else f" < {high:g}" if open_high else f" <= {high:g}"
        name = key.rpartition(".")[2]
        allowed = f"{left}{name}{right}" if right else f"{name} {'>' if open_low else '>='} {low:g}, and finite"
        yield key, f"must be {allowed}"


def folder(c: RunConfig) -> Complaints:
    """data.root is there."""
    d = c.data
    if d.root is None:
        yield "data.root", f"{d.name} needs the folder of its files: --data.root PATH"
    elif not Path(d.root).is_dir():
        parent = Path(d.root).parent
        siblings = [p for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
        yield "data.root", f"no such folder{near_path(Path(d.root), siblings)}"


def weights(key: str, source: str | None) -> Complaints:
    """A file of weights, or a run's folder with one, is there."""
    if source is None:
        return
    if not weights_file(source).is_file():
        what = "has no model.safetensors" if Path(source).is_dir() else "no such file or folder"
        yield key, f"{what}; give a finished run's folder or a safetensors file"


def weights_file(source: str) -> Path:
    """Where the weights of a run's folder, or of a file, lie."""
    path = Path(source)
    return path / "model.safetensors" if path.is_dir() else path


def weights_of(c: RunConfig) -> str:
    """model.weights of this run: of several, each may begin with another's; "" where nothing is said."""
    return (c.model.weights or "").replace("{seed}", str(c.seed))


def starting_weights(c: RunConfig) -> Complaints:
    """model.weights is there, and nothing beside it says what to start from."""
    if not (c.out and any(Path(c.out, "checkpoints").glob("step-*"))):  # one that goes on needs them no more
        yield from weights("model.weights", weights_of(c) or None)
    if c.model.weights is not None:
        for name in ("pretrained", "backbone"):
            if getattr(c.model, name):
                yield f"model.{name}", "has no effect beside model.weights, which are those of the whole network; give one of them"


def batch_divides(c: RunConfig) -> Complaints:
    """Where a batch is a number of examples, all processes and micro-batches have as many of them."""
    e = c.engine
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if e.accumulate >= 1 and e.batch_size >= 1 and e.batch_size % (e.accumulate * world):
        yield (
            "engine.batch_size",
            f"must be divisible by engine.accumulate {e.accumulate} x processes {world}: it is the batch of all of them",
        )
