"""What becomes of a claim: the difference of two means, its 95 % interval (Welch's t), and a word.

"holds" where all of the interval is on the claimed side, "fails" where all of it is on the other, "open" where it contains zero. Two rows
are level where the interval lies within the measure's margin of zero on both sides (half a point of accuracy, say).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .compare import stat
from .measures import Measure

__all__ = ["Interval", "difference", "quantile", "verdict"]


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
    half = quantile(freedom) * math.sqrt(va + vb)
    return Interval(mean, mean - half, mean + half)


@lru_cache(4096)  # twenty milliseconds each, and the same intervals are asked for by the table, the page and the overview
def quantile(freedom: float) -> float:
    """The t that Student's distribution stays within on both sides in 95 % of cases; degrees of freedom may be a fraction."""
    low, high = 0.0, 13.0  # one degree of freedom, the fewest, has 12.706
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(middle, freedom) > 0.05 else (low, middle)
    return high


def _beyond(t: float, freedom: float) -> float:
    """The probability of more than t on either side: with t = sqrt(freedom) * tan(a), the integral of cos(a)^(freedom - 1) from there to a
    right angle, over that from 0."""
    start, pieces = math.atan(t / math.sqrt(freedom)), 1000
    scale = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    width = (math.pi / 2 - start) / pieces
    heights = [math.cos(start + i * width) ** (freedom - 1) for i in range(pieces)] + [1.0 if freedom == 1 else 0.0]
    return scale * width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))  # Simpson's rule


def verdict(claim: Mapping[str, Any], interval: Interval | None, measure: Measure) -> str:
    """ "holds", "fails", "open", or "" where there are too few runs."""
    if interval is None:
        return ""
    if claim["metric"] != "score":  # the movement of masks, the loss of training: less is better, whatever the score counts
        low, high = -interval.high, -interval.low
    else:
        low, high = sorted((measure.better(interval.low), measure.better(interval.high)))
    if claim["level"]:
        return "holds" if low >= -measure.level and high <= measure.level else "fails" if high < -measure.level else "open"
    return "holds" if low > 0 else "fails" if high < 0 else "open"
