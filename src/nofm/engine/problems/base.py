"""What the engine must know of a kind of task: which settings it has, and how they become data, network and cost. Needs no torch.

The loop knows batches, losses and metrics only. Everything that differs between classification, translation and so on is here,
one class each, found by `task.kind` in `problems.PROBLEMS`. Whatever needs torch is imported when it is asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..complaints import Complaints
from ..config import ConfigError, RunConfig

if TYPE_CHECKING:
    from torch import nn

    from ...analysis import Cost
    from ...data.loader import Loader, Tests
    from ...tasks.base import Task
    from ..world import World

__all__ = ["CLASSES", "SHARED", "Problem", "known_classes"]

CLASSES = "classes.json"  # in a run's folder: the names of its classes or categories, in the order of the network's outputs
# Settings of the groups task, model and data that all problems have.
SHARED = ("task.kind", "model.name", "model.weights", "data.name", "data.root")


class Problem:
    """One kind of task. Subclasses say what differs."""

    fields: tuple[str, ...] = ()  # its settings in the groups task, model and data, beside the shared ones
    test_fields: tuple[str, ...] = ()  # of these, what a finished network may be measured with: other data, another search
    data: tuple[str, ...] = ()  # allowed in data.name
    packages: tuple[str, ...] = ()  # that must be installed,
    extra = ""  # as nofm[extra] does
    unit = "images"  # what engine.batch_size counts, and the log by the second
    items = "images"  # what a loader passes by
    same_shapes = True  # whether tensors have the same few shapes in all steps
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

    def task(self, c: RunConfig, loader: Any, *, blank: bool = False) -> Task:
        """The task with its network, dense as yet, for the data of `loader`. `blank`: its weights will come from a file, so that none
        are fetched to begin with."""
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

    # ---- measuring a finished network ----

    def for_tests(self, own: RunConfig, c: RunConfig) -> RunConfig:
        """`c`, which measures a network that was trained by `own`, with what follows from its data being others."""
        return c

    def check_tests(self, c: RunConfig) -> Complaints:
        """As `check`, of what measuring needs: nothing of what is trained on."""
        raise NotImplementedError

    def tests(self, own: RunConfig, c: RunConfig, world: World, run: Path) -> Tests:
        """Opens the data of `c` to measure the network of the run in folder `run` on, which was trained by `own`, for one process. `task`
        takes it for a loader."""
        raise NotImplementedError


def known_classes(run: Path) -> list[str] | None:
    """The names that the run in this folder has written down; None where it was made before they were."""
    path = run / CLASSES
    if not path.is_file():
        return None
    try:
        names = json.loads(path.read_text())
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return names
    except (ValueError, OSError):
        pass
    raise ConfigError(f"{path}: does not hold the names of classes, a list of texts; copy it from where the run was made")
