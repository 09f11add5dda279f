"""Detection and segmentation from files to metrics: detectors overfit four generated images in COCO's format, dense and 2:4."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import nofm
from nofm.data.coco import read_coco
from nofm.data.coco_loader import Augment, CocoLoader
from nofm.data.loader import batches
from nofm.data.order import Order
from nofm.tasks.detection import Detection, Segmentation
from nofm.tasks.detectors import build_detector, predictors

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import coco_scenes

EXAMPLE = Path(__file__).parents[2] / "examples" / "detection.py"
FEW = {  # samples and proposals, of which small images need few
    "rpn_batch_size_per_image": 64,
    "box_batch_size_per_image": 32,
    "rpn_pre_nms_top_n_train": 200,
    "rpn_post_nms_top_n_train": 100,
    "rpn_pre_nms_top_n_test": 200,
    "rpn_post_nms_top_n_test": 50,
}


def trained(root: Path, make: type[Detection], model: torch.nn.Module, method: nofm.Method, steps: int, lr: float) -> dict[str, float]:
    """COCO's metrics on the images that were trained on."""
    data = read_coco(root, "train", masks=make.has_masks).with_objects()
    loader = CocoLoader(data, data, Order(len(data), len(data), 0), augment=Augment(flip=False), resident=True)
    task = make(model, data.names)
    optimizer = torch.optim.AdamW(task.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    nofm.sparsify_(model, "2:4", skip=predictors(model))
    nofm.attach(method, model, optimizer)
    for batch in islice(batches(loader, 0), steps):
        loss = task.train()(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    task.eval().reset()
    with torch.no_grad():
        for batch in loader.test():
            task.measure(batch)
    return task.metrics({})


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("coco")
    for seed, split in enumerate(("train", "val", "test")):
        coco_scenes.write_scenes(root, split, 4, objects=2, seed=seed)
    return root


def tiny(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_detector(name, 2, min_size=96, max_size=128, **FEW)


def test_faster_rcnn_learns_four_images(root):
    metrics = trained(root, Detection, tiny("fasterrcnn_tiny"), nofm.Dense(), steps=100, lr=1.5e-3)
    assert metrics["map"] > 0.9, metrics


def test_a_sparse_mask_rcnn_learns_four_images(root):
    metrics = trained(root, Segmentation, tiny("maskrcnn_tiny"), nofm.SRSTE(2e-4), steps=90, lr=1.5e-3)
    assert metrics["map"] > 0.9, metrics
    assert metrics["mask_map"] > 0.9, metrics


def run_example(root: Path, out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(EXAMPLE), "--data", str(root), "--out", str(out / "result.json"), "--pictures", str(out / "pictures")]
    small = ["--batch", "2", "--min-size", "64", "--warmup", "1", "--log-every", "1", "--device", "cpu", "--drawn", "1"]
    subprocess.run([*command, *small, *options], check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def test_the_example_runs_and_draws(root, tmp_path):
    result = run_example(root, tmp_path, "--task", "segmentation", "--model", "maskrcnn_tiny", "--steps", "2", "--precision", "bf16")
    (run,) = result["runs"]
    assert [row["step"] for row in run["train"]] == [1, 2]
    for measured in (run["val"][-1], run["test"]):
        assert {"map", "mask_map", "map_small"} <= set(measured)
    assert result["categories"] == ["rectangle", "disc"]
    assert 0 < result["params"] < 3.5e6
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [path.name for path in pictures] == ["test-0000-seed0.png", "val-0000-seed0.png"]
    assert np.asarray(Image.open(pictures[0])).shape == (5 * 96 + 27, 2 * 5 * 112 + 4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn"])
def test_resnet50_fpn_takes_steps(root, name):
    """The real size: losses fall within a few steps, and everything finds its gradient."""
    torch.manual_seed(0)
    make = Segmentation if name.startswith("mask") else Detection
    model = build_detector(name, 2, min_size=96, max_size=128)
    data = read_coco(root, "train", masks=make.has_masks)
    loader = CocoLoader(data, data, Order(4, 4, 0), augment=Augment(flip=False), resident=True)
    task = make(model, data.names).train()
    optimizer = torch.optim.SGD(task.parameters(), 0.01, momentum=0.9)
    nofm.sparsify_(model, "2:4", skip=predictors(model))
    nofm.attach(nofm.SRSTE(2e-4), model, optimizer)
    losses = []
    for batch in islice(batches(loader, 0), 8):
        out = task(batch)
        optimizer.zero_grad()
        out["loss"].backward()
        assert not [key for key, p in task.named_parameters() if p.grad is None]
        torch.nn.utils.clip_grad_norm_(task.parameters(), 10.0)  # from scratch the first gradients are large
        optimizer.step()
        losses.append(out["loss"].item())
    assert np.mean(losses[-2:]) < 0.7 * np.mean(losses[:2]), losses
    sparse = [row.name for row in nofm.summary(model).sparse]
    nofm.fold_(model)
    for layer in sparse:
        weight = model.get_submodule(layer).weight.detach()
        assert not weight[~nofm.mask(weight, "2:4", axis=0 if "conv5_mask" in layer else 1)].any(), layer


@pytest.mark.slow
def test_the_example_begins_with_a_run_of_resnet50(root, tmp_path):
    from safetensors.torch import save_file
    from torchvision.models import resnet50

    save_file(resnet50(num_classes=10).state_dict(), tmp_path / "model.safetensors")
    result = run_example(root, tmp_path, "--backbone", str(tmp_path), "--steps", "1", "--method", "ste", "--pattern", "2:8")
    assert result["runs"][0]["test"]["map"] >= 0
