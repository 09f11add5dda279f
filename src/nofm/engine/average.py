"""The exponential moving average of the weights, from torch's own AveragedModel.

The dense weights are averaged, and the average is masked like any other weight: in its forward, by its own N largest of every M.
An average of N:M weights would not be N:M, since masks move; this one is. Where a method has frozen a mask, the average has it too.
"""

from __future__ import annotations

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..layers import sites
from ..tasks.base import Task

__all__ = ["Average"]


class Average:
    """A second task whose weights trail those of the first."""

    def __init__(self, task: Task, decay: float) -> None:
        self.model = AveragedModel(task, multi_avg_fn=get_ema_multi_avg_fn(decay))

    @property
    def task(self) -> Task:
        module = self.model.module
        assert isinstance(module, Task)
        return module

    def follow(self, task: Task) -> None:
        """See weights as `task` sees its own: through the same lens, under the same frozen masks."""
        for ours, theirs in zip(sites(self.task.model), sites(task.model), strict=True):
            if theirs.stored_mask is None:
                ours.look_through(theirs.lens)
            else:  # copied whether or not it has changed, since to ask a GPU would be to wait for it
                ours.freeze(theirs.stored_mask.clone() if ours.stored_mask is None else theirs.stored_mask, theirs.lens)

    def update(self, task: Task) -> None:
        """Move a little towards `task`."""
        self.follow(task)  # first: buffers are paired by position, and a frozen mask is one
        self.model.update_parameters(task)
