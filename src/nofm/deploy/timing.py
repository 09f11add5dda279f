"""How long calls take: in turns, so that what else the machine does falls on all of them alike, and told with how much it varied."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Seconds", "Spread", "in_turns"]

_LONG_ENOUGH = 0.004  # seconds of a round: short calls are made so often that the clock's own steps do not count


@dataclass(frozen=True, slots=True)
class Spread:
    """What came out in the middle, and the lowest and the highest of all rounds."""

    median: float
    lowest: float
    highest: float

    def told(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.lowest:.{digits}f}-{self.highest:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a call, one number for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rounds)

    def milliseconds(self) -> Spread:
        return Spread(self.median * 1e3, min(self.rounds) * 1e3, max(self.rounds) * 1e3)

    def rounds_slower_than(self, other: Seconds) -> int:
        """In how many rounds it was not faster than `other`, which had the same machine."""
        return sum(ours >= theirs for theirs, ours in zip(other.rounds, self.rounds, strict=True))

    def speed_up_from(self, other: Seconds) -> Spread:
        """How many times as fast as `other`: the ratio of the medians, and of the rounds in which both had the same machine."""
        ratios = [theirs / ours for theirs, ours in zip(other.rounds, self.rounds, strict=True)]
        return Spread(other.median / self.median, min(ratios), max(ratios))


def in_turns(calls: Sequence[Callable[[], Any]], rounds: int) -> list[Seconds]:
    """The seconds of each call, which is made twice before: what compiles, plans or fills a cache has then done so."""
    for call in calls:
        call()
    repeats = [max(1, round(_LONG_ENOUGH / max(_once(call, 1), 1e-7))) for call in calls]
    seconds = [[_once(call, times) for call, times in zip(calls, repeats, strict=True)] for _ in range(rounds)]
    return [Seconds(each) for each in zip(*seconds, strict=True)]


def _once(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
