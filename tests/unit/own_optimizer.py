"""An optimizer as people write them: it counts its steps in a number of Python's, its names are its own, but for one, and not all of its
memory starts as zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class OwnAdam(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._move(param, param.grad, group["lr"])

    def _move(self, param: Tensor, grad: Tensor, lr: float) -> None:
        state = self.state[param]
        if not state:
            state.update(count=0, first=torch.zeros_like(param), second=torch.zeros_like(param), square_avg=torch.ones_like(param))
        state["count"] += 1
        first = state["first"].lerp_(grad, 0.5) / (1 - 0.5 ** state["count"])
        second = state["second"].lerp_(grad.square(), 0.25) / (1 - 0.75 ** state["count"])
        slow = state["square_avg"].lerp_(grad.square(), 0.5)
        param.sub_(lr * first / (second.sqrt() + 1e-8) / (1 + slow))
