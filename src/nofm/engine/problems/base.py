"""What the engine must know of a kind of task: which settings it has, and how they become data, network and cost. Needs no torch.

The loop knows batches, losses and metrics only. Everything that differs between classification, translation and so on is here,
one class each, found by `task.kind` in `problems.PROBLEMS`. Whatever needs torch is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..complaints import Complaints
from ..config import RunConfig

if TYPE_CHECKING:
    from torch import nn

    from ...analysis import Cost
    from ...data.loader import Loader
    from ...tasks.base import Task
    from ..world import World

__all__ = ["SHARED", "Problem"]

SHARED = ("task.kind", "model.name", "data.name", "data.root")  # settings of the groups task, model and data that all problems have


class Problem:
    """One kind of task. Subclasses say what differs."""

    fields: tuple[str, ...] = ()  # its settings in the groups task, model and data, beside the shared ones
    data: tuple[str, ...] = ()  # allowed in data.name
    packages: tuple[str, ...] = ()  # that must be installed,
    extra = ""  # as nofm[extra] does
    unit = "images"  # what engine.batch_size counts, and the log by the second
    items = "images"  # what a loader passes by
    not_captured: str | None = None  # why its steps cannot be CUDA graphs
    not_sharded: str | None = None  # why it cannot be spread by FSDP2

    def check(self, c: RunConfig) -> Complaints:
        """What is wrong with its settings, as far as files' names and numbers tell."""
        raise NotImplementedError

    def draft(self, c: RunConfig) -> nn.Module:
        """The network before data is opened, called where tensors have no memory; raises `ConfigError` where it would not do."""
        raise NotImplementedError

    def loader(self, c: RunConfig, world: World) -> Loader:
        """Opens the data."""
        raise NotImplementedError

    def task(self, c: RunConfig, loader: Any) -> Task:
        """The task with its network, dense as yet, for the data of `loader`."""
        raise NotImplementedError

    def cost(self, c: RunConfig, task: Task) -> Cost | None:
        """Parameters and multiply-adds for one example, or None where there is no such number."""
        raise NotImplementedError

    def step_size(self, c: RunConfig, loader: Any) -> float:
        """How many of its units a step has, on average."""
        return c.engine.batch_size

    def companions(self, loader: Any) -> dict[str, bytes]:
        """Files without which the weights are of no use, such as a vocabulary."""
        return {}
