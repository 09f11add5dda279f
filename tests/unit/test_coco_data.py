"""COCO-format folders: layouts, what is wrong with them, and batches that are functions of seed and step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import coco_scenes
import numpy as np
import pytest
import torch
from PIL import Image

from nofm.data.coco import read_coco, read_pixels
from nofm.data.coco_loader import Augment, CocoLoader, read_example
from nofm.data.errors import DataError
from nofm.data.order import Order, Share

SIZE = 96, 112


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("coco")
    coco_scenes.write_scenes(root, "train", 6, SIZE)
    coco_scenes.write_scenes(root, "val", 5, SIZE, seed=1)
    return root


def rewritten(root: Path, change: Callable[[dict[str, Any]], None], split: str = "train") -> Path:
    content = json.loads((root / f"instances_{split}.json").read_text())
    change(content)
    (root / f"instances_{split}.json").write_text(json.dumps(content))
    return root


# ---- reading ----


def test_what_a_file_says_is_read(root):
    content = json.loads((root / "instances_train.json").read_text())
    read = read_coco(root, "train", masks=True)
    assert read.names == ["background", "rectangle", "disc"], "categories are numbered by their ids"
    assert [image.id for image in read.images] == [row["id"] for row in content["images"]]
    for image in read.images:
        rows = [a for a in content["annotations"] if a["image_id"] == image.id]
        assert image.annotation_ids == [a["id"] for a in rows]
        assert image.boxes == [(x, y, x + w, y + h) for x, y, w, h in (a["bbox"] for a in rows)]
        assert image.labels == [{3: 1, 17: 2}[a["category_id"]] for a in rows]
        assert np.array_equal(image.masks().sum((1, 2)), [a["area"] for a in rows])
        assert image.areas == [a["area"] for a in rows]
        assert read_pixels(image).shape == (*SIZE, 3)


def moved(root: Path, target: Path, json_at: str, images_at: str) -> None:
    content = json.loads((root / "instances_train.json").read_text())
    (target / json_at).parent.mkdir(parents=True, exist_ok=True)
    (target / json_at).write_text(json.dumps(content))
    (target / images_at).mkdir(parents=True, exist_ok=True)
    for row in content["images"]:
        (target / images_at / row["file_name"]).write_bytes((root / "train" / row["file_name"]).read_bytes())


LAYOUTS = {
    "flat": ("instances_train.json", "JPEGImages"),
    "folder of the split": ("instances_train.json", "train"),
    "COCO 2017": ("annotations/instances_train2017.json", "train2017"),
    "images of the split": ("annotations/instances_train.json", "images/train"),
    "Roboflow": ("train/_annotations.coco.json", "train"),
}


@pytest.mark.parametrize(("json_at", "images_at"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(root, tmp_path, json_at, images_at):
    moved(root, tmp_path, json_at, images_at)
    read = read_coco(tmp_path, "train")
    assert len(read) == 6
    assert Path(read.images[0].path).parent == tmp_path / images_at


def annotation(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["annotations"][1].update(changes)


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        *way, last = path
        for step in way:
            content = content[step]
        del content[last]

    return change


def twice(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[key].append(dict(content[key][0]))


BAD_ANNOTATIONS = {
    "category out of range": (annotation(category_id=4), "its category_id 4 is none of the file's: 3, 17"),
    "image unknown": (annotation(image_id=5000), "its image_id 5000 is no image"),
    "category a list": (annotation(category_id=[3]), "its category_id [3] is none of the file's: 3, 17"),
    "image a dict": (annotation(image_id={}), "its image_id {} is no image"),
    "area a text": (annotation(area="large"), "its area is 'large', not a number of pixels"),
    "area a list": (annotation(area=[81]), "its area is [81]"),
    "area NaN": (annotation(area=float("nan")), "its area is nan"),
    "area negative": (annotation(area=-1), "its area is -1"),
    "no width": (annotation(bbox=[5, 5, 0, 9]), "its box [5, 5, 0, 9] (x, y, width, height) has no area"),
    "negative height": (annotation(bbox=[5, 5, 4, -9]), "has no area"),
    "outside": (annotation(bbox=[200, 5, 4, 9]), "lies outside of the image of 112x96 pixels"),
    "outside above": (annotation(bbox=[5, -9, 4, 9]), "lies outside"),
    "three numbers": (annotation(bbox=[5, 5, 9]), "its bbox is [5, 5, 9], not the four numbers"),
    "no box": (without("annotations", 1, "bbox"), "its bbox is None"),
    "NaN": (annotation(bbox=[5, float("nan"), 9, 9]), "not finite"),
    "no segmentation": (annotation(segmentation=[]), "it has no segmentation"),
    "runs of the wrong length": (annotation(segmentation={"size": list(SIZE), "counts": [7, 9]}), "cover 16 pixels"),
    "runs of another image": (annotation(segmentation={"size": [4, 4], "counts": [7, 9]}), "for an image of [4, 4]"),
    "empty mask": (annotation(segmentation={"size": list(SIZE), "counts": [96 * 112]}), "its mask is empty"),
}


@pytest.mark.parametrize(("change", "said"), BAD_ANNOTATIONS.values(), ids=BAD_ANNOTATIONS)
def test_a_bad_annotation_is_named_or_left_out_and_counted(tmp_path, change, said):
    coco_scenes.write_scenes(tmp_path, "train", 2, SIZE)
    coco_scenes.write_scenes(tmp_path, "val", 1, SIZE)
    rewritten(tmp_path, change)
    whose = "" if "image_id" in said else " of image 40 (0000.png)"
    with pytest.raises(DataError, match=re.escape(f"instances_train.json: annotation 9{whose}: ") + ".*" + re.escape(said)):
        read_coco(tmp_path, "train", masks=True)
    with pytest.warns(UserWarning, match=r"1 annotations are left out; the first: .*annotation 9"):
        read = read_coco(tmp_path, "train", masks=True, corrupt="skip")
    assert sum(len(image.boxes) for image in read.images) == 5
    assert CocoLoader(read, read_coco(tmp_path, "val", masks=True), Order(2, 2, 0)).skipped == 1


BAD_FILES = {
    "no annotations": (without("annotations"), "instances_train.json: has no list 'annotations'"),
    "no categories": (without("categories"), "has no list 'categories'"),
    "empty images": (lambda content: content.update(images=[]), "its list 'images' is empty"),
    "empty categories": (lambda content: content.update(categories=[]), "its list 'categories' is empty"),
    "image twice": (twice("images"), "image id 40 occurs twice"),
    "annotation twice": (twice("annotations"), "annotation id 7 occurs twice"),
    "category twice": (twice("categories"), "category id 17 occurs twice"),
    "no id": (without("annotations", 1, "id"), "annotations[1] has no whole number 'id'"),
    "no file name": (without("images", 1, "file_name"), "image 37 has no 'file_name'"),
    "no height": (without("images", 1, "height"), "image 37 (0001.png): 'height' is None, not a number of pixels"),
    "no width": (lambda content: content["images"][1].update(width=0), "image 37 (0001.png): 'width' is 0"),
}


@pytest.mark.parametrize(("change", "said"), BAD_FILES.values(), ids=BAD_FILES)
@pytest.mark.parametrize("corrupt", ["error", "skip"])
def test_a_bad_file_is_named(tmp_path, change, said, corrupt):
    coco_scenes.write_scenes(tmp_path, "train", 2, (24, 32))
    with pytest.raises(DataError, match=re.escape(said)):
        read_coco(rewritten(tmp_path, change), "train", corrupt=corrupt)


def test_no_file_no_json(tmp_path):
    with pytest.raises(DataError, match=r"no COCO file of the split 'train' is there; looked for instances_train\.json"):
        read_coco(tmp_path, "train")
    (tmp_path / "instances_train.json").write_text('{"images": [')
    with pytest.raises(DataError, match=r"instances_train\.json: is no JSON that can be read"):
        read_coco(tmp_path, "train")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:400])


def resized(path: Path) -> None:
    Image.new("RGB", (50, 40)).save(path)


def sixteen_bits(path: Path) -> None:
    Image.fromarray(np.zeros(SIZE, np.uint16)).save(path)


BAD_IMAGES = {
    "missing": (Path.unlink, r"0001\.png: image 37 of .*instances_train\.json is missing \(1 such files\)"),
    "truncated": (truncated, r"0001\.png: image 37 cannot be read"),
    "wrong size": (resized, r"0001\.png: is 50x40 pixels, but image 37 of the json is 112x96"),
    "16 bits": (sixteen_bits, r"0001\.png: image 37 cannot be read \(mode I;16: more than 8 bits"),
}


@pytest.mark.parametrize(("spoil", "said"), BAD_IMAGES.values(), ids=BAD_IMAGES)
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "files"])
def test_a_bad_image_is_named_or_passed_by_and_counted(tmp_path, spoil, said, resident):
    coco_scenes.write_scenes(tmp_path, "train", 3, SIZE)
    spoil(tmp_path / "train" / "0001.png")

    def first_batch() -> dict[str, Any]:
        train = read_coco(tmp_path, "train")
        return next(CocoLoader(train, train, Order(3, 3, 0), resident=resident).keys(0))

    with pytest.raises(DataError, match=said):
        first_batch()
    train = read_coco(tmp_path, "train", corrupt="skip")
    loader = CocoLoader(train, train, Order(3, 3, 0), resident=resident, skip=True, augment=Augment(flip=False))
    batch = next(loader.keys(0))
    assert loader.skipped == 1
    assert len(batch["image"]) == 3
    third = torch.from_numpy(read_pixels(train.images[2]).copy()).permute(2, 0, 1) / 255
    assert sum(torch.equal(image, third) for image in batch["image"]) == 2, "the next readable one stands in"
    assert [int(target["index"]) for target in next(loader.test())["target"]] == [0, 2, 2]


def test_no_readable_image_at_all(tmp_path):
    coco_scenes.write_scenes(tmp_path, "train", 2, SIZE)
    for path in (tmp_path / "train").iterdir():
        path.unlink()
    train = read_coco(tmp_path, "train", corrupt="skip")
    with pytest.raises(DataError, match="no image of this data set can be read"):
        next(CocoLoader(train, train, Order(2, 2, 0), skip=True).keys(0))


def test_images_without_objects_are_not_trained_on(tmp_path):
    coco_scenes.write_scenes(tmp_path, "train", 3, SIZE)

    def change(content: dict[str, Any]) -> None:
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 40]
        for a in content["annotations"]:
            a["iscrowd"] = int(a["image_id"] == 37)

    read = read_coco(rewritten(tmp_path, change), "train")
    assert [image.id for image in read.images] == [40, 37, 34]
    assert [image.id for image in read.with_objects().images] == [34]
    rewritten(tmp_path, lambda content: content.update(annotations=[]))
    with pytest.raises(DataError, match="none of its 3 images has an object"):
        read_coco(tmp_path, "train").with_objects()


def test_categories_of_train_and_test_must_agree(root, tmp_path):
    coco_scenes.write_scenes(tmp_path, "val", 1, SIZE)
    rewritten(tmp_path, lambda content: content["categories"][0].update(name="ball"), "val")
    with pytest.raises(DataError, match=r"instances_val\.json: its categories are not those of .*; the first that differs is 17 'ball'"):
        CocoLoader(read_coco(root, "train"), read_coco(tmp_path, "val"), Order(6, 2, 0))


# ---- batches ----

JITTER = Augment(flip=True, scale=(0.5, 2.0))


def loader(root: Path, batch: int = 2, seed: int = 5, share: Share | None = None, **options: Any) -> CocoLoader:
    train, val = (read_coco(root, split, masks=True) for split in ("train", "val"))
    return CocoLoader(train, val, Order(len(train), batch, seed), share, JITTER, **options)


def flat(batch: dict[str, Any]) -> list[torch.Tensor]:
    return [*batch["image"], *(target[name] for target in batch["target"] for name in sorted(target))]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return len(flat(a)) == len(flat(b)) and all(torch.equal(x, y) for x, y in zip(flat(a), flat(b), strict=True))


@pytest.mark.parametrize("options", [{"resident": True}, {"workers": 2}], ids=["resident", "two processes"])
def test_batches_are_a_function_of_seed_and_step(root, options):
    """However images are read, in whatever state the global generator is, and wherever a run is taken up again."""
    plain = list(islice(loader(root).keys(0), 7))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    other = loader(root, **options)
    late = list(islice(other.keys(4), 3))
    other.close()
    assert all(same(a, b) for a, b in zip(late, plain[4:], strict=True))
    assert torch.equal(torch.get_rng_state(), before), "the generator that the network draws from is left alone"
    assert not same(plain[0], next(loader(root, seed=6).keys(0)))


def test_pixels_lie_on_the_device_and_boxes_with_the_host(root):
    """Or every box that is clamped or left out would make the host wait. A device that is not the CPU stands for a GPU."""
    sets = [read_coco(root, split) for split in ("train", "val")]
    kept = CocoLoader(*sets, Order(6, 2, 0), augment=Augment(scale=(0.8, 1.2)), resident=True, device=torch.device("meta"))
    for batch in (next(kept.keys(0)), next(iter(kept.test()))):
        assert {image.device.type for image in batch["image"]} == {"meta"}
        assert {value.device.type for target in batch["target"] for value in target.values()} == {"cpu"}


def test_every_epoch_is_augmented_anew(root):
    whole = loader(root, batch=6)
    epochs = [
        dict(zip(whole.order.indices(step).tolist(), batch["image"], strict=True)) for step, batch in enumerate(islice(whole.keys(0), 2))
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [0, 1, 2, 3, 4, 5]
    assert not any(torch.equal(epochs[0][index], epochs[1][index]) for index in range(6))


def test_processes_and_micro_batches_share_a_step(root):
    whole = next(loader(root, batch=4).keys(0))
    parts = [list(islice(loader(root, batch=4, share=Share(rank, 2, 2)).keys(0), 2)) for rank in range(2)]
    together = [parts[rank][micro]["image"][0] for micro in range(2) for rank in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(together, whole["image"], strict=True))


def test_test_images_are_seen_once_as_they_are_with_all_that_is_measured(root):
    seen = {}
    for rank in range(2):
        for batch in loader(root, share=Share(rank, 2)).test():
            for image, target in zip(batch["image"], batch["target"], strict=True):
                seen[int(target["index"])] = image, target
    val = read_coco(root, "val", masks=True)
    assert sorted(seen) == [0, 1, 2, 3, 4]
    for index, (image, target) in seen.items():
        pixels, expected = read_example(val.images[index], index, True)
        assert torch.equal(image, pixels.float() / 255)
        assert set(target) == {"boxes", "labels", "masks", "area", "iscrowd", "index"}
        assert all(torch.equal(target[name], expected[name]) for name in target)


def test_crowds_are_measured_and_not_trained_on(tmp_path):
    coco_scenes.write_scenes(tmp_path, "train", 1, SIZE)
    rewritten(tmp_path, annotation(iscrowd=1))
    read = read_coco(tmp_path, "train", masks=True)
    loader = CocoLoader(read, read, Order(1, 1, 0))
    assert next(loader.test())["target"][0]["iscrowd"].tolist() == [0, 1, 0]
    target = next(loader.keys(0))["target"][0]
    assert {name: len(value) for name, value in target.items()} == {"boxes": 2, "labels": 2, "masks": 2}
    assert target["labels"].tolist() == [1, 1]


# ---- augmentation ----


def test_a_mirrored_image_has_mirrored_boxes_and_masks(root):
    image, target = read_example(read_coco(root, "train", masks=True).images[0], 0, True)
    turned = []
    for seed in range(8):
        torch.manual_seed(seed)
        changed, found = Augment(flip=True)(image, target)
        turned.append(not torch.equal(changed, image))
        if turned[-1]:
            left, top, right, bottom = target["boxes"].T
            assert torch.equal(changed, image.flip(-1))
            assert torch.equal(found["masks"], target["masks"].flip(-1))
            assert torch.equal(found["boxes"], torch.stack([112 - right, top, 112 - left, bottom], 1))
        else:
            assert torch.equal(found["boxes"], target["boxes"])
    assert 0 < sum(turned) < 8


def test_a_rescaled_image_keeps_its_size_and_its_objects_stay_where_they_are_drawn(root):
    """Inside a mask the image has the object's colour, and the mask fills its box, wherever scaling and cutting have moved them."""
    train = read_coco(root, "train", masks=True)
    areas, objects = [], 0
    for seed in range(20):
        image, target = read_example(train.images[seed % 6], 0, True)
        torch.manual_seed(seed)
        changed, found = Augment(flip=True, scale=(0.5, 2.0))(image, target)
        assert changed.shape == image.shape
        assert len(found["boxes"]) == len(found["labels"]) == len(found["masks"])
        assert (found["boxes"][:, :2] >= 0).all()
        assert (found["boxes"][:, 2:] <= torch.tensor([112.0, 96.0])).all()
        for box, label, mask in zip(found["boxes"], found["labels"], found["masks"], strict=True):
            y, x = mask.nonzero().T
            extent = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1])
            if len(y) > 60:
                colour = torch.tensor(coco_scenes.COLOURS[{1: 3, 2: 17}[int(label)]])
                inside = changed[:, mask.bool()].float().median(1).values
                assert (inside - colour).abs().max() < 25, f"seed {seed}"
                if label == 1:  # a cut disc need not touch all sides of its box
                    assert (extent - box).abs().max() <= 2, f"seed {seed}"
                objects += 1
        areas.append(float((found["masks"] != 0).sum() / max(1, len(found["masks"]))))
    assert objects > 30
    assert max(areas) > 3 * min(areas)


def test_what_was_cut_away_is_gone():
    """A thin diagonal may leave its box's corner in the image and not one of its pixels."""
    image = torch.zeros(3, 64, 64, dtype=torch.uint8)
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    masks[0].fill_diagonal_(1)
    masks[1, 20:40, 20:40] = 1
    target = {"boxes": torch.tensor([[0.0, 0, 64, 64], [20, 20, 40, 40]]), "labels": torch.tensor([1, 2]), "masks": masks}
    counts = set()
    for seed in range(60):
        torch.manual_seed(seed)
        _, found = Augment(flip=False, scale=(3.0, 6.0))(image, target)
        counts.add(len(found["labels"]))
        assert (found["masks"] != 0).flatten(1).any(1).all()
        assert ((found["boxes"][:, 2:] - found["boxes"][:, :2]) >= 1).all()
    assert counts >= {0, 1}


@pytest.mark.parametrize("scale", [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_a_scale_that_is_none(scale):
    with pytest.raises(DataError, match=r"data\.scale_jitter = .*: must be two factors"):
        Augment(scale=scale)
