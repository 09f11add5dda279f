"""What the processes of a test do: each measures its part of the images of `made`, and all ask for the result."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from nofm.tasks.average_precision import AveragePrecision

SIDE = 240


def rectangles(boxes: np.ndarray) -> np.ndarray:
    """(N, SIDE, SIDE): masks of boxes, with a corner cut off."""
    y, x = np.mgrid[:SIDE, :SIDE]
    masks = [(x >= a) & (x < c) & (y >= b) & (y < d) & ~((x < a + (c - a) / 3) & (y < b + (d - b) / 3)) for a, b, c, d in boxes]
    return np.array(masks, bool).reshape(-1, SIDE, SIDE)


def made(images: int, seed: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Detections and truth of all sizes: moved boxes, boxes that are nothing, wrong categories, equal scores, crowds, empty images."""
    rng = np.random.default_rng(seed)
    found, truth = [], []
    for index in range(images):
        count = int(rng.integers(0, 9)) if index else 8
        corner = rng.integers(0, 120, (count, 2))
        size = np.array([rng.integers(*[(6, 30), (38, 90), (112, 120)][i % 3], 2) for i in range(count)]).reshape(-1, 2)
        there = np.concatenate([corner, corner + size], 1).reshape(-1, 4)
        labels = rng.integers(1, 4, count)
        near = there + np.round(rng.normal(0, 0.05, there.shape) * np.tile(size, 2).reshape(there.shape))
        near = np.concatenate([near, near[: count // 2] + 2, np.array([[3, 3, 90, 60], [100, 100, 130, 150]])])
        near[:, 2:] = np.maximum(near[:, 2:], near[:, :2] + 1)
        kept = rng.permutation(len(near))[: rng.integers(0, len(near) + 1)] if index else np.arange(len(near))
        guessed = np.concatenate([labels, labels[: count // 2], [1, 2]])
        guessed = np.where(rng.random(len(guessed)) < 0.15, rng.integers(1, 4, len(guessed)), guessed)
        scores = np.round(rng.random(len(near)), 1)
        found.append(
            {
                "boxes": torch.tensor(near[kept], dtype=torch.float32).reshape(-1, 4),
                "labels": torch.tensor(guessed[kept]),
                "scores": torch.tensor(scores[kept], dtype=torch.float32),
                "masks": torch.tensor(rectangles(near[kept])),
            }
        )
        masks = rectangles(there)
        truth.append(
            {
                "boxes": torch.tensor(there, dtype=torch.float32).reshape(-1, 4),
                "labels": torch.tensor(labels),
                "area": torch.tensor(masks.sum((1, 2)), dtype=torch.float64),
                "iscrowd": torch.tensor((rng.random(count) < 0.2).astype(np.int64)),
                "masks": torch.tensor(masks),
                "index": torch.tensor(index),
            }
        )
    return found, truth


def measured(images: list[int], seed: int) -> dict[str, float]:
    found, truth = made(5, seed)
    precision = AveragePrecision(masks=True)
    for index in images:
        precision.add([found[index]], [truth[index]])
    return precision.compute()


def work(rank: int, folder: str, seed: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    mine: Any = [[0, 2, 4], [1, 3, 4]][rank]  # image 4 is seen twice
    torch.save(measured(mine, seed), Path(folder, f"rank{rank}"))
    distributed.barrier()
    distributed.destroy_process_group()
