"""The two things that a training loop asks of a task: a loss for a batch, and numbers that add up to metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["Task"]


class Task(nn.Module):
    """A network and what it is trained for. `headline` is the metric that a progress line shows."""

    headline: str
    model: nn.Module

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """At least {"loss": ...}, a mean over the batch."""
        raise NotImplementedError

    def measure(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums over the batch, to be added over batches and processes."""
        raise NotImplementedError

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics from the sums over all batches."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)
