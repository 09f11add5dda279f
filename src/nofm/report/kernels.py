"""Kernel shapes from the masks that a run has saved, for the picture of the paper's appendix A.2.

The same counts as `nofm.analysis.shapes`, from the packed bits on disk and without torch; a test holds the two together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ReportError
from .read import Run

__all__ = ["SHOWN", "LayerShapes", "crowded", "last_masks", "read_masks", "read_shapes", "shapes_of"]

SHOWN = 6  # shapes drawn of a layer, as in the paper's figure


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """The shapes in one convolution. `top` has the most frequent: rows of kept positions, count, (input, output channel)."""

    layer: str
    pattern: str
    kernel: tuple[int, int]
    kernels: int
    distinct: int
    empty: int
    top: tuple[tuple[tuple[tuple[bool, ...], ...], int, tuple[int, int]], ...]


def last_masks(run: Run) -> Path | None:
    """The newest file of masks. One from beyond the last event that counts was written by a leg that a resume took back."""
    found = {}
    for path in (run.folder / "masks").glob("step-*.safetensors"):
        if match := re.fullmatch(r"step-(\d+)\.safetensors", path.name):
            found[int(match[1])] = path
    steps = [step for step in found if step <= run.last_step]
    return found[max(steps)] if steps else None


def read_shapes(path: Path, transposed: frozenset[str] = frozenset()) -> list[LayerShapes]:
    """The kernel shapes of every layer in a file of masks that is a two-dimensional convolution larger than 1x1."""
    return [shapes_of(*layer) for layer in read_masks(path, transposed)]


def read_masks(path: Path, transposed: frozenset[str] = frozenset()) -> Iterator[tuple[str, str, Any]]:
    """The layers that `read_shapes` is about, in the order of the network: name, pattern, and bits as (output, input, kh, kw).

    `transposed` names the layers whose weight is (input, output, kh, kw), as that of a transposed convolution is.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            shapes, patterns = (_table(path, metadata, key) for key in ("shapes", "patterns"))
            order = list(shapes)  # the file sorts names, its metadata has the order of the network
            for name in sorted(file.keys(), key=lambda name: order.index(name) if name in order else -1):
                shape = shapes.get(name)
                if not (isinstance(shape, list) and all(type(extent) is int and extent > 0 for extent in shape)):
                    raise ReportError(path, f"layer {name!r} has no shape in the metadata")
                if len(shape) == 4 and shape[2] * shape[3] > 1:
                    bits = _unpack(path, name, file.get_tensor(name), shape)
                    yield name, str(patterns.get(name, "")), bits.swapaxes(0, 1) if name in transposed else bits
    except SafetensorError as error:
        raise ReportError(path, f"not a readable safetensors file ({error})") from error


def _table(path: Path, metadata: dict[str, str], key: str) -> dict[str, Any]:
    try:
        table = json.loads(metadata[key])
    except (KeyError, ValueError) as error:
        raise ReportError(path, f'its metadata has no readable "{key}", so its bits cannot be read as masks') from error
    if not isinstance(table, dict):
        raise ReportError(path, f'"{key}" in its metadata is {type(table).__name__}, an object is expected')
    return table


def _unpack(path: Path, name: str, packed: Any, shape: list[int]) -> Any:
    """The bits of `nofm.masks.pack`: lowest first, in the order of the flattened index."""
    import numpy as np

    size = math.prod(shape)
    if packed.dtype != np.uint8 or packed.shape != (-(-size // 8),):
        raise ReportError(path, f"{name}: {-(-size // 8)} bytes are expected for shape {shape}, got {packed.shape} of {packed.dtype}")
    return np.unpackbits(packed, count=size, bitorder="little").reshape(shape)


def crowded(bits_OIKK: Any, n: int, m: int) -> Any:
    """Which weights are kept in a group of `m` that keeps more than `n`: a kernel that has one is one of `nofm.analysis.shapes.beyond`."""
    outputs, inputs, kh, kw = bits_OIKK.shape
    kept_OGMK = bits_OIKK.reshape(outputs, inputs // m, m, kh * kw) > 0
    return (kept_OGMK & (kept_OGMK.sum(axis=2, keepdims=True) > n)).reshape(bits_OIKK.shape)


def shapes_of(name: str, pattern: str, bits_OIKK: Any) -> LayerShapes:
    """The shapes of one layer's kernels."""
    import numpy as np

    outputs, inputs, kh, kw = bits_OIKK.shape
    bits_XK = bits_OIKK.reshape(outputs * inputs, kh * kw)
    if kh * kw < 63:  # a shape is a number then, and numbers sort much faster than rows
        _, first, counts = np.unique(bits_XK @ (1 << np.arange(kh * kw)), return_index=True, return_counts=True)
    else:
        _, first, counts = np.unique(bits_XK, axis=0, return_index=True, return_counts=True)
    order = sorted(range(len(first)), key=lambda i: (-counts[i], first[i]))
    top = tuple(
        (
            tuple(tuple(bool(bit) for bit in row) for row in bits_XK[first[i]].reshape(kh, kw)),
            int(counts[i]),
            (int(first[i]) % inputs, int(first[i]) // inputs),
        )
        for i in order[:SHOWN]
    )
    return LayerShapes(name, pattern, (kh, kw), outputs * inputs, len(first), int((~bits_XK.any(axis=1)).sum()), top)
