"""Batches for training and testing, from one of two loaders.

`ResidentLoader` keeps a small data set on the device as bytes and crops and mirrors there, each image by its own draw: no process,
no copy. `WorkerLoader` reads images one by one in loader processes. A batch is {"image": (B, C, H, W) floats, "label": (B,)}.

A loader works in two moves: `keys` says what is in a micro-batch, which is the host's work; `make` turns that into the batch on the
device, which is always the same work and so can be part of a CUDA graph. Where batches come whole, the key is the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from .arrays import Arrays
from .order import Order, Share, Steps, mix

__all__ = ["Batch", "Loader", "ResidentLoader", "Tests", "batches", "crop_and_flip"]

Batch: TypeAlias = dict[str, Tensor]


class Tests(Protocol):
    """What the engine needs of data to measure on."""

    skipped: int  # images, pairs, ... that could not be read or used and were passed by, so far

    def test(self) -> Iterator[Batch]:
        """This process's part of the test images, once."""
        ...

    def close(self) -> None:
        """End all loader processes."""
        ...


class Loader(Tests, Protocol):
    """What the engine needs of a loader to train."""

    @property
    def order(self) -> Steps: ...

    def keys(self, start: int) -> Iterator[Batch]:
        """What this process's micro-batches hold, from step `start` (from 0) on, without end: `accumulate` of them a step."""
        ...

    def make(self, key: Batch) -> Batch:
        """The micro-batch of a key, on the key's device. Reads no value of a tensor."""
        ...


def batches(loader: Loader, start: int) -> Iterator[Batch]:
    """The micro-batches themselves, from step `start` on."""
    return map(loader.make, loader.keys(start))


class ResidentLoader:
    """The whole data set on the device."""

    names: tuple[str, ...] = ()  # of the classes, where files have them

    def __init__(self, arrays: Arrays, order: Order, share: Share, device: torch.device, crop: int = 0, flip: bool = False) -> None:
        self.order, self.share, self.device, self.crop, self.flip = order, share, device, crop, flip
        self.skipped = 0
        self._train = arrays.train_NCHW.to(device), arrays.train_labels.to(device)
        mine = slice(share.rank, None, share.world)
        self._test = arrays.test_NCHW[mine].to(device), arrays.test_labels[mine].to(device)
        self._mean, self._std = (torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (arrays.mean, arrays.std))
        self._generator = torch.Generator(device=device)

    def keys(self, start: int) -> Iterator[Batch]:
        per_epoch, batch = self.order.steps_per_epoch, self.order.batch
        step, drawn_for = start, -1
        while True:
            epoch, position = divmod(step, per_epoch)
            if epoch != drawn_for:  # a whole epoch at once: the host then only cuts pieces off
                key_E4, drawn_for = self._draws(epoch), epoch
            for part in self.share.micro_batches(key_E4[position * batch : (position + 1) * batch]):
                yield {"key": part}
            step += 1

    def _draws(self, epoch: int) -> Tensor:
        """For each image of an epoch, in order: its index, how far to move it down and right, whether to mirror it. The same on
        all processes."""
        order = self.order.epoch_indices(epoch)
        self._generator.manual_seed(mix(self.order.seed, epoch, 1))
        key_E4 = torch.randint(2 * self.crop + 1, (len(order), 4), generator=self._generator, device=self.device)
        key_E4[:, 3] = torch.randint(2 if self.flip else 1, (len(order),), generator=self._generator, device=self.device)
        key_E4[:, 0] = order.to(self.device, non_blocking=True)
        return key_E4

    def make(self, key: Batch) -> Batch:
        index, draws_B3 = key["key"][:, 0], key["key"][:, 1:]
        images, labels = self._train
        x = images[index]
        if self.crop or self.flip:
            x = crop_and_flip(x, draws_B3, self.crop)
        return {"image": self._normalised(x), "label": labels[index]}

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
