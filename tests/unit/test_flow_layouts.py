"""Layouts of optical-flow data sets: read as torchvision reads them, parts kept apart, and errors that name what is missing."""

from __future__ import annotations

from pathlib import Path

import flow_scenes
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from nofm.data.errors import DataError
from nofm.data.flow import read_example
from nofm.data.flow_files import write_flo, write_kitti_flow
from nofm.data.flow_layouts import find_pairs
from nofm.data.stamp_sets import write_folder


def write_frame(path: Path, seed: int, size: tuple[int, int] = (136, 152)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(flow_scenes.texture(*size, seed)).save(path)


def write_field(path: Path, seed: int, size: tuple[int, int] = (136, 152)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    flow = (rng.integers(-640, 640, (*size, 2)) / 64).astype(np.float32)
    if path.suffix == ".flo":
        write_flo(path, flow)
    else:
        write_kitti_flow(path, flow, rng.random(size) < 0.3)


def write_sintel(root: Path, scenes: tuple[str, ...] = ("alley_1", "bamboo_2")) -> None:
    for number, scene in enumerate(scenes):
        for frame in (1, 2, 3):
            for rendering in ("clean", "final"):
                write_frame(root / "training" / rendering / scene / f"frame_{frame:04d}.png", 10 * number + frame)
            if frame < 3:
                write_field(root / "training" / "flow" / scene / f"frame_{frame:04d}.flo", 10 * number + frame)


def write_kitti(root: Path, count: int = 2) -> None:
    for number in range(count):
        for frame in (10, 11):
            write_frame(root / "training" / "image_2" / f"{number:06d}_{frame}.png", 10 * number + frame)
        write_field(root / "training" / "flow_occ" / f"{number:06d}_10.png", number)


@pytest.fixture(scope="module")
def chairs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("chairs")
    made = flow_scenes.some_pairs(5)
    write_folder(root / "FlyingChairs", made[:4], made[4:])
    return root


def assert_read_alike(pairs, witness) -> None:
    assert len(pairs) == len(witness) > 0
    for pair, seen in zip(pairs, witness, strict=True):
        example = read_example(pair)
        assert np.array_equal(example.image1.permute(1, 2, 0), np.asarray(seen[0]))
        assert np.array_equal(example.image2.permute(1, 2, 0), np.asarray(seen[1]))
        valid = torch.ones_like(example.valid) if len(seen) == 3 else torch.from_numpy(seen[3])
        assert torch.equal(example.valid, valid)
        assert torch.equal(example.flow[:, valid], torch.from_numpy(seen[2])[:, valid])


@pytest.mark.parametrize("part", ["train", "val"])
def test_flying_chairs_are_read_as_torchvision_reads_them(chairs, part):
    assert_read_alike(find_pairs("chairs", chairs, part), datasets.FlyingChairs(chairs, split=part))
    assert len(find_pairs("chairs", chairs / "FlyingChairs")) == 5


def test_sintel_is_read_as_torchvision_reads_it(tmp_path):
    write_sintel(tmp_path / "Sintel")
    assert_read_alike(find_pairs("sintel", tmp_path), datasets.Sintel(tmp_path, split="train", pass_name="both"))


def test_kitti_is_read_as_torchvision_reads_it(tmp_path):
    write_kitti(tmp_path / "KittiFlow")
    assert_read_alike(find_pairs("kitti", tmp_path), datasets.KittiFlow(tmp_path, split="train"))


@pytest.mark.parametrize("split", [False, True], ids=["one folder", "data and flow apart"])
def test_middlebury_is_read_from_one_folder_or_two(tmp_path, split):
    data, truth = (tmp_path / "other-data", tmp_path / "other-gt-flow") if split else (tmp_path, tmp_path)
    for number in (10, 11):
        write_frame(data / "RubberWhale" / f"frame{number}.png", number)
    (truth / "RubberWhale").mkdir(parents=True, exist_ok=True)
    flow = np.full((136, 152, 2), 2.0, np.float32)
    valid = np.ones((136, 152), bool)
    valid[:5] = False
    write_flo(truth / "RubberWhale" / "flow10.flo", flow, valid)
    (pair,) = find_pairs("middlebury", tmp_path)
    example = read_example(pair)
    assert torch.equal(example.valid, torch.from_numpy(valid))
    assert example.flow[:, example.valid].unique().tolist() == [2.0]


def test_whole_scenes_are_held_out_where_nobody_has_said_which(tmp_path):
    write_sintel(tmp_path, tuple("abcdef"))
    train, val = (find_pairs("sintel", tmp_path, part) for part in ("train", "val"))
    assert {pair.flow.parent.name for pair in val} == {"e"}
    assert {pair.flow.parent.name for pair in train} == set("abcdf")
    assert len(train) + len(val) == len(find_pairs("sintel", tmp_path)) == 24


def break_chairs(root: Path, how: str) -> None:
    data, marks = root / "FlyingChairs" / "data", root / "FlyingChairs" / "FlyingChairs_train_val.txt"
    if how == "a frame is missing":
        (data / "00002_img2.ppm").unlink()
    elif how == "marks are missing":
        marks.unlink()
    elif how == "too few marks":
        marks.write_text("1\n2\n")
    elif how == "another mark":
        marks.write_text("1\n1\n3\n1\n2\n")
    elif how == "nothing for validation":
        marks.write_text("1\n" * 5)


BROKEN = {
    "a frame is missing": ("train", r"data/00002_img2.ppm: is missing; 00002_img1.ppm needs it"),
    "marks are missing": ("val", r"FlyingChairs_train_val.txt: is missing; it says which"),
    "too few marks": ("val", r"FlyingChairs_train_val.txt: has 2 marks for 5 pairs"),
    "another mark": ("val", r"FlyingChairs_train_val.txt, line 3: '3' is neither 1 \(training\) nor 2"),
    "nothing for validation": ("val", r"has no pair for the val part of chairs"),
}


@pytest.mark.parametrize(("how", "part", "told"), [(how, *case) for how, case in BROKEN.items()], ids=BROKEN)
def test_a_folder_with_something_missing_is_named(tmp_path, how, part, told):
    made = flow_scenes.some_pairs(1) * 5
    write_folder(tmp_path / "FlyingChairs", made[:4], made[4:])
    break_chairs(tmp_path, how)
    with pytest.raises(DataError, match=told):
        find_pairs("chairs", tmp_path, part)


def test_other_missing_things_are_named(tmp_path):
    with pytest.raises(DataError, match=r"'flyingthings' is no layout .* there are chairs, sintel, kitti, middlebury"):
        find_pairs("flyingthings", tmp_path)
    with pytest.raises(DataError, match=r"nowhere: no such folder; it should hold the files of sintel"):
        find_pairs("sintel", tmp_path / "nowhere")
    for name, inside in (("chairs", "data"), ("sintel", "training"), ("kitti", "training")):
        with pytest.raises(DataError, match=rf"{inside}: no such folder"):
            find_pairs(name, tmp_path)
    write_field(tmp_path / "training" / "flow" / "alley_1" / "frame_last.flo", 0)
    with pytest.raises(DataError, match=r"frame_last.flo: is not called frame_NUMBER"):
        find_pairs("sintel", tmp_path)


@pytest.mark.parametrize("which", ["frame2", "flow"])
def test_sizes_that_do_not_agree_are_named(tmp_path, which):
    write_kitti(tmp_path, 1)
    (pair,) = find_pairs("kitti", tmp_path)
    path = getattr(pair, which)
    (write_frame if which == "frame2" else write_field)(path, 0, (130, 152))
    with pytest.raises(DataError, match=rf"{path.name}: is 130x152 pixels, but .*000000_10.png is 136x152"):
        read_example(pair)
