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
    measure_on_host = False  # whether `measure` reads values of tensors, so that it cannot be part of a CUDA graph

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """At least {"loss": ...}, a mean over the batch."""
        raise NotImplementedError

    def weight(self, batch: dict[str, Any]) -> Tensor | None:
        """How many things the loss is a mean over, where batches differ in that: a step of several batches is then their mean over
        all things, exactly. None where all batches count alike. Reads no value of a tensor."""
        return None

    # ---- evaluation: reset, measure batch by batch, metrics, samples ----

    def reset(self) -> None:
        """Forget the last evaluation: another begins."""

    def measure(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Sums over the batch, to be added over batches and processes."""
        raise NotImplementedError

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics from the sums over all batches."""
        raise NotImplementedError

    def sample_files(self) -> dict[str, bytes]:
        """Something for a person to look at, of what this process has measured since `reset`: JSON lines or NPZ files by name."""
        return {}

    def versions(self) -> dict[str, str]:
        """What its metrics are computed by, where results of another version or setting could not be compared."""
        return {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)
