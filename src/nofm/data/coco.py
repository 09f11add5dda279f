"""Objects in images, as COCO json lists them: boxes, categories and masks, looked over once, before anything is trained.

All that is wrong with a file is said with its image's and its annotation's id. What concerns the file as a whole (no such key, an id
twice) is always an error; one bad annotation is an error too, or with `corrupt="skip"` is left out and counted.

Layouts, each under one root, SPLIT being train, val or test:
  instances_SPLIT.json and images in SPLIT/, images/ or JPEGImages/
  annotations/instances_SPLIT2017.json and SPLIT2017/             as COCO 2017 is laid out
  SPLIT/_annotations.coco.json beside its images                  as Roboflow exports
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from .coco_masks import MaskError, check_segmentation, decode
from .errors import DataError
from .pictures import open_rgb

__all__ = ["CocoImage", "CocoSet", "find_coco", "read_coco", "read_pixels"]

Corrupt = Literal["error", "skip"]
_Found = TypeVar("_Found")

_FILES = (
    "instances_{0}.json",
    "annotations/instances_{0}.json",
    "annotations/instances_{0}2017.json",
    "annotations/{0}.json",
    "{0}/_annotations.coco.json",
)
_FOLDERS = ("{0}", "{0}2017", "images/{0}", "images/{0}2017", "images", "JPEGImages", "")


@dataclass(slots=True)
class CocoImage:
    """An image and its objects. Boxes are left, top, right, bottom in pixels; labels count from 1, since 0 is the background."""

    id: int
    path: str
    height: int
    width: int
    annotation_ids: list[int] = field(default_factory=list)
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    areas: list[float] = field(default_factory=list)
    crowds: list[bool] = field(default_factory=list)
    segmentations: list[Any] = field(default_factory=list)

    def masks(self) -> NDArray[np.bool_]:
        """(objects, height, width)."""
        masks = np.zeros((len(self.boxes), self.height, self.width), np.bool_)
        for mask, segmentation in zip(masks, self.segmentations, strict=True):
            mask[:] = decode(segmentation, self.height, self.width)
        return masks


@dataclass(frozen=True, slots=True)
class CocoSet:
    """One json file. `categories` are its names by COCO's id, in the order of the ids; `dropped` what was wrong and left out."""

    path: Path
    categories: dict[int, str]
    images: list[CocoImage]
    dropped: list[str]
    has_masks: bool

    def __len__(self) -> int:
        return len(self.images)

    @property
    def names(self) -> list[str]:
        """Of the labels: `names[0]` is the background."""
        return ["background", *self.categories.values()]

    def with_objects(self) -> CocoSet:
        """Without the images that have nothing to learn from: no object, or only crowds. This is what is trained on elsewhere, too."""
        kept = [image for image in self.images if not all(image.crowds)]
        if not kept:
            raise DataError(f"{self.path}: none of its {len(self)} images has an object; there is nothing to train on")
        return replace(self, images=kept)

    def check_same_categories(self, other: CocoSet) -> None:
        """Raise if labels would mean one thing here and another there."""
        if self.categories != other.categories:
            differs = sorted(set(self.categories.items()) ^ set(other.categories.items()))[0]
            raise DataError(
                f"{other.path}: its categories are not those of {self.path}; the first that differs is {differs[0]} {differs[1]!r}"
            )


# ---- finding ----


def find_coco(root: str | os.PathLike[str], split: str) -> Path:
    """The json file of a split."""
    known = [Path(root, name.format(split)) for name in _FILES]
    found = next((path for path in known if path.is_file()), None)
    if found is None:
        tried = ", ".join(name.format(split) for name in _FILES)
        raise DataError(f"{root}: no COCO file of the split {split!r} is there; looked for {tried}")
    return found


def _image_folder(root: Path, file: Path, split: str, first: str) -> Path:
    folders = [file.parent, *(root / name.format(split) for name in _FOLDERS)]
    return next((folder for folder in folders if (folder / first).is_file()), root / split)


# ---- reading ----


def read_coco(root: str | os.PathLike[str], split: str, *, masks: bool = False, corrupt: Corrupt = "error") -> CocoSet:
    """The images and objects of a split. With `masks`, every object must have one that can be decoded."""
    file = find_coco(root, split)
    content = _load(file)
    categories = {id: str(row.get("name", id)) for id, row in _by_id(file, content, "category", "categories").items()}
    categories = dict(sorted(categories.items()))
    rows = _by_id(file, content, "image", "images")
    names = [_checked_image(file, id, row) for id, row in rows.items()]
    folder = _image_folder(Path(root), file, split, names[0])
    images = {id: CocoImage(id, str(folder / name), rows[id]["height"], rows[id]["width"]) for id, name in zip(rows, names, strict=True)}
    label_of = {id: label for label, id in enumerate(categories, start=1)}
    dropped: list[str] = []
    for id, row in _by_id(file, content, "annotation", "annotations", empty=True).items():
        try:
            _add(images, label_of, id, row, masks)
        except MaskError as problem:
            image = _named(images, row.get("image_id"))
            whose = "" if image is None else f" of image {image.id} ({Path(image.path).name})"
            said = f"{file}: annotation {id}{whose}: {problem}"
            if corrupt != "skip":
                raise DataError(f"{said}; mend or remove it, or set data.corrupt skip") from None
            dropped.append(said)
    missing = [image for image in images.values() if not os.path.exists(image.path)] if corrupt != "skip" else []
    if missing:
        raise DataError(
            f"{missing[0].path}: image {missing[0].id} of {file} is missing ({len(missing)} such files); find it, or set data.corrupt skip"
        )
    if dropped:
        warnings.warn(f"{len(dropped)} annotations are left out; the first: {dropped[0]}", stacklevel=2)
    return CocoSet(file, categories, list(images.values()), dropped, masks)


def _load(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise DataError(f"{file}: is no JSON that can be read ({error})") from None
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise DataError(f"{file}: has no list {key!r}; a COCO file has images, annotations and categories")
    found: dict[str, Any] = content
    return found


def _by_id(file: Path, content: dict[str, Any], what: str, key: str, empty: bool = False) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for number, row in enumerate(content[key]):
        if not isinstance(row, dict) or not isinstance(row.get("id"), int):
            raise DataError(f"{file}: {key}[{number}] has no whole number 'id'")
        if row["id"] in found:
            raise DataError(f"{file}: {what} id {row['id']} occurs twice; ids must differ")
        found[row["id"]] = row
    if not found and not empty:
        raise DataError(f"{file}: its list {key!r} is empty")
    return found


def _checked_image(file: Path, id: int, row: dict[str, Any]) -> str:
    name = row.get("file_name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{file}: image {id} has no 'file_name'")
    for side in ("height", "width"):
        if not isinstance(row.get(side), int) or row[side] < 1:
            raise DataError(f"{file}: image {id} ({name}): {side!r} is {row.get(side)!r}, not a number of pixels")
    return name


def _add(images: dict[int, CocoImage], label_of: dict[int, int], id: int, row: dict[str, Any], masks: bool) -> None:
    """Give an annotation to its image; `MaskError` says what is wrong with it."""
    image = _named(images, row.get("image_id"))
    if image is None:
        raise MaskError(f"its image_id {row.get('image_id')!r} is no image of this file")
    label = _named(label_of, row.get("category_id"))
    if label is None:
        raise MaskError(f"its category_id {row.get('category_id')!r} is none of the file's: {', '.join(map(str, list(label_of)[:8]))}")
    left, top, width, height = _four_numbers(row.get("bbox"))
    if not (width > 0 and height > 0):
        raise MaskError(f"its box {row['bbox']} (x, y, width, height) has no area")
    if min(left + width, image.width) <= max(left, 0) or min(top + height, image.height) <= max(top, 0):
        raise MaskError(f"its box {row['bbox']} (x, y, width, height) lies outside of the image of {image.width}x{image.height} pixels")
    area = _area(row.get("area") or width * height)
    if masks:
        check_segmentation(row.get("segmentation"), image.height, image.width)
    image.annotation_ids.append(id)
    image.boxes.append((left, top, left + width, top + height))
    image.labels.append(label)
    image.areas.append(area)
    image.crowds.append(bool(row.get("iscrowd", 0)))
    image.segmentations.append(row["segmentation"] if masks else None)


def _named(found: Mapping[Any, _Found], id: Any) -> _Found | None:
    """What has this id, which may be anything that JSON holds; lists have no place in a dict."""
    return found.get(id) if isinstance(id, int | float) else None


def _area(given: Any) -> float:
    try:
        area = float(given)
    except (TypeError, ValueError):
        area = math.nan
    if not 0 <= area < math.inf:
        raise MaskError(f"its area is {given!r}, not a number of pixels")
    return area


def _four_numbers(box: Any) -> tuple[float, float, float, float]:
    try:
        left, top, width, height = map(float, box)
    except (TypeError, ValueError):
        raise MaskError(f"its bbox is {box!r}, not the four numbers x, y, width, height") from None
    if not all(map(math.isfinite, (left, top, width, height))):
        raise MaskError(f"its bbox {box} has a number that is not finite")
    return left, top, width, height


def read_pixels(image: CocoImage) -> NDArray[np.uint8]:
    """(height, width, 3) of the size that the file says."""
    pixels = np.asarray(open_rgb(image.path, f"image {image.id}"))
    if pixels.shape[:2] != (image.height, image.width):
        height, width = pixels.shape[:2]
        raise DataError(
            f"{image.path}: is {width}x{height} pixels, but image {image.id} of the json is {image.width}x{image.height}; "
            "mend one of them, or set data.corrupt skip"
        )
    return pixels
