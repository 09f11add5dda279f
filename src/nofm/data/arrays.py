"""Small data sets that fit in memory as one tensor: digits, Fashion-MNIST, CIFAR-10. Files are read whole and checked, never unpickled."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .errors import DataError

__all__ = ["ARRAYS", "CIFAR_CLASSES", "CIFAR_MEAN", "CIFAR_STD", "Arrays", "read_arrays"]


@dataclass(frozen=True, slots=True)
class Arrays:
    """Images as bytes (N, C, H, W) and labels; networks see (byte - mean) / std of each channel."""

    train_NCHW: Tensor
    train_labels: Tensor
    test_NCHW: Tensor
    test_labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int = 10
    neighbours_alike: bool = False
    """Training images stand in an order, by whose hand they are for example."""

    def __post_init__(self) -> None:
        for images, labels, what in (
            (self.train_NCHW, self.train_labels, "training"),
            (self.test_NCHW, self.test_labels, "test"),
        ):
            if len(images) != len(labels):
                raise DataError(f"{len(images)} {what} images have {len(labels)} labels")
            if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
                raise DataError(f"{what} labels run from {int(labels.min())} to {int(labels.max())}, expected 0 to {self.classes - 1}")

    def holding_out(self, count: int) -> Arrays:
        """These, but `count` training images are those to test by: options that were chosen by them have not seen the others.

        They are the last ones. Where neighbours are alike the last are of a kind that training has not seen, which test images are not, so
        there they are evenly spaced.
        """
        total = len(self.train_labels)
        if count >= total:
            raise DataError(f"data.held_out = {count}: leaves nothing to train on of {total} training images")
        held = torch.zeros(total, dtype=torch.bool)
        held[torch.arange(count) * total // count if self.neighbours_alike else slice(total - count, None)] = True
        return replace(
            self,
            train_NCHW=self.train_NCHW[~held],
            train_labels=self.train_labels[~held],
            test_NCHW=self.train_NCHW[held],
            test_labels=self.train_labels[held],
        )


@lru_cache(maxsize=1)  # runs that share a process mostly share their data, and nothing writes into it
def read_arrays(name: str, root: str | None) -> Arrays:
    """Read a data set by name."""
    return ARRAYS[name](Path(root or "."))


def _digits(root: Path) -> Arrays:
    """1,797 handwritten 8x8 digits from scikit-learn, in the order of their writers; every fifth is a test image."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("data.name = digits: the digits come with scikit-learn; pip install scikit-learn") from None

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.uint8)[:, None]
    y = torch.tensor(data.target, dtype=torch.int64)
    test = torch.arange(len(y)) % 5 == 0
    return Arrays(x[~test], y[~test], x[test], y[test], mean=(4.8,), std=(16.0,), neighbours_alike=True)


def _fashion(root: Path) -> Arrays:
    """70,000 28x28 pictures of clothes, in the idx files of MNIST, gzipped or not."""
    parts = [
        _idx(root, f"{part}-{kind}-ubyte", dims) for part in ("train", "t10k") for kind, dims in (("images-idx3", 3), ("labels-idx1", 1))
    ]
    x, y, x_test, y_test = parts
    return Arrays(x[:, None], y.long(), x_test[:, None], y_test.long(), mean=(72.9,), std=(90.0,))


def _idx(root: Path, name: str, dims: int) -> Tensor:
    path = next((p for p in (root / name, root / f"{name}.gz") if p.is_file()), None)
    if path is None:
        raise DataError(f"{root}: there is no {name} or {name}.gz; data.root must hold the four idx files of Fashion-MNIST")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims)]
    body = raw[4 + 4 * dims :]
    if raw[:4] != bytes((0, 0, 8, dims)) or len(body) != torch.Size(shape).numel():
        raise DataError(f"{path}: not an idx file of bytes in {dims} dimensions, or cut short")
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).view(shape)


CIFAR_MEAN, CIFAR_STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _cifar10(root: Path) -> Arrays:
    """60,000 32x32 colour photographs: six PNG sheets with JSON labels, or the binary version of the original site."""
    trains = [f"data_batch_{i}" for i in range(1, 6)]
    if (root / "test_batch.png").is_file():
        x, x_test = torch.cat([_sheet(root / f"{t}.png") for t in trains]), _sheet(root / "test_batch.png")
        y, y_test = _json_labels(root / "train_lables.json"), _json_labels(root / "test_lables.json")
        return Arrays(x, y, x_test, y_test, CIFAR_MEAN, CIFAR_STD)
    binary = next((p for p in (root, root / "cifar-10-batches-bin") if (p / "test_batch.bin").is_file()), None)
    if binary is None:
        raise DataError(
            f"{root}: no CIFAR-10 there; data.root must hold data_batch_1.png to 5, test_batch.png, train_lables.json and "
            "test_lables.json, or the .bin files of the binary version (the pickled Python version is not opened, for safety; "
            "examples/cifar10_bin.py writes what torchvision has of it as .bin files)"
        )
    pairs = [_records(binary / f"{t}.bin") for t in (*trains, "test_batch")]
    x, y = torch.cat([p[0] for p in pairs[:-1]]), torch.cat([p[1] for p in pairs[:-1]])
    return Arrays(x, y, *pairs[-1], CIFAR_MEAN, CIFAR_STD)


def _sheet(path: Path) -> Tensor:
    """A PNG whose rows are whole images, one after another: 1024 pixels a row, 32 x 32 RGB each."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if pixels.shape[1] != 1024:
        raise DataError(f"{path}: is {pixels.shape[1]} pixels wide; a sheet has one 32x32 image in each row of 1024")
    return torch.from_numpy(pixels.reshape(-1, 32, 32, 3).copy()).permute(0, 3, 1, 2).contiguous()


def _json_labels(path: Path) -> Tensor:
    try:
        return torch.tensor(json.loads(path.read_text()), dtype=torch.int64)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: no list of labels ({error})") from None


def _records(path: Path) -> tuple[Tensor, Tensor]:
    """The binary version: one byte of label and 3,072 of pixels (3 x 32 x 32) for each image."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if not raw or len(raw) % 3073:
        raise DataError(f"{path}: {len(raw)} bytes are not whole records of 3,073; the file is cut short")
    rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32).clone(), rows[:, 0].long()


ARRAYS: dict[str, Callable[[Path], Arrays]] = {"digits": _digits, "fashion": _fashion, "cifar10": _cifar10}
