"""What becomes of a claim: the difference of two means, its 95 % interval (Welch's t), and a word.

"holds" where all of the interval is on the claimed side, "fails" where all of it is on the other, "open" where it holds zero. Two rows are
level where the interval lies within the measure's margin of zero on both sides (half a point of accuracy, say).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .compare import stat
from .measures import Measure

__all__ = ["Interval", "difference", "verdict"]

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference of means and its 95 % interval."""

    mean: float
    low: float
    high: float


def difference(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """mean(first) - mean(second) by Welch's t; None where one of them has a single value."""
    a, b = stat(first), stat(second)
    if a is None or b is None or a.spread is None or b.spread is None:
        return None
    va, vb = a.spread**2 / a.n, b.spread**2 / b.n
    mean = a.mean - b.mean
    if va + vb == 0:
        return Interval(mean, mean, mean)
    freedom = (va + vb) ** 2 / (va**2 / (a.n - 1) + vb**2 / (b.n - 1))
    half = _quantile(freedom) * math.sqrt(va + vb)
    return Interval(mean, mean - half, mean + half)


def _quantile(freedom: float) -> float:
    """Of the next lower whole number of degrees of freedom, which makes the interval wider rather than narrower."""
    return _T[int(freedom) - 1] if freedom < len(_T) + 1 else 1.96 + 2.5 / freedom


def verdict(claim: Mapping[str, Any], interval: Interval | None, measure: Measure) -> str:
    """ "holds", "fails", "open", or "" where there are too few runs."""
    if interval is None:
        return ""
    if claim["metric"] == "sad":
        low, high = -interval.high, -interval.low
    else:
        low, high = sorted((measure.better(interval.low), measure.better(interval.high)))
    if claim["level"]:
        return "holds" if low >= -measure.level and high <= measure.level else "fails" if high < -measure.level else "open"
    return "holds" if low > 0 else "fails" if high < 0 else "open"
