"""Which steps of an optimizer are steps, and which are parts of one.

torch puts its hooks around the `step` of every optimizer class that is ever made an object of. A class of the user's own whose step calls
`super().step()` has them twice, then, and a method that hangs on them would do everything twice: lambda and the number of steps doubled.
Only the outermost step counts. Which one that is, the stack says; a mere counter would be wrong for good after a step that raises.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch.optim import Optimizer

from ..errors import OptimizerError

__all__ = ["Nesting"]


class Nesting:
    """Tells the outermost step of an optimizer from steps of parent classes inside it."""

    def __init__(self, optimizer: Optimizer) -> None:
        # The usual optimizers have one, and are asked nothing in their steps.
        own = [cls for cls in type(optimizer).__mro__ if cls is not Optimizer and "step" in vars(cls)]
        self._name, self._is_possible = type(optimizer).__name__, len(own) > 1
        self._outer: FrameType | None = None
        self._depth = 0

    def enters(self) -> bool:
        """Called by a hook before a step, which torch calls: whether this step is the outermost."""
        if not self._is_possible:
            return True
        if torch.compiler.is_compiling():
            # The compiler leaves the step as it is, then, unless it was told fullgraph=True.
            raise OptimizerError(f"compiled, the step of {self._name} cannot be told from its parent's; leave it uncompiled")
        caller = sys._getframe(2)
        if self._outer is not None and _calls(self._outer, caller):
            self._depth += 1
            return False
        self._outer, self._depth = caller, 1
        return True

    def leaves(self) -> bool:
        """Called by a hook after a step: whether it was the outermost."""
        if not self._is_possible:
            return True
        self._depth -= 1
        if self._depth == 0:
            self._outer = None
        return self._depth == 0


def _calls(outer: FrameType, frame: FrameType | None) -> bool:
    """Whether `outer` has called `frame`, by way of others."""
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is outer
