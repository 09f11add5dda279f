"""How a number moves over the steps of a run: shares pruned, shares rewired. Pure functions of the step's number, which counts from 1.

constant   value
cubic      final + (start - final) * (1 - (t - begin_at) / (end_at - begin_at))^3      Zhu & Gupta 2017, Eq. 1
cosine     start / 2 * (1 + cos(pi * t / end_at)), 0 from `end_at` on                  Evci et al. 2020, section 3
"""

from __future__ import annotations

import math

__all__ = ["constant", "cosine", "cubic"]


def constant(number: int, value: float) -> float:
    """`value` at every step."""
    return value


def cubic(number: int, begin_at: int, end_at: int, final: float, start: float = 0.0) -> float:
    """From `start` at step `begin_at` to `final` at step `end_at`, fast at first and slower where there is less left."""
    if number >= end_at:
        return final  # exactly, and also where the two steps are the same
    if number <= begin_at:
        return start
    return final + (start - final) * (1 - (number - begin_at) / (end_at - begin_at)) ** 3


def cosine(number: int, end_at: int, start: float) -> float:
    """From `start` at step 0 down half a cosine to 0 at step `end_at`."""
    return 0.0 if number >= end_at else start / 2 * (1 + math.cos(math.pi * number / end_at))
