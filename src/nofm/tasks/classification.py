"""Classification: cross-entropy, top-1 and top-5 accuracy."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Task

__all__ = ["Classification"]


class Classification(Task):
    """{"image", "label"} -> cross-entropy. Metrics: accuracy and accuracy_top5 in percent, loss without smoothing."""

    headline = "accuracy"

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = self.model(batch["image"])
        return {"loss": F.cross_entropy(logits, batch["label"], label_smoothing=self.label_smoothing)}

    def measure(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits, label = self.model(batch["image"]).float(), batch["label"]
        # Ranked by counting what lies above, so that ties cannot depend on how a sort breaks them.
        mine = logits.gather(1, label[:, None])
        above = (logits > mine).sum(1)
        tied_before = ((logits == mine) & (torch.arange(logits.shape[1], device=label.device) < label[:, None])).sum(1)
        rank = above + tied_before
        return {
            "count": torch.full((), len(label), device=label.device, dtype=torch.float64),  # filled on the device, for CUDA graphs
            "loss": F.cross_entropy(logits, label, reduction="none").double().sum(),
            "top1": (rank < 1).double().sum(),
            "top5": (rank < 5).double().sum(),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = sums["count"]
        return {
            "accuracy": 100 * sums["top1"] / count,
            "accuracy_top5": 100 * sums["top5"] / count,
            "loss": sums["loss"] / count,
        }
