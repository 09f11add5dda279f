"""Images read one by one in loader processes: a folder of classes as ImageNet is laid out, or an in-memory set read the same way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from .arrays import Arrays
from .errors import DataError
from .order import Order, Share, mix
from .pictures import open_rgb, picture_files
from .processes import TEST, ProcessLoader, ProcessTests, first_readable, seeded

__all__ = ["ArrayImages", "FolderImages", "FolderTests", "WorkerLoader", "WorkerTests", "as_arrays", "centre"]

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ArrayImages:
    """The images of an in-memory set, with torchvision's augmentation."""

    names: tuple[str, ...] = ()  # its classes are numbers

    def __init__(self, arrays: Arrays, crop: int, flip: bool) -> None:
        self.train_size, self.test_size, self.classes = len(arrays.train_labels), len(arrays.test_labels), arrays.classes
        self._arrays = arrays
        side = list(arrays.train_NCHW.shape[-2:])
        finish = [v2.ToDtype(torch.float32), v2.Normalize(arrays.mean, arrays.std)]
        augment: list[Any] = [v2.RandomCrop(side, padding=crop)] if crop else []
        augment += [v2.RandomHorizontalFlip()] if flip else []
        self._finish, self._augment = v2.Compose(finish), v2.Compose([*augment, *finish])

    def read(self, index: int, training: bool) -> tuple[Tensor, int]:
        a = self._arrays
        images, labels = (a.train_NCHW, a.train_labels) if training else (a.test_NCHW, a.test_labels)
        return (self._augment if training else self._finish)(images[index]), int(labels[index])


class FolderImages:
    """ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg, as ImageNet is laid out; classes are numbered by name."""

    def __init__(self, root: str, size: int, flip: bool) -> None:
        self._train, names = _images(Path(root, "train"))
        self._test, test_names = _images(Path(root, "val"))
        if missing := sorted(set(test_names) ^ set(names)):
            raise DataError(f"{root}: class {missing[0]!r} is in only one of train/ and val/ ({len(missing)} such classes)")
        self.train_size, self.test_size, self.classes = len(self._train), len(self._test), len(names)
        self.names = tuple(names)
        augment = [v2.RandomResizedCrop(size), *([v2.RandomHorizontalFlip()] if flip else [])]
        self._augment, self._finish = v2.Compose([*augment, *_NORMALISED]), centre(size)

    def read(self, index: int, training: bool) -> tuple[Tensor, int]:
        path, label = (self._train if training else self._test)[index]
        return (self._augment if training else self._finish)(open_rgb(path, "this image")), label


class FolderTests:
    """ROOT/val/CLASS/*.jpg alone, for a network that knows the classes `names`; some of them may have no folder."""

    def __init__(self, root: str, names: Sequence[str], finish: v2.Transform) -> None:
        found, folders = _images(Path(root, "val"))
        if unknown := [name for name in folders if name not in names]:
            known = f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            raise DataError(f"{Path(root, 'val', unknown[0])}: the network has no class {unknown[0]!r}; it has {known}")
        self._test, self.test_size, self._finish = [(path, names.index(folders[i])) for path, i in found], len(found), finish
        self.names = tuple(names)

    def read(self, index: int, training: bool) -> tuple[Tensor, int]:
        path, label = self._test[index]
        return self._finish(open_rgb(path, "this image")), label


_NORMALISED = v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)


def as_arrays(side: int, mean: Sequence[float], std: Sequence[float]) -> v2.Transform:
    """How a network that was trained on small images in memory sees others: whole, at their size, normalised as they were."""
    return v2.Compose([v2.Resize((side, side)), v2.PILToTensor(), v2.ToDtype(torch.float32), v2.Normalize(list(mean), list(std))])


def centre(size: int) -> v2.Transform:
    """How a network that was trained on a folder of images sees those that it is measured on."""
    return v2.Compose([v2.Resize(round(size / 0.875)), v2.CenterCrop(size), *_NORMALISED])


def _images(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    found = []
    for label, name in enumerate(names):
        paths = sorted(map(str, picture_files(Path(folder, name))))
        if not paths:
            raise DataError(f"{folder / name}: this class has no image")
        found += [(path, label) for path in paths]
    if not found:
        raise DataError(f"{folder}: no CLASS folders with images in it")
    return found, names


class _Samples(Dataset[dict[str, Any]]):
    """Reads (epoch, index)."""

    def __init__(self, images: ArrayImages | FolderImages | FolderTests, seed: int, skip: bool) -> None:
        self._images, self._seed, self._skip = images, seed, skip
        self._train_size = 0 if isinstance(images, FolderTests) else images.train_size

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        size = self._images.test_size if epoch == TEST else self._train_size
        return first_readable(partial(self._sample, epoch), index, size, self._skip, "no image of this data set can be read")

    def _sample(self, epoch: int, at: int) -> dict[str, Any]:
        with seeded(mix(self._seed, epoch, at)):
            image, label = self._images.read(at, epoch != TEST)
        return {"image": image, "label": label}


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"image": torch.stack([s["image"] for s in samples]), "label": torch.tensor([s["label"] for s in samples])}


class WorkerLoader(ProcessLoader):
    """Images and labels."""

    def __init__(self, images: ArrayImages | FolderImages, order: Order, share: Share, workers: int, pin: bool, skip: bool) -> None:
        samples = _Samples(images, order.seed, skip)
        super().__init__(samples, _collate, order, share, images.test_size, min(256, order.batch // share.world), workers, pin)
        self.names = images.names


class WorkerTests(ProcessTests):
    """Images and labels to be measured, in batches as a `WorkerLoader` of steps of `batch` images has them."""

    def __init__(self, images: ArrayImages | FolderTests, batch: int, workers: int, pin: bool, skip: bool) -> None:
        super().__init__(_Samples(images, 0, skip), _collate, Share(), images.test_size, min(256, batch), workers, pin)
        self.names = images.names
