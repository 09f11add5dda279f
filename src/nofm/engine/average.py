"""The exponential moving average of the weights, in torch's own AveragedModel.

The dense weights are averaged, and the average is masked like any other weight: in its forward, by its own N largest of every M.
An average of N:M weights would not be N:M, since masks move; this one is. Where a method has frozen a mask, the average has it too.

A step moves the weights alone, with lists of them that are kept, and asks the device nothing, so that it can be part of a CUDA graph.
(AveragedModel's own update waits for the device, to see whether it is the first.) Everything else that the average takes over as it is,
buffers and how weights are seen, is due when somebody looks at it: `settle`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..sparsifying import follow_
from ..tasks.base import Task

__all__ = ["Average"]


class Average:
    """A second task whose weights trail those of the first."""

    def __init__(self, task: Task, decay: float) -> None:
        self._move = get_ema_multi_avg_fn(decay)
        self.model = AveragedModel(task, multi_avg_fn=self._move)
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None
        self._updates: int | None = None  # None: the model knows

    @property
    def task(self) -> Task:
        module = self.model.module
        assert isinstance(module, Task)
        return module

    @torch.no_grad()
    def update(self, task: Task) -> None:
        """Move the weights a little towards those of `task`."""
        if self._pairs is None:
            pairs = zip(self.task.parameters(), task.parameters(), strict=True)
            own, other = zip(*((mine.detach(), theirs.detach()) for mine, theirs in pairs), strict=True)
            self._pairs = list(own), list(other)
        if self._updates is None:
            self._updates = int(self.model.n_averaged)
        if self._updates == 0:
            for ours, theirs in zip(*self._pairs, strict=True):
                ours.copy_(theirs)
        else:
            self._move(*self._pairs, self._updates)
        self._updates += 1

    def replayed(self) -> None:
        """Say that a CUDA graph with an `update` in it has been replayed."""
        assert self._updates, "the first update is never captured"
        self._updates += 1

    @torch.no_grad()
    def settle(self, task: Task) -> None:
        """Take over from `task` what is not averaged: call it before the average is measured or saved."""
        self.follow(task)  # first: buffers are paired by position, and a frozen mask is one
        for ours, theirs in zip(self.task.buffers(), task.buffers(), strict=True):
            ours.copy_(theirs)
        if self._updates is not None:
            self.model.n_averaged.fill_(self._updates)

    def follow(self, task: Task) -> None:
        """See weights as `task` sees its own: through the same lens, under the same frozen masks."""
        follow_(self.task.model, task.model)
