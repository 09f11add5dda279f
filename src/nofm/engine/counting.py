"""Epochs or steps: a run that is asked for in another length than its recipe has. Needs no torch.

Every length of a configuration is in the unit of the run, so where the unit is another one, a recipe's warm-up of 250 steps would be one of
250 epochs. What is not given is therefore scaled to the new length. This is by shares of the run, which are known here; how many steps an
epoch has is known only when the data are open.

In the recipe's own unit lengths mean what they say, and stay: commands that were given before make the runs that they made. Only where one
of them would not end before a shorter run does, which nobody can have trained, are those of the schedule and the method scaled, too. How
often it is tested stays, since there is always a test at the end.
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
    """Scale in `values` what the recipe says and nobody has given (has no origin), where the run is given in the other unit, or is too
    short for it; returns a line that says so, or nothing."""
    before = next((unit for unit in ("epochs", "steps") if recipe["engine"][unit] is not None), "")
    other = other_unit(before)
    keeps_unit = values["engine"][other] is None
    unit = before if keeps_unit else other
    length = values["engine"][unit] if before else None
    if length is None or not (keeps_unit or f"engine.{before}" not in origins or values["engine"][before] is None):
        return ""
    if not keeps_unit:
        values["engine"][before] = None
    if not 0 < length < math.inf:
        return ""  # there is nothing to scale to, and the check says what is wrong
    own = {key: group[name] for key in LENGTHS for group, name in [_place(values, key)] if key not in origins and group[name]}
    if keeps_unit:
        own = {key: was for key, was in own.items() if not _is_interval(key)}
        if all(_last(was) < length for was in own.values()):
            return ""
    said = []
    for key, was in own.items():
        group, name = _place(values, key)
        scale = length / recipe["engine"][before]
        group[name] = _scaled(was, scale, length, whole=unit == "steps", interval=_is_interval(key))
        said.append(f"{key} {_words(was)} {before} -> {_words(group[name])} {unit}")
    changed = f"; scaled to that, since not given: {', '.join(said)}" if said else ""
    return f"{length:g} {unit} instead of the recipe's {recipe['engine'][before]:g} {before}{changed}"


def _place(values: Values, key: str) -> tuple[Values, str]:
    """The group that a dotted key is in, and its name there."""
    *groups, name = key.split(".")
    return reduce(dict.__getitem__, groups, values), name


def _is_interval(key: str) -> bool:
    """Whether it says how often, not when."""
    return key.startswith("engine.")


def _last(length: Any) -> float:
    return max(length) if isinstance(length, list) else length


def _scaled(length: Any, scale: float, total: float, *, whole: bool, interval: bool) -> Any:
    if isinstance(length, list):
        return [_scaled(each, scale, total, whole=whole, interval=interval) for each in length]
    exact = max(length * scale, total / _MOST_TESTS if interval else 0.0)
    return float(max(1, round(exact))) if whole else float(f"{exact:.4g}")


def _words(length: Any) -> str:
    return " ".join(map(_words, length)) if isinstance(length, list) else f"{length:g}"
