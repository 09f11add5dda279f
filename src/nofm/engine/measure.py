"""Measuring a task: test batches in, metrics out. Runs do it on their way and at their end, `evaluate` does it afterwards, by this code
alone, so that their numbers can be compared to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..data.loader import Batch
from ..tasks.base import Task
from .config import ConfigError
from .world import World

__all__ = ["each", "laid_out", "metrics_of", "on_device", "summed"]

Sums = dict[str, Tensor]


@torch.no_grad()
def summed(task: Task, batches: Iterable[Batch], measure: Callable[[Batch], Sums], look: Callable[[], bool]) -> Sums:
    """What `measure` finds in all batches, added up. `look` is called after each; where it says True, the others are left."""
    task.eval()
    task.reset()
    sums: Sums = {}
    for batch in batches:
        for name, value in measure(batch).items():
            sums[name] = sums[name] + value if name in sums else value
        if look():
            break
    return sums


def metrics_of(task: Task, sums: Sums, world: World) -> dict[str, float]:
    """The metrics of the sums of all processes."""
    names = _measured_by_all(task, list(sums), world)
    nothing = torch.zeros((), dtype=torch.float64, device=world.device)
    totals = world.total(torch.stack([sums.get(name, nothing) for name in names])).tolist()
    return task.metrics(dict(zip(names, totals, strict=True)))


def _measured_by_all(task: Task, mine: list[str], world: World) -> list[str]:
    """The names of the sums, also for a process that has had nothing to measure."""
    everyone = world.gathered(mine)
    if not all(everyone) and any(hasattr(module, "set_reshard_after_forward") for module in task.modules()):
        # FSDP2 fetches in backward what came before in forward, and would wait for a process that has seen no forward.
        raise ConfigError("engine.parallel = fsdp: every process needs something to measure; use fewer, more test data, or ddp")
    return sorted({name for names in everyone for name in names})


# ---- batches ----


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch where the network is."""
    return each(batch, lambda value: value.to(device, non_blocking=True))


def laid_out(batch: Batch, channels_last: bool) -> Batch:
    """The batch in the memory layout of the network."""
    layout = torch.channels_last if channels_last else torch.preserve_format
    return each(batch, lambda value: value.contiguous(memory_format=layout) if value.dim() == 4 else value)


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch with every tensor changed, also those in lists and dicts inside of it."""
    if isinstance(value, dict):
        return {name: each(part, change) for name, part in value.items()}
    if isinstance(value, list):
        return [each(part, change) for part in value]
    return change(value)
