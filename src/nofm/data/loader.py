"""Batches for training and testing, from one of two loaders.

`ResidentLoader` keeps a small data set on the device as bytes and crops and mirrors there, each image by its own draw: no process,
no copy, one indexing operation a batch. `WorkerLoader` reads images one by one in loader processes.
A batch is {"image": (B, C, H, W) floats, "label": (B,)}.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from .arrays import Arrays
from .order import Order, Share, mix

__all__ = ["Batch", "Loader", "ResidentLoader", "crop_and_flip"]

Batch: TypeAlias = dict[str, Tensor]


class Loader(Protocol):
    """What the engine needs of a loader."""

    order: Order
    skipped: int  # images that could not be read and were passed by, so far

    def train(self, start: int) -> Iterator[Batch]:
        """This process's micro-batches from step `start` (from 0) on, without end: `accumulate` of them a step."""
        ...

    def test(self) -> Iterator[Batch]:
        """This process's part of the test images, once."""
        ...

    def close(self) -> None:
        """End all loader processes."""
        ...


class ResidentLoader:
    """The whole data set on the device."""

    def __init__(self, arrays: Arrays, order: Order, share: Share, device: torch.device, crop: int = 0, flip: bool = False) -> None:
        self.order, self.share, self.device, self.crop, self.flip = order, share, device, crop, flip
        self.skipped = 0
        self._train = arrays.train_NCHW.to(device), arrays.train_labels.to(device)
        mine = slice(share.rank, None, share.world)
        self._test = arrays.test_NCHW[mine].to(device), arrays.test_labels[mine].to(device)
        self._mean, self._std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (arrays.mean, arrays.std))
        self._generator = torch.Generator(device=device)

    def train(self, start: int) -> Iterator[Batch]:
        images, labels = self._train
        step = start
        while True:
            chosen = self.order.indices(step)
            dx_dy_B3 = self._draws(step, len(chosen), self.order.seed)
            for rows in self.share.micro_batches(torch.arange(len(chosen))):
                index = chosen[rows].to(self.device, non_blocking=True)
                x = images[index]
                if self.crop or self.flip:
                    x = crop_and_flip(x, dx_dy_B3[rows.to(self.device)], self.crop)
                yield {"image": self._normalised(x), "label": labels[index]}
            step += 1

    def _draws(self, step: int, batch: int, seed: int) -> Tensor:
        """For each image of a step: how far to move it down and right, and whether to mirror it. The same on all processes."""
        self._generator.manual_seed(mix(seed, step, 1))
        draws = torch.randint(2 * self.crop + 1, (batch, 3), generator=self._generator, device=self.device)
        draws[:, 2] = torch.randint(2 if self.flip else 1, (batch,), generator=self._generator, device=self.device)
        return draws

    def test(self) -> Iterator[Batch]:
        images, labels = self._test
        for x, y in zip(images.split(1000), labels.split(1000), strict=True):
            yield {"image": self._normalised(x), "label": y}

    def _normalised(self, x: Tensor) -> Tensor:
        return (x.float() - self._mean) / self._std

    def close(self) -> None:
        pass


def crop_and_flip(x_BCHW: Tensor, draws_B3: Tensor, pad: int) -> Tensor:
    """Each image padded by `pad` zeros, cut back to its size at its own offset (first two draws), mirrored where the third is 1."""
    batch, channels, height, width = x_BCHW.shape
    padded = torch.nn.functional.pad(x_BCHW, (pad, pad, pad, pad))
    device = x_BCHW.device
    row_BH = torch.arange(height, device=device) + draws_B3[:, :1]
    column_W = torch.arange(width, device=device)
    column_BW = torch.where(draws_B3[:, 2:] == 1, width - 1 - column_W, column_W) + draws_B3[:, 1:2]
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    c = torch.arange(channels, device=device).view(1, -1, 1, 1)
    return padded[b, c, row_BH.view(batch, 1, height, 1), column_BW.view(batch, 1, 1, width)]
