"""Watches the weights for NaN and Inf without making the GPU wait.

One number says whether all weights are finite: the largest magnitude. On the CPU it is read at once. On a GPU it is copied to
the host while training goes on and read when it has arrived, a step or two later; the error still names the step it was.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TypeAlias

import torch
from torch import Tensor

from ..masks import check_finite

__all__ = ["FiniteWatch"]

_Named: TypeAlias = list[tuple[str, Tensor]]


class FiniteWatch:
    """Raises `NonFiniteWeightError` for weights it has been shown."""

    def __init__(self) -> None:
        self._arriving: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def look(self, step: int, named: _Named) -> None:
        """Look at the weights as they are after `step`."""
        together: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for _, weight in named:
            if weight.numel():
                together.setdefault((weight.device, weight.dtype), []).append(weight)
        for (device, _), weights in together.items():
            if device.type == "meta" or hasattr(weights[0], "fake_mode"):
                continue
            largest = torch.stack(torch._foreach_norm(weights, math.inf)).amax()
            if device.type != "cuda":
                self._check(largest, step, named)
            elif not torch.cuda.is_current_stream_capturing():
                self._send(largest, step)
        while self._arriving and self._arriving[0][2].query():
            then, value, _ = self._arriving.popleft()
            self._check(value, then, named)

    def _send(self, largest: Tensor, step: int) -> None:
        on_host = torch.empty((), dtype=largest.dtype, pin_memory=True).copy_(largest, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._arriving.append((step, on_host, arrived))

    @staticmethod
    def _check(largest: Tensor, step: int, named: _Named) -> None:
        if not math.isfinite(largest.item()):
            for name, weight in named:
                check_finite(weight, name, step)
