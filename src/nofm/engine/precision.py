"""fp32, bf16 or fp16: autocast, the loss scale of fp16, clipping, and the watch for a loss that is no number."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import NofmError
from ..methods.inside import clear_

__all__ = ["LossWatch", "NonFiniteLossError", "Precision"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class NonFiniteLossError(NofmError):
    """The loss is NaN or Inf. Carries `step` and `value`."""

    def __init__(self, step: int, value: float) -> None:
        self.step, self.value = step, value
        super().__init__(
            f"the loss of step {step} is {value}; nothing after it would mean anything. Lower optim.lr, set engine.clip, "
            "lengthen schedule.warmup, or use engine.precision fp32"
        )


class Precision:
    """Runs the forward in its dtype and takes the optimizer's step with unscaled, clipped gradients."""

    def __init__(self, name: str, device_type: str, clip: float | None = None) -> None:
        self.dtype, self.device_type, self.clip = _DTYPES.get(name), device_type, clip
        self.scaler = torch.amp.GradScaler(device_type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def step(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """The optimizer's step; skipped where scaled gradients have overflowed."""
        if self.clip is not None:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, self.clip)
        first_scale = self.scaler.get_scale() if self.scaler.is_enabled() and not optimizer.state else 0.0
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scaler.get_scale() < first_scale:  # torch's fused SGD has made momentum without writing to it, and would go on from there
            for state in optimizer.state.values():
                clear_(state, optimizer)


class LossWatch:
    """Raises for a loss that is not finite: at once on the CPU; on a GPU when the value has arrived, without making it wait."""

    def __init__(self) -> None:
        self._arriving: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def look(self, step: int, loss: Tensor) -> None:
        """Look at the loss of `step`, before its gradients are used."""
        if not loss.is_cuda:
            _check(step, loss)
            return
        on_host = torch.empty((), dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._arriving.append((step, on_host, arrived))
        while self._arriving and self._arriving[0][2].query():
            then, value, _ = self._arriving.popleft()
            _check(then, value)

    def settle(self) -> None:
        """Wait for all that is still on its way: before weights are saved."""
        while self._arriving:
            then, value, arrived = self._arriving.popleft()
            arrived.synchronize()
            _check(then, value)


def _check(step: int, loss: Tensor) -> None:
    value = loss.item()
    if not math.isfinite(value):
        raise NonFiniteLossError(step, value)
