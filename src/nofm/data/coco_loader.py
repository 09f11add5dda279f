"""Batches of images and their objects, with the protocol of `loader.Loader`.

A batch is {"image": [(3, H, W) from 0 to 1, ...], "target": [{"boxes": (N, 4), "labels": (N,), ...}, ...]}, images each of their own
size: the network resizes them itself, and gives boxes back in the pixels that it was given. Tests are images as they are, with all that
COCO's metric asks for: "area", "iscrowd", and "index", the image's number. Training leaves crowds out.

What is in memory (`resident`) is decoded once, images and masks kept as bytes on the device and augmented there, by this process; else
files are read by `workers` processes. Either way an image's augmentation is a function of (seed, epoch, image).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from .coco import CocoImage, CocoSet, read_pixels
from .errors import DataError
from .order import Order, Share, mix
from .processes import TEST, ProcessLoader, ProcessTests, first_readable, seeded

__all__ = ["Augment", "CocoLoader", "CocoTests", "Target", "read_example"]

Target: TypeAlias = dict[str, Tensor]
Example: TypeAlias = tuple[Tensor, Target]

_GREY = 124, 116, 104  # the mean of photographs, around an image that was made smaller


@dataclass(frozen=True, slots=True)
class Augment:
    """`flip`: mirror half of the images. `scale`: resize by a factor from this range and cut or pad back to the old size."""

    flip: bool = True
    scale: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        low, high = self.scale
        if not 0 < low <= high:
            raise DataError(f"data.scale_jitter = {low} {high}: must be two factors, 0 < lowest <= highest")

    def __call__(self, image: Tensor, target: Target) -> Example:
        """Draws from torch's global generator."""
        size = list(image.shape[-2:])
        steps: list[Any] = [v2.RandomHorizontalFlip()] if self.flip else []
        if self.scale != (1.0, 1.0):
            steps.append(v2.ScaleJitter(size, self.scale))
            steps.append(v2.RandomCrop(size, pad_if_needed=True, fill={tv_tensors.Image: _GREY, "others": 0}))
        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)
        wrapped = target | {"boxes": boxes} | ({"masks": tv_tensors.Mask(target["masks"])} if "masks" in target else {})
        steps += [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=1)]
        image, wrapped = v2.Compose(steps)(tv_tensors.Image(image), wrapped)
        found = {name: value.as_subclass(Tensor) for name, value in wrapped.items()}
        if "masks" in found:  # of a thin object, what the cut has left may lie in the box's corner only
            seen = (found["masks"] != 0).flatten(1).any(1)  # on the device of resident images, whose boxes stay with the host
            found = {name: value[seen.to(value.device)] if name in ("boxes", "labels", "masks") else value for name, value in found.items()}
        return image.as_subclass(Tensor), found


def read_example(image: CocoImage, index: int, has_masks: bool) -> Example:
    """Bytes (3, H, W), and all its objects."""
    pixels = torch.from_numpy(read_pixels(image).copy()).permute(2, 0, 1).contiguous()
    target = {
        "boxes": torch.tensor(image.boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(image.labels, dtype=torch.int64),
        "area": torch.tensor(image.areas, dtype=torch.float64),
        "iscrowd": torch.tensor(image.crowds, dtype=torch.int64),
        "index": torch.tensor(index),
    }
    if has_masks:
        target["masks"] = torch.from_numpy(image.masks().astype(np.uint8))
    return pixels, target


def _without_crowds(target: Target) -> Target:
    own = target["iscrowd"] == 0
    return {name: target[name][own] for name in ("boxes", "labels", "masks") if name in target}


class _Examples(Dataset[dict[str, Any]]):
    """Reads (epoch, index), from files or from what is kept."""

    def __init__(self, train: CocoSet, test: CocoSet, augment: Augment, seed: int, skip: bool) -> None:
        self._sets, self._augment, self._seed, self._skip = {True: train, False: test}, augment, seed, skip
        self._kept: dict[tuple[bool, int], Example | DataError] = {}

    def keep(self, training: bool, indices: Iterator[int] | range, device: torch.device) -> None:
        """Decode these images now, for good."""
        for index in indices:
            try:
                pixels, target = read_example(self._sets[training].images[index], index, self._sets[training].has_masks)
            except DataError as error:
                if not self._skip:
                    raise
                self._kept[training, index] = error
            else:
                # Boxes and labels stay with the host: a few numbers, whose augmentation would make it wait for the device again and again.
                kept = {name: value.to(device) if name == "masks" else value for name, value in target.items()}
                self._kept[training, index] = pixels.to(device), kept

    def _read(self, training: bool, index: int) -> Example:
        kept = self._kept.get((training, index))
        if kept is None:
            return read_example(self._sets[training].images[index], index, self._sets[training].has_masks)
        if isinstance(kept, DataError):
            raise kept
        return kept

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        images = self._sets[epoch != TEST]
        nothing = f"{images.path}: no image of this data set can be read"
        return first_readable(partial(self._sample, epoch), index, len(images), self._skip, nothing)

    def _sample(self, epoch: int, at: int) -> dict[str, Any]:
        image, target = self._read(epoch != TEST, at)
        if epoch != TEST:
            with seeded(mix(self._seed, epoch, at)):
                image, target = self._augment(image, _without_crowds(target))
        return {"image": image.float() / 255, "target": target}


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"image": [s["image"] for s in samples], "target": [s["target"] for s in samples]}


class CocoLoader(ProcessLoader):
    """Images of `train`, whose number `order` must know, and of `test`. `skipped` counts images passed by and annotations left out."""

    def __init__(
        self,
        train: CocoSet,
        test: CocoSet,
        order: Order,
        share: Share | None = None,
        augment: Augment | None = None,
        *,
        device: torch.device | None = None,
        resident: bool = False,
        workers: int = 0,
        pin: bool = False,
        skip: bool = False,
    ) -> None:
        """`device` is where resident images lie. Images from files come on the CPU."""
        train.check_same_categories(test)
        assert order.size == len(train), "an order is over the images that are trained on"
        share, examples = share or Share(), _Examples(train, test, augment or Augment(), order.seed, skip)
        together = order.batch // (share.world * share.accumulate)
        super().__init__(examples, _collate, order, share, len(test), together, 0 if resident else workers, pin and not resident)
        self.skipped, self.names = len(train.dropped), train.names
        if resident:
            device = device or torch.device("cpu")
            examples.keep(True, range(len(train)), device)
            examples.keep(False, self._mine, device)


class CocoTests(ProcessTests):
    """Images of `test` alone, `batch` at a time."""

    def __init__(self, test: CocoSet, batch: int, *, workers: int = 0, pin: bool = False, skip: bool = False) -> None:
        super().__init__(_Examples(test, test, Augment(), 0, skip), _collate, Share(), len(test), batch, workers, pin)
        self.skipped, self.names = len(test.dropped), test.names
