"""Masks as COCO writes them: runs of pixels, as numbers or packed into text, and polygons. numpy only.

Runs go down the columns, first of background, then of object, and so on in turn. Polygons are filled as COCO's own tools fill them, pixel
for pixel, or a mask mAP of ours would not be comparable with anybody's: outlines are walked on a grid five times as fine, and a column
changes between inside and outside where they cross its middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MaskError", "check_segmentation", "decode", "decode_runs", "fill_polygon", "runs_of", "unpack_runs"]

_FINER = 5


class MaskError(ValueError):
    """What is wrong with a segmentation; whose it is only the caller knows."""


# ---- runs ----


def unpack_runs(text: str | bytes) -> NDArray[np.int64]:
    """The lengths of the runs that `text` holds.

    Each is written in characters from "0" on, five bits a character and the lowest first; a sixth bit says that more follow, and the
    highest of the five is the sign. From the fourth on they are differences to the one before the last, which has the same colour.
    """
    try:
        raw = np.frombuffer(text.encode("ascii") if isinstance(text, str) else text, np.uint8).astype(np.int64) - 48
    except UnicodeEncodeError:
        raise MaskError("its packed runs have characters that are none of COCO's") from None
    if raw.size == 0:
        return np.zeros(0, np.int64)
    if raw.min() < 0 or raw.max() > 63:
        raise MaskError("its packed runs have characters that are none of COCO's")
    last = np.flatnonzero(raw < 32)
    if last.size == 0 or last[-1] != raw.size - 1:
        raise MaskError("its packed runs end in the middle of a number")
    first = np.concatenate(([0], last[:-1] + 1))
    digits = last - first + 1
    if digits.max() > 8:
        raise MaskError("its packed runs have a number that is too long")
    place = np.arange(raw.size) - np.repeat(first, digits)
    value = np.add.reduceat((raw & 31) << (5 * place), first)
    value = np.where(raw[last] & 16, value - (1 << (5 * digits)), value)
    value[1::2], value[2::2] = value[1::2].cumsum(), value[2::2].cumsum()
    return value


def runs_of(rle: dict[str, Any]) -> NDArray[np.int64]:
    """The runs of {"size": [height, width], "counts": numbers or text}, which must fill its size."""
    try:
        height, width = map(int, rle["size"])
        counts = rle["counts"]
    except (KeyError, TypeError, ValueError):
        raise MaskError('its runs need {"size": [height, width], "counts": ...}') from None
    if isinstance(counts, str | bytes):
        runs = unpack_runs(counts)
    else:
        try:
            runs = np.asarray(counts, np.int64).reshape(-1)
        except (TypeError, ValueError, OverflowError):
            raise MaskError("its runs are no list of numbers") from None
    if (runs < 0).any():
        raise MaskError("it has a run of negative length")
    if runs.sum() != height * width:
        raise MaskError(f"its runs cover {runs.sum()} pixels, but its size is {height}x{width} = {height * width}")
    return runs


def decode_runs(rle: dict[str, Any]) -> NDArray[np.bool_]:
    """The mask (height, width)."""
    runs = runs_of(rle)
    height, width = map(int, rle["size"])
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(width, height).T


# ---- polygons ----


def fill_polygon(xy: Sequence[float], height: int, width: int) -> NDArray[np.bool_]:
    """The mask (height, width) of the polygon x0, y0, x1, y1, ..., where pixel (0, 0) is a square from 0 to 1."""
    corner_P2 = np.trunc(_FINER * np.asarray(xy, np.float64).reshape(-1, 2) + 0.5).astype(np.int64)
    path = np.concatenate([_walk(a, b) for a, b in zip(corner_P2, np.roll(corner_P2, -1, 0), strict=True)])
    x, y = path.T
    crossing = np.flatnonzero(x[1:] != x[:-1])  # the outline goes from one fine column to the next
    fine_column, fine_row = (np.minimum(v[1:], v[:-1])[crossing] for v in (x, y))
    column = (fine_column + 0.5) / _FINER - 0.5
    middle = (column == np.floor(column)) & (column >= 0) & (column <= width - 1)
    row = np.ceil(np.clip((fine_row[middle] + 0.5) / _FINER - 0.5, 0, height)).astype(np.int64)
    # Every crossing turns the rest of the image, column by column, inside out; where two meet, nothing has happened.
    turns = np.bincount(column[middle].astype(np.int64) * height + row, minlength=height * width + 1)
    return (np.cumsum(turns[: height * width]) % 2 == 1).reshape(width, height).T


def _walk(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """The grid points (x, y) on the way, one for each step along the longer side. Either direction takes the same points."""
    moved = np.abs(end - start)
    long = 0 if moved[0] >= moved[1] else 1
    if moved[long] == 0:
        return start[None]
    backwards = start[long] > end[long]
    low, high = (end, start) if backwards else (start, end)
    t = np.arange(moved[long] + 1)
    slope = (high[1 - long] - low[1 - long]) / moved[long]
    points = np.empty((len(t), 2), np.int64)
    points[:, long] = low[long] + t
    points[:, 1 - long] = np.trunc(low[1 - long] + slope * t + 0.5)
    return points[::-1] if backwards else points


# ---- either ----


def check_segmentation(segmentation: Any, height: int, width: int) -> None:
    """Raise `MaskError` if it cannot be decoded, is empty, or is for an image of another size."""
    if isinstance(segmentation, dict):
        runs = runs_of(segmentation)
        if [int(side) for side in segmentation["size"]] != [height, width]:
            raise MaskError(f"its runs are for an image of {segmentation['size']} (height, width), not {[height, width]}")
        if runs[1::2].sum() == 0:
            raise MaskError("its mask is empty")
        return
    if not isinstance(segmentation, list) or not segmentation:
        raise MaskError("it has no segmentation, which instance segmentation learns from")
    for polygon in segmentation:
        try:
            numbers = np.asarray(polygon, np.float64)
        except (TypeError, ValueError):
            raise MaskError("its polygon is no list of numbers") from None
        if numbers.ndim != 1 or len(numbers) < 6 or len(numbers) % 2:
            raise MaskError(f"its polygon has {numbers.size} numbers; at least three corners x, y are needed")
        if not np.isfinite(numbers).all():
            raise MaskError("its polygon has a corner that is no number")
        if np.abs(numbers).max() > 1e6:
            raise MaskError(f"its polygon has a corner at {numbers[np.abs(numbers).argmax()]:g}, far outside of the image")


def decode(segmentation: Any, height: int, width: int) -> NDArray[np.bool_]:
    """The mask (height, width) of runs, or of one or several polygons together."""
    if isinstance(segmentation, dict):
        return decode_runs(segmentation)
    mask = np.zeros((height, width), np.bool_)
    for polygon in segmentation:
        mask |= fill_polygon(polygon, height, width)
    return mask
