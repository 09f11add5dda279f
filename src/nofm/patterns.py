"""`Pattern("2:4")`: keep 2 of every 4 consecutive weights.

A pattern is a value: parsed once at the edge, frozen, compared and hashed by its two numbers. Everything below the edge takes
the value and never a string. N always counts what is *kept* (some tools count what is pruned; 1:4 and 3:4 are not the same).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from .errors import PatternError
from .plain import plain_number

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Pattern", "PatternLike"]

_ALLOWED = 'a pattern is "N:M" with whole numbers 1 <= N <= M <= 99999, such as "2:4": keep N of every M consecutive weights'


@dataclass(frozen=True, slots=True, init=False, order=True)
class Pattern:
    """Keep `n` of every `m` consecutive weights.

    >>> Pattern("2:4")
    Pattern("2:4")
    >>> Pattern("1:16").density
    0.0625
    """

    n: int
    m: int

    def __init__(self, text: PatternLike, *others: object) -> None:
        if others:
            raise PatternError(f"a pattern is one text, and {1 + len(others)} values are given{_hint((text, *others))}: {_ALLOWED}")
        if isinstance(text, Pattern):
            n, m = text.n, text.m
        else:
            n, m = _parse(text)
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "m", m)

    @property
    def density(self) -> float:
        """The share of weights that is kept."""
        return self.n / self.m

    def divides(self, size: int) -> bool:
        """Whether `size` weights make whole groups."""
        return size % self.m == 0

    def kept(self, size: int) -> int:
        """How many of `size` consecutive weights are kept; a last, short group keeps at most its own size."""
        groups, rest = divmod(size, self.m)
        return groups * self.n + min(rest, self.n)

    def is_satisfied(self, weight: Tensor, axis: int | Literal["flat"] = 1) -> bool:
        """Whether no group of `weight` along `axis` holds more than N weights that are not zero."""
        exists = weight.dim() >= 2 if axis == "flat" else -weight.dim() <= axis < weight.dim()
        if not exists:
            raise PatternError(f"axis {axis!r} does not exist in a weight of shape {tuple(weight.shape)}")
        rows = weight.flatten(1) if axis == "flat" else weight.movedim(axis, -1)
        if not self.divides(rows.shape[-1]):
            raise PatternError(f"{self} needs axis {axis} divisible by {self.m}, got {rows.shape[-1]}")
        return bool(((rows != 0).unflatten(-1, (-1, self.m)).sum(-1) <= self.n).all())

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    def __repr__(self) -> str:
        return f'Pattern("{self}")'


PatternLike: TypeAlias = str | Pattern


def _parse(text: object) -> tuple[int, int]:
    if not isinstance(text, str):
        raise PatternError(f"{text!r} is no pattern{_hint(text)}: {_ALLOWED}")
    # ASCII digits only, and no leading zero: one pattern has one spelling.
    match = re.fullmatch(r"(0|[1-9][0-9]{0,4}):([1-9][0-9]{0,4})", text)
    if match is None:
        hint = _near_miss(text)
        raise PatternError(f"{text!r} is no pattern: {_ALLOWED}" + (f'; did you mean "{hint}"?' if hint else ""))
    n, m = int(match[1]), int(match[2])
    if n == 0:
        raise PatternError(f"{text!r} keeps nothing: {_ALLOWED}")
    if n > m:
        raise PatternError(f'{text!r} keeps more than it has: {_ALLOWED}; did you mean "{m}:{n}"?')
    return n, m


def _hint(given: object) -> str:
    """How a pattern is written that was given as two numbers, Python's or another library's."""
    numbers = [plain_number(each) for each in given] if isinstance(given, tuple | list) and len(given) == 2 else []
    hint = _near_miss(":".join(map(str, numbers))) if numbers and all(type(each) is int for each in numbers) else None
    return f' (did you mean "{hint}"?)' if hint else ""


def _near_miss(text: str) -> str | None:
    """What was meant, where a text holds the two numbers of a pattern and is only spelled wrongly."""
    numbers = re.findall(r"[0-9]+", text)
    if len(numbers) != 2 or max(map(len, numbers)) > 5:  # int() refuses a text of thousands of digits
        return None
    n, m = map(int, numbers)
    return f"{n}:{m}" if 1 <= n <= m else None
