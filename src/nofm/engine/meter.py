"""What a line of the log says of the steps since the last one."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

__all__ = ["Meter"]


class Meter:
    """The mean loss since the last line of the log, and the speed. The sum stays on the device until it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.loss, self.steps = torch.zeros((), dtype=torch.float64, device=device), 0
        self.began, self.untimed = time.perf_counter(), 0  # steps of an earlier part of the run, before `began`

    def add(self, loss: Tensor) -> None:
        self.loss += loss
        self.steps += 1

    def steps_per_second(self) -> float:
        return (self.steps - self.untimed) / (time.perf_counter() - self.began)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss.clone(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.steps = state["loss"].to(self.loss.device), int(state["steps"])
        self.untimed = self.steps
