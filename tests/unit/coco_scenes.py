"""Small images with rectangles and discs, written in COCO's format: category ids with gaps, and masks in all three ways of writing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask
from PIL import Image

CATEGORIES = [{"id": 17, "name": "disc"}, {"id": 3, "name": "rectangle"}]
COLOURS = {3: (220, 60, 40), 17: (40, 90, 220)}


def uncompressed(mask_HW: np.ndarray) -> dict[str, Any]:
    flat = mask_HW.T.ravel().astype(np.int8)
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff([0, *edges, flat.size]).tolist()
    return {"size": list(mask_HW.shape), "counts": [0, *runs] if flat[0] else runs}


def compressed(mask_HW: np.ndarray) -> dict[str, Any]:
    rle = coco_mask.encode(np.asfortranarray(mask_HW.astype(np.uint8)))
    return {"size": rle["size"], "counts": rle["counts"].decode()}


def scene(height: int, width: int, objects: int, rng: np.random.Generator) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Pixels, and annotations without ids. Every object has a cell of its own, so that none hides another."""
    pixels = rng.integers(110, 150, (height, width, 3)).astype(np.uint8)
    annotations = []
    rows = 1 if objects <= 2 else 2
    cells = rng.permutation([(row, column) for row in range(rows) for column in range(2)])[:objects]
    for number, (row, column) in enumerate(cells):
        category = (3, 17)[number % 2]
        cell_height, cell_width = height // rows, width // 2
        h, w = (int(rng.integers(side // 2, side * 9 // 10)) for side in (cell_height, cell_width))
        h, w = (min(h, w),) * 2 if category == 17 else (h, w)
        top, left = (int(at * side + rng.integers(1, side - size)) for at, side, size in ((row, cell_height, h), (column, cell_width, w)))
        y, x = np.mgrid[:height, :width]
        if category == 3:
            mask = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
            right, bottom = left + w, top + h
            segmentation: Any = [[left, top, right, top, right, bottom, left, bottom]] if number < 2 else uncompressed(mask)
        else:
            mask = (y + 0.5 - top - h / 2) ** 2 + (x + 0.5 - left - w / 2) ** 2 <= (h / 2) ** 2
            segmentation = compressed(mask)
        pixels[mask] = COLOURS[category]
        annotations.append(
            {"category_id": category, "iscrowd": 0, "area": float(mask.sum()), "bbox": [left, top, w, h], "segmentation": segmentation}
        )
    return pixels, annotations


def write_scenes(root: Path, split: str, count: int, size: tuple[int, int] = (96, 112), objects: int = 3, seed: int = 0) -> dict[str, Any]:
    """instances_SPLIT.json and SPLIT/*.png; what the json holds."""
    rng = np.random.default_rng(seed)
    (root / split).mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number in range(count):
        pixels, found = scene(*size, objects, rng)
        image_id = 40 - 3 * number
        images.append({"id": image_id, "file_name": f"{number:04d}.png", "height": size[0], "width": size[1]})
        Image.fromarray(pixels).save(root / split / images[-1]["file_name"])
        annotations += [{"id": 7 + 2 * (len(annotations) + i), "image_id": image_id, **a} for i, a in enumerate(found)]
    content = {"images": images, "annotations": annotations, "categories": CATEGORIES}
    (root / f"instances_{split}.json").write_text(json.dumps(content))
    return content
