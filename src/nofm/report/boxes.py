"""Detections as pictures: boxes with names and scores, masks laid over the image, what was found beside what is there.

numpy and Pillow only. A colour stands for a category; where there is one category only, neighbouring objects differ in colour, so that
one mask can be told from the next. Small images are enlarged until a name can be read.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .sheet import side_by_side

__all__ = ["ObjectsLike", "colour_of", "detection_sheet", "draw_detection", "draw_objects"]

_READABLE = 480  # pixels of width from which names can be read
_COVER = 0.45  # how much of the image a mask hides
_GOLDEN = 0.618034  # steps of this size around the colour wheel never come close to each other soon


class ObjectsLike(Protocol):
    """Objects of one image: boxes (N, 4) left, top, right, bottom; labels (N,), from 1; scores (N,), masks (N, H, W) or None."""

    @property
    def boxes(self) -> NDArray[Any]: ...
    @property
    def labels(self) -> NDArray[Any]: ...
    @property
    def scores(self) -> NDArray[Any] | None: ...
    @property
    def masks(self) -> NDArray[Any] | None: ...


def colour_of(number: int) -> tuple[int, int, int]:
    """A strong colour for each number from 0 on."""
    red, green, blue = colorsys.hsv_to_rgb((0.02 + number * _GOLDEN) % 1, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_objects(image_HW3: NDArray[np.uint8], objects: ObjectsLike, names: Sequence[str], least_score: float = 0.0) -> NDArray[np.uint8]:
    """The image with its objects, enlarged by a whole number if it is small. `names[label]`; `names[0]` is the background."""
    from PIL import Image, ImageDraw, ImageFont

    if image_HW3.ndim != 3 or image_HW3.shape[2] != 3:
        raise ValueError(f"an image is (height, width, 3), not {image_HW3.shape}")
    height, width = image_HW3.shape[:2]
    if objects.masks is not None and objects.masks.shape != (len(objects.boxes), height, width):
        raise ValueError(f"masks of {objects.masks.shape} do not fit {len(objects.boxes)} boxes in an image of {(height, width)}")
    chosen = [i for i in range(len(objects.boxes)) if objects.scores is None or objects.scores[i] >= least_score]
    colours = {i: colour_of(i if len(names) <= 2 else int(objects.labels[i]) - 1) for i in chosen}
    shown = _cover(image_HW3, objects.masks, colours)
    times = max(1, -(-_READABLE // width))
    sheet = Image.fromarray(shown).resize((times * width, times * height), Image.Resampling.NEAREST)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for i in reversed(chosen):  # the surest comes last, on top
        box = [times * float(side) for side in objects.boxes[i]]
        pen.rectangle((box[0], box[1], max(box[2] - 1, box[0]), max(box[3] - 1, box[1])), outline=colours[i], width=2)
        name = "" if len(names) <= 2 else names[int(objects.labels[i])]
        score = "" if objects.scores is None else f"{objects.scores[i]:.2f}"
        if said := f"{name} {score}".strip():
            at = max(0.0, box[0]), max(0.0, box[1] - 13)
            pen.rectangle(pen.textbbox(at, said, font=font), fill=colours[i])
            pen.text(at, said, fill="black" if _brightness(colours[i]) > 110 else "white", font=font)
    return np.asarray(sheet)


def _brightness(colour: tuple[int, int, int]) -> float:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _cover(image_HW3: NDArray[np.uint8], masks: NDArray[Any] | None, colours: dict[int, tuple[int, int, int]]) -> NDArray[np.uint8]:
    shown = image_HW3.astype(np.float32)
    if masks is not None:
        for i in reversed(list(colours)):
            inside = masks[i].astype(bool)
            shown[inside] = (1 - _COVER) * image_HW3[inside] + _COVER * np.array(colours[i], np.float32)
    return shown.round().astype(np.uint8)


def detection_sheet(
    image_HW3: NDArray[np.uint8],
    predictions: Mapping[str, ObjectsLike],
    truth: ObjectsLike,
    names: Sequence[str],
    least_score: float = 0.5,
) -> Any:
    """A picture: each named prediction, without what is less sure than `least_score`, and the truth, side by side."""
    parts = {}
    for name, found in predictions.items():
        count = len(found.boxes) if found.scores is None else int((found.scores >= least_score).sum())
        parts[f"{name}: {count} found, score {least_score:g} or more"] = draw_objects(image_HW3, found, names, least_score)
    parts[f"truth: {len(truth.boxes)}"] = draw_objects(image_HW3, truth, names)
    return side_by_side(parts)


def draw_detection(
    path: str | Path,
    image_HW3: NDArray[np.uint8],
    predictions: Mapping[str, ObjectsLike],
    truth: ObjectsLike,
    names: Sequence[str],
    least_score: float = 0.5,
) -> None:
    """Write `detection_sheet` as a PNG."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    detection_sheet(image_HW3, predictions, truth, names, least_score).save(path)
