"""Mixed N:M: from `sparsity.budget` to a pattern for each layer, once, before training.

All of it is the host's work on starting weights that a seed decides, so that one configuration means one network. A run that goes on
takes the patterns that it began with from its folder all the same: another machine may add up gradients in another order. Images that
loader processes read are looked at a few at a time: 256 of ImageNet's in a ResNet-50 would take more than 20 GB of the host's memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ..allocate import CANDIDATES, STRATEGY, Strategy, allocate_patterns
from ..errors import LayerError
from ..patterns import PatternLike
from ..tasks.base import Task
from .config import ConfigError, RunConfig
from .measure import each

if TYPE_CHECKING:
    from .folder import RunFolder
    from .world import World

__all__ = ["Patterns", "allocated", "patterns_of"]

Patterns: TypeAlias = dict[str, PatternLike | None]

_AT_ONCE = 32  # images


def patterns_of(config: RunConfig, task: Task, loader: Any, world: World, folder: RunFolder | None) -> Patterns | None:
    """A pattern for each layer, on all processes the same; None where the configuration has no budget."""
    if config.sparsity.budget is None:
        return None
    earlier = None if folder is None else folder.earlier_patterns()
    found: Patterns | None = world.gathered(earlier)[0]
    if found is None:
        at_once = _AT_ONCE if config.data.loader == "workers" else None
        gradients = _gradients(task, loader, world.device, at_once) if config.sparsity.allocation == "sensitivity" else None
        found = allocated(task.model, config, gradients)
    first: Patterns = world.gathered(found)[0]
    return first


def allocated(model: nn.Module, config: RunConfig, gradients: dict[str, Tensor] | None = None, by: Strategy | None = None) -> Patterns:
    """What `allocate_patterns` makes of the configuration; `by`: another strategy than it says."""
    s = config.sparsity
    by, candidates = by or s.allocation or STRATEGY, s.candidates or CANDIDATES
    try:
        found = allocate_patterns(model, s.budget or 1.0, candidates, by=by, gradients=gradients, preset=s.preset, skip=s.skip, axis=s.axis)
    except LayerError as error:
        raise ConfigError(f"sparsity.budget = {s.budget}: {error}") from None
    return {name: None if pattern is None else str(pattern) for name, pattern in found.items()}


def _gradients(task: Task, loader: Any, device: torch.device, at_once: int | None) -> dict[str, Tensor]:
    """Of the dense network on the first batch, by a copy: statistics of the network's own must not have seen it."""
    twin, skipped = copy.deepcopy(task).train(), loader.skipped
    with closing(loader.keys(0)) as keys:  # processes that read ahead are not left behind
        key = each(next(keys), lambda value: value.to(device))
    loader.skipped = skipped  # the batch comes again, and what it has skipped is counted then
    batch = each(loader.make(key), lambda value: value.cpu())
    with torch.enable_grad():
        for part, share in _parts(batch, at_once):
            (share * twin(part)["loss"]).backward()
    return {name: p.grad for name, p in twin.model.named_parameters() if p.grad is not None}


def _parts(batch: dict[str, Tensor], at_once: int | None) -> Iterator[tuple[dict[str, Tensor], float]]:
    """A batch in parts of about one size, of at most so many images, and the share of each. None: whole, whatever is in it."""
    if at_once is None:
        yield batch, 1.0
        return
    size = len(next(iter(batch.values())))
    for index in torch.arange(size).tensor_split(math.ceil(size / at_once)):
        yield {name: values[index] for name, values in batch.items()}, len(index) / size
