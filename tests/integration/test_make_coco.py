"""examples/make_coco.py: datasets of other layouts as the COCO folders that recipes read, by hand and against pycocotools."""

from __future__ import annotations

import hashlib
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_masks

from nofm.data.coco import read_coco
from nofm.data.coco_masks import decode_runs

SCRIPT = Path(__file__).parents[2] / "examples" / "make_coco.py"


def make(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_boxes_of_voc(tmp_path, monkeypatch, capsys):
    """A box from pixel 260 to 491, both in it, is 232 wide and begins at 259; one of a pixel is left out."""
    source = tmp_path / "BCCD"
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (source / folder).mkdir(parents=True)
    cell = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
    cells = [("WBC", 260, 177, 491, 376), ("RBC", 5, 6, 5, 90), ("Platelets", 1, 1, 640, 480)]
    for split in ("train", "val", "test"):
        (source / "ImageSets" / "Main" / f"{split}.txt").write_text(f"{split}_1\n")
        Image.new("RGB", (640, 480)).save(source / "JPEGImages" / f"{split}_1.jpg")
        (source / "Annotations" / f"{split}_1.xml").write_text(f"<annotation>{''.join(cell.format(*c) for c in cells)}</annotation>")
    make(monkeypatch, "bccd", source, tmp_path / "out")
    assert capsys.readouterr().out == "".join(f"{split}: 1 images, 2 objects\n" for split in ("train", "val", "test"))
    found = read_coco(tmp_path / "out", "val")
    assert found.names[1:] == ["RBC", "WBC", "Platelets"]
    assert [list(map(float, box)) for box in found.images[0].boxes] == [[259, 176, 491, 376], [0, 0, 640, 480]]


def nucleus(seed: int, height: int, width: int) -> np.ndarray[Any, Any]:
    y, x = np.mgrid[:height, :width]
    a, b = np.random.default_rng(seed).integers(4, min(height, width) - 4, 2)
    return (y - a) ** 2 + (x - b) ** 2 < 12 + seed


def test_nuclei_are_runs(tmp_path, monkeypatch):
    source, ids = tmp_path / "stage1_train", [f"{i:064x}" for i in range(12)]
    for i, name in enumerate(ids):
        (source / name / "images").mkdir(parents=True)
        (source / name / "masks").mkdir()
        height, width = (400, 20) if i == 3 else (30, 40)
        colour = (9, 9, 9, 255) if i % 2 else (9, 9, 200, 255)
        Image.new("RGBA", (width, height), colour).save(source / name / "images" / f"{name}.png")
        for k in range(3):
            Image.fromarray((nucleus(10 * i + k, height, width) * 255).astype(np.uint8)).save(source / name / "masks" / f"{k}.png")
    make(monkeypatch, "nuclei", source, tmp_path / "out")
    val = [i for i, name in enumerate(ids) if int(hashlib.md5(name.encode()).hexdigest(), 16) % 5 == 0 and i != 3]
    assert 0 < len(val) < 8
    found = read_coco(tmp_path / "out", "val", masks=True)
    assert len(found) == len(val)
    assert len(read_coco(tmp_path / "out", "train", masks=True)) == 11 - len(val), "the image of 400 pixels is too large"
    for image, i in zip(found.images, val, strict=True):
        assert (image.masks() == np.stack([nucleus(10 * i + k, 30, 40) for k in range(3)])).all()
    modes = {Image.open(file).mode for file in (tmp_path / "out").glob("*/*.png")}
    assert modes == {"L", "RGB"}


@pytest.mark.parametrize("seed", range(20))
def test_packed_runs_are_those_of_pycocotools(seed):
    chance = np.random.default_rng(seed)
    mask = chance.random((int(chance.integers(1, 90)), int(chance.integers(1, 90)))) < chance.random()
    text = runpy.run_path(str(SCRIPT))["packed_runs"](mask)
    assert text == coco_masks.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
    assert (decode_runs({"size": list(mask.shape), "counts": text}) == mask).all()
