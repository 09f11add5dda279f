"""What many methods ask of their options."""

from __future__ import annotations

import math
from typing import Any, get_args

from ..errors import OptimizerError

__all__ = ["check_given", "check_one_of", "check_share", "check_weight", "check_whole"]


def check_share(name: str, value: object) -> None:
    """Raise unless `value` is a number between 0 and 1, neither of them."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise OptimizerError(f"{name}={value!r} must be 0 < {name} < 1")


def check_whole(name: str, value: object, least: int = 0) -> None:
    """Raise unless `value` is a whole number, `least` or more: a step, a number of steps, a seed."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptimizerError(f"{name}={value!r} must be a whole number, {least} or more")


def check_given(method: object, name: str, meaning: str) -> None:
    """Raise where a length that only the loop knows was left out. Those of the papers are for runs of theirs: in a shorter one a method
    would not come to what it is for, without a word."""
    if not getattr(method, name):
        raise OptimizerError(f"{type(method).__name__} needs {name}: {meaning}")


def check_weight(name: str, value: object) -> None:
    """Raise unless `value` is a finite number, 0 or more: the strength of a term."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise OptimizerError(f"{name}={value!r} must be a finite number, 0 or more")


def check_one_of(name: str, value: object, allowed: Any) -> None:
    """Raise unless `value` is one of `allowed`, a `Literal`."""
    if value not in get_args(allowed):
        raise OptimizerError(f"{name}={value!r} is not one of {', '.join(map(repr, get_args(allowed)))}")
