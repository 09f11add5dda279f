"""CIFAR-10 as torchvision keeps it, to the .bin files that nofm reads: it opens no pickles; torchvision checks that these are known ones.

python examples/cifar10_bin.py TORCHVISION_ROOT CIFAR      # then: nofm train cifar10/resnet20 --data.root CIFAR
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


def write(train: Any, test: Any, out: Path) -> None:
    """Five files of a fifth of `train` and one of `test`: a byte for the label, then 3,072 for the image, channel by channel."""
    out.mkdir(parents=True, exist_ok=True)
    images_NHWC, labels_N = np.asarray(train.data), np.asarray(train.targets)
    parts = [*zip(np.split(images_NHWC, 5), np.split(labels_N, 5), strict=True), (np.asarray(test.data), np.asarray(test.targets))]
    for name, (images, labels) in zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], parts, strict=True):
        rows = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        np.concatenate([labels[:, None].astype(np.uint8), rows], axis=1).tofile(out / f"{name}.bin")


if __name__ == "__main__":
    from torchvision.datasets import CIFAR10

    root, out = map(Path, sys.argv[1:3])
    write(CIFAR10(root, train=True), CIFAR10(root, train=False), out)
    print(out)
