"""Images read one by one in loader processes: a folder of classes as ImageNet is laid out, or an in-memory set read the same way.

The sampler sends (epoch, index) to the processes, and an image's augmentation is drawn from (seed, epoch, index): which process
reads it, and whether the run was resumed in between, makes no difference.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import v2

from .arrays import Arrays
from .errors import DataError
from .loader import Batch
from .order import Order, Share, mix

__all__ = ["ArrayImages", "FolderImages", "WorkerLoader"]

_TEST = -1  # the "epoch" of a test image, which is not augmented
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


class ArrayImages:
    """The images of an in-memory set, with torchvision's augmentation."""

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
        finish = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD)]
        augment = [v2.RandomResizedCrop(size), *([v2.RandomHorizontalFlip()] if flip else [])]
        self._augment = v2.Compose([*augment, *finish])
        self._finish = v2.Compose([v2.Resize(round(size / 0.875)), v2.CenterCrop(size), *finish])

    def read(self, index: int, training: bool) -> tuple[Tensor, int]:
        from PIL import Image

        path, label = (self._train if training else self._test)[index]
        try:
            with warnings.catch_warnings(), Image.open(path) as picture:
                warnings.simplefilter("error", Image.DecompressionBombWarning)  # a bomb, not a photograph
                rgb = picture.convert("RGB")
        except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise DataError(f"{path}: this image cannot be read ({error}); mend or remove it, or set data.corrupt skip") from None
        return (self._augment if training else self._finish)(rgb), label


def _images(folder: Path) -> tuple[list[tuple[str, int]], list[str]]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    found = []
    for label, name in enumerate(names):
        paths = sorted(str(p) for p in Path(folder, name).rglob("*") if p.suffix.lower() in _SUFFIXES)
        if not paths:
            raise DataError(f"{folder / name}: this class has no image")
        found += [(path, label) for path in paths]
    if not found:
        raise DataError(f"{folder}: no CLASS folders with images in it")
    return found, names


class _Samples(Dataset[dict[str, Any]]):
    """Reads (epoch, index); what cannot be read comes back as text, since an error that crosses a process arrives as a traceback."""

    def __init__(self, images: ArrayImages | FolderImages, seed: int, skip: bool) -> None:
        self._images, self._seed, self._skip = images, seed, skip

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        epoch, index = key
        training = epoch != _TEST
        size = self._images.train_size if training else self._images.test_size
        before = torch.get_rng_state()
        try:
            for skipped in range(size):
                at = (index + skipped) % size  # the next readable one stands in
                torch.default_generator.manual_seed(mix(self._seed, epoch, at))
                try:
                    image, label = self._images.read(at, training)
                    return {"image": image, "label": label, "skipped": skipped}
                except DataError as error:
                    if not self._skip:
                        return {"error": str(error)}
            return {"error": "no image of this data set can be read"}
        finally:
            torch.set_rng_state(before)  # without loader processes this is the generator that dropout draws from


def _collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    if broken := [s["error"] for s in samples if "error" in s]:
        return {"error": broken[0]}
    return {
        "image": torch.stack([s["image"] for s in samples]),
        "label": torch.tensor([s["label"] for s in samples]),
        "skipped": sum(s["skipped"] for s in samples),
    }


class _Keys(Sampler[list[tuple[int, int]]]):
    def __init__(self, make: Callable[[], Iterator[list[tuple[int, int]]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._make()


def _in_worker(number: int) -> None:
    # A signal to the whole process group must reach the engine, which then ends its workers; a dead worker would end the engine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class WorkerLoader:
    """Batches put together by `workers` processes (0: by this one)."""

    def __init__(self, images: ArrayImages | FolderImages, order: Order, share: Share, workers: int, pin: bool, skip: bool) -> None:
        self.order, self.share = order, share
        self.skipped = 0
        self._images, self._workers, self._pin = images, workers, pin
        self._samples = _Samples(images, order.seed, skip)
        self._open: list[Any] = []

    def make(self, key: Batch) -> Batch:
        return key

    def keys(self, start: int) -> Iterator[Batch]:
        def keys() -> Iterator[list[tuple[int, int]]]:
            step = start
            while True:
                epoch = self.order.epoch(step)
                for indices in self.share.micro_batches(self.order.indices(step)):
                    yield [(epoch, index) for index in indices.tolist()]
                step += 1

        return self._batches(keys)

    def test(self) -> Iterator[Batch]:
        mine = range(self.share.rank, self._images.test_size, self.share.world)
        size = max(1, min(256, self.order.batch // self.share.world))

        def keys() -> Iterator[list[tuple[int, int]]]:
            for first in range(0, len(mine), size):
                yield [(_TEST, index) for index in mine[first : first + size]]

        return self._batches(keys)

    def _batches(self, keys: Callable[[], Iterator[list[tuple[int, int]]]]) -> Iterator[Batch]:
        loader = DataLoader(
            self._samples,
            batch_sampler=_Keys(keys),
            num_workers=self._workers,
            collate_fn=_collate,
            pin_memory=self._pin,
            worker_init_fn=_in_worker,
            generator=torch.Generator(),  # or it would draw a seed from the global one, once more in a resumed run
        )
        batches = iter(loader)
        self._open.append(batches)
        try:
            for batch in batches:
                if "error" in batch:
                    raise DataError(batch["error"])
                self.skipped += batch.pop("skipped")
                yield batch
        finally:
            self._open.remove(batches)
            _end(batches)

    def close(self) -> None:
        for batches in list(self._open):
            _end(batches)


def _end(batches: Any) -> None:
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()
