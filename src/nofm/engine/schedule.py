"""How long a run's parts are in steps, and the learning rate of every one of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

from torch.optim import Optimizer, lr_scheduler

from ..tasks.translation import inverse_sqrt
from .config import ConfigError, RunConfig

__all__ = ["Lengths", "cycles", "make_schedule"]


class Lengths:
    """A configuration's lengths in steps, now that the number of steps in an epoch is known."""

    def __init__(self, config: RunConfig, steps_per_epoch: int) -> None:
        e = config.engine
        self.steps_per_epoch, self._in_epochs = steps_per_epoch, e.epochs is not None
        self.total = self.steps(e.epochs if e.epochs is not None else e.steps or 1)
        self.warmup = self.steps(config.schedule.warmup)
        self.milestones = [self.steps(m) for m in config.schedule.milestones]
        self.restarts = [self.steps(r) for r in config.schedule.restarts]
        self.eval_every = max(1, self.steps(e.eval_every))
        self.checkpoint_every = self.eval_every if e.checkpoint_every is None else max(1, self.steps(e.checkpoint_every))
        if self.total < 1:
            raise ConfigError(f"engine.epochs = {e.epochs}: less than one step of {steps_per_epoch} in an epoch")

    def steps(self, length: float) -> int:
        """A length of the configuration's unit, in steps."""
        return round(length * self.steps_per_epoch) if self._in_epochs else int(length)


def make_schedule(config: RunConfig, optimizer: Optimizer, lengths: Lengths) -> lr_scheduler.LRScheduler:
    """A linear warm-up, and then the schedule proper; where it restarts, both or only the second again."""
    s, warmup = config.schedule, lengths.warmup
    if s.kind == "onecycle":
        return _cycling(config, optimizer, lengths)
    if s.kind == "inverse_sqrt":
        return lr_scheduler.LambdaLR(optimizer, partial(inverse_sqrt, warmup=max(1, warmup)))
    parts: list[lr_scheduler.LRScheduler] = []
    begins: list[int] = []  # their first steps
    for begin, top, end in _stretches(config, lengths, warmup):
        if top > begin:
            parts.append(lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup))
            begins.append(begin)
        parts.append(_falling(config, optimizer, lengths, top, end))
        begins.append(top)
    return parts[0] if len(parts) == 1 else lr_scheduler.SequentialLR(optimizer, parts, milestones=begins[1:])


def _falling(config: RunConfig, optimizer: Optimizer, lengths: Lengths, top: int, end: int) -> lr_scheduler.LRScheduler:
    """What comes after the warm-up, from step `top` to `end`."""
    s = config.schedule
    if s.kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=end - top, eta_min=s.final)
    if s.kind == "step":
        return lr_scheduler.MultiStepLR(optimizer, [m - top for m in lengths.milestones], gamma=0.1 if s.gamma is None else s.gamma)
    return lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0)


def _stretches(config: RunConfig, lengths: Lengths, rise: int) -> list[tuple[int, int, int]]:
    """Where the rate starts, where it is largest and where it has fallen: once, and again from each restart."""
    s = config.schedule
    edges = pairwise([0, *lengths.restarts, lengths.total])
    found = [(begin, begin + rise if begin == 0 or s.restart_warmup else begin, end) for begin, end in edges]
    if any(top >= end for _, top, end in found):
        raise ConfigError(
            f"schedule.warmup = {s.warmup:g}, schedule.restarts = {', '.join(f'{r:g}' for r in s.restarts) or 'none'}: in whole steps the "
            f"rate would fall from {', '.join(str(top) for _, top, _ in found)} to {lengths.total}, and a part of that has no step; set "
            "them apart"
        )
    return found


# ---- one cycle ----

_RISE = 0.3  # share of a cycle whose warm-up is not given; torch's too


def _cycling(config: RunConfig, optimizer: Optimizer, lengths: Lengths) -> lr_scheduler.LRScheduler:
    s, total = config.schedule, lengths.total
    linear = s.shape == "linear"
    if lengths.restarts:
        rise = lengths.warmup or _RISE * lengths.restarts[0]
        ends = [end for *_, end in _stretches(config, lengths, math.ceil(rise))]
        return lr_scheduler.LambdaLR(optimizer, partial(cycles, ends=ends, rise=rise, linear=linear, again=s.restart_warmup))
    shape: Literal["linear", "cos"] = "linear" if linear else "cos"
    share = lengths.warmup / total or _RISE
    return lr_scheduler.OneCycleLR(
        optimizer, config.optim.lr, total_steps=total + 1, pct_start=share, anneal_strategy=shape, cycle_momentum=False
    )


def cycles(step: int, ends: Sequence[int], rise: float, linear: bool, again: bool) -> float:
    """Cycles one after another, as shares of the largest rate: up to the first of `ends` as torch's OneCycleLR of that length, and then to
    each of the others likewise (`again`) or as after its rise."""
    place = min(bisect_right(ends, step), len(ends) - 1)
    begin, end = (ends[place - 1] if place else 0), ends[place]
    rises = again or not place
    length = end - begin if rises else ends[0]
    top = begin + (rise if rises else 0.0) - (1 - rise / length)  # torch's peak comes a little before the end of the rise
    low, high, part = (1.0, 1 / 25e4, (step - top) / (end - top)) if step > top else (1 / 25, 1.0, (step - begin) / (top - begin))
    return low + (high - low) * (part if linear else (1 - math.cos(math.pi * part)) / 2)
