"""Starts with more weights than a pattern keeps: dense up to a step, or with fewer and fewer weights from one step to another.

    stage 0     all weights                                                   dense training
    stage 1-3   about M^(1 - s/4) * N^(s/4) weights of every M                a gradual start only; decaying masks of Kao et al. 2022
    stage 4     N of every M                                                  from step `begin_at` on

A stage is how far layers have come, and each says through which lens they look. What is kept in between is by equal factors: 8, 4 and 2
of 16 on the way to 1, since a layer feels the share that it loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import ste
from ..errors import OptimizerError
from ..masks import Grouping
from ..patterns import Pattern
from ..site import Site
from .options import check_whole

__all__ = ["STAGES", "Start"]

STAGES = 4  # the last being the pattern


@dataclass(frozen=True)
class Start:
    """begin_at: the step after which layers have their pattern. ramp_at: that after which they begin to narrow; None: they are dense."""

    begin_at: int
    ramp_at: int | None

    def check(self) -> None:
        """Raise for options that mean nothing."""
        check_whole("begin_at", self.begin_at)
        if self.ramp_at is None:
            return
        check_whole("ramp_at", self.ramp_at)
        if self.ramp_at >= self.begin_at:
            needs = f"must be below begin_at, {self.begin_at}," if self.begin_at else "needs a later begin_at,"
            raise OptimizerError(f"ramp_at={self.ramp_at}: {needs} where the pattern is reached")

    def stage(self, number: int) -> int:
        """How far layers have come after `number` steps."""
        if number >= self.begin_at:
            return STAGES
        if self.ramp_at is None or number < self.ramp_at:
            return 0
        return 1 + (number - self.ramp_at) * (STAGES - 1) // (self.begin_at - self.ramp_at)

    def changes_in(self, number: int) -> bool:
        """Whether layers come to another stage in step `number`."""
        return self.stage(number) != self.stage(number - 1)

    def lens(self, site: Site, number: int) -> ste.Lens | None:
        """How a layer looks at its weight after `number` steps; None: as it will by its pattern."""
        stage = self.stage(number)
        if stage == 0:
            return ste.dense
        seen = _between(site.grouping, stage / STAGES)
        return None if seen == site.grouping else ste.Wider(seen)

    def seen(self, site: Site, number: int) -> Pattern:
        """What the layer keeps then: M of M in a dense start."""
        return _between(site.grouping, self.stage(number) / STAGES).pattern

    def gives_back(self, was: Start, sites: Sequence[Site], number: int) -> str:
        """Which layers would have more weights again after `number` steps, which they have made with the start `was`; "" if none."""
        seen = [(site, was.seen(site, number), self.seen(site, number)) for site in sites]
        wider = [each for each in seen if each[2].n > each[1].n]
        if number == 0 or not wider:
            return ""
        site, before, after = wider[0]
        others = f" and {len(wider) - 1} more go" if len(wider) > 1 else " goes"
        harmless = f", which up to step {number} changes nothing" if was.stage(number) == STAGES else ""
        return (
            f"{site.name}{others} from {before} back to {'dense' if after.n == after.m else after} at step {number}, until step "
            f"{self.begin_at} (begin_at{harmless})"
        )

    def unfinished(self, number: int) -> str:
        """Until when it lasts, as `Method.unfinished` says it; "" where it is over."""
        if number >= self.begin_at:
            return ""
        start = "dense start lasts until" if self.ramp_at is None else f"gradual start (ramp_at={self.ramp_at}) comes to the pattern at"
        return f"its {start} step {self.begin_at} (begin_at)"


def _between(grouping: Grouping, part: float) -> Grouping:
    """`part` of the way from all M weights of a group to N, in equal factors; N itself at the end of the way only."""
    n, m = grouping.pattern.n, grouping.pattern.m
    kept = n if part == 1 else min(m, max(n + 1, round(m ** (1 - part) * n**part)))
    return replace(grouping, pattern=Pattern(f"{kept}:{m}"))
