"""Epochs or steps: a run that is asked for in the other unit than its recipe counts in. Needs no torch.

Every length of a configuration is in the unit of the run, so a recipe's warm-up of 250 steps would be one of 250 epochs. What is not
given is therefore scaled to the new length. This is by shares of the run, which are known here; how many steps an epoch has is known
only when the data are open.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from functools import reduce
from typing import Any

from .config import Length, RunConfig
from .resolve import Origins, Values

__all__ = ["LENGTHS", "METHOD_LENGTHS", "other_unit", "recount"]

_MOST_TESTS = 10  # of a scaled run: a hundred epochs with a test after each, asked for as 200 steps, would do little but test


def _lengths(group: Any, prefix: str = "") -> Iterator[str]:
    for name, kind in typing.get_type_hints(group, include_extras=True).items():
        if dataclasses.is_dataclass(kind):
            yield from _lengths(kind, f"{prefix}{name}.")
        elif kind == Length or Length in typing.get_args(kind):
            yield prefix + name


LENGTHS = tuple(_lengths(RunConfig))  # dotted keys
METHOD_LENGTHS = tuple(key.rpartition(".")[2] for key in LENGTHS if key.startswith("sparsity.method."))


def other_unit(unit: str) -> str:
    """Steps for epochs, epochs for steps."""
    return "steps" if unit == "epochs" else "epochs"


def recount(values: Values, recipe: Values, origins: Origins) -> str:
    """Scale in `values` what the recipe says in its unit and nobody has given (has no origin), where the run is given in the other
    unit; returns a line that says so, or nothing."""
    before = next((unit for unit in ("epochs", "steps") if recipe["engine"][unit] is not None), "")
    unit = other_unit(before)
    length = values["engine"][unit]
    if not before or length is None or (f"engine.{before}" in origins and values["engine"][before] is not None):
        return ""
    values["engine"][before] = None
    if not 0 < length < math.inf:
        return ""  # there is nothing to scale to, and the check says what is wrong
    scale, said = length / recipe["engine"][before], []
    for key in LENGTHS:
        *groups, name = key.split(".")
        group = reduce(dict.__getitem__, groups, values)
        if key not in origins and group[name]:
            was, group[name] = group[name], _scaled(group[name], scale, length, whole=unit == "steps", interval=key.startswith("engine."))
            said.append(f"{key} {_words(was)} -> {_words(group[name])}")
    changed = f"; scaled to that, since not given: {', '.join(said)}" if said else ""
    return f"{length:g} {unit} instead of the recipe's {recipe['engine'][before]:g} {before}{changed}"


def _scaled(length: Any, scale: float, total: float, *, whole: bool, interval: bool) -> Any:
    if isinstance(length, list):
        return [_scaled(each, scale, total, whole=whole, interval=interval) for each in length]
    exact = max(length * scale, total / _MOST_TESTS if interval else 0.0)
    return float(max(1, round(exact))) if whole else float(f"{exact:.4g}")


def _words(length: Any) -> str:
    return " ".join(map(_words, length)) if isinstance(length, list) else f"{length:g}"
