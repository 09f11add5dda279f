"""Detection: COCO's metric to its digits, losses, precision, detectors and where they begin."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import detection_ranks
import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models import ResNet, resnet50
from torchvision.models.detection import fasterrcnn_resnet50_fpn, maskrcnn_resnet50_fpn
from torchvision.models.resnet import BasicBlock
from torchvision.ops import FrozenBatchNorm2d

import nofm
from nofm.tasks.average_precision import AveragePrecision
from nofm.tasks.detection import Detection, Segmentation
from nofm.tasks.detectors import FixedWork, build_detector, predictors

NAMES = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")

LABELS = ["background", "cell", "platelet", "bubble"]

# ---- the metric ----


def by_pycocotools(found: list[dict[str, Tensor]], truth: list[dict[str, Tensor]], kind: str) -> dict[str, float]:
    def packed(mask: Tensor) -> dict[str, Any]:
        rle = coco_mask.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
        return {"size": rle["size"], "counts": rle["counts"].decode()}

    def rows(images: list[dict[str, Tensor]]) -> Any:
        for number, image in enumerate(images):
            for i, (a, b, c, d) in enumerate(image["boxes"].tolist()):
                extra = {} if kind == "bbox" and "scores" in image else {"segmentation": packed(image["masks"][i])}
                yield image, i, {"image_id": number, "category_id": int(image["labels"][i]), "bbox": [a, b, c - a, d - b], **extra}

    there = [
        {"id": id, **row, "area": float(image["area"][i]), "iscrowd": int(image["iscrowd"][i])}
        for id, (image, i, row) in enumerate(rows(truth), start=1)
    ]
    here = [{**row, "score": float(image["scores"][i])} for image, i, row in rows(found)]
    if kind == "segm":
        here = [{name: value for name, value in row.items() if name != "bbox"} for row in here]
    images = [{"id": i, "height": detection_ranks.SIDE, "width": detection_ranks.SIDE} for i in range(len(truth))]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {"images": images, "annotations": there, "categories": [{"id": i} for i in (1, 2, 3)], "info": {}}
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(here), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: value for name, value in zip(NAMES, evaluation.stats[:6], strict=True) if value != -1}  # -1: no objects of that size


def measured(found: list[dict[str, Tensor]], truth: list[dict[str, Tensor]], masks: bool, batch: int = 3) -> dict[str, float]:
    precision = AveragePrecision(masks)
    for first in range(0, len(found), batch):
        precision.add(found[first : first + batch], truth[first : first + batch])
    return precision.compute()


@pytest.mark.parametrize("seed", range(4))
def test_the_metric_is_pycocotools(seed):
    found, truth = detection_ranks.made(14, seed)
    ours = measured(found, truth, masks=True)
    boxes, masks = (by_pycocotools(found, truth, kind) for kind in ("bbox", "segm"))
    assert ours == pytest.approx({**boxes, **{f"mask_{name}": value for name, value in masks.items()}}, abs=1e-6)
    assert 0.02 < min(ours.values()) < max(ours.values()) < 0.95, "all sizes are there, and none is trivial"
    assert measured(found, truth, masks=False) == pytest.approx(boxes, abs=1e-6)


def test_an_overlap_of_exactly_a_threshold_reaches_it():
    """11 of 20 pixels are 0.55, which in fp32 is a little more."""
    found, truth = detection_ranks.made(1, 0)
    box = torch.tensor([[0.0, 0.0, 20.0, 10.0]])
    truth[0] |= {"boxes": box, "labels": torch.tensor([1]), "area": torch.tensor([200.0]), "iscrowd": torch.tensor([0])}
    found[0] |= {"boxes": torch.tensor([[0.0, 0.0, 11.0, 10.0]]), "labels": torch.tensor([1]), "scores": torch.tensor([0.9])}
    ours = measured(found, truth, masks=False)
    assert ours["map"] == pytest.approx(0.2, abs=1e-6)
    truth[0]["masks"] = found[0]["masks"] = torch.zeros(1, 240, 240, dtype=torch.bool)
    assert ours == pytest.approx(by_pycocotools(found, truth, "bbox"), abs=1e-6)


def test_crowds_are_neither_found_nor_missed():
    found, truth = detection_ranks.made(6, 1)
    before = measured(found, truth, masks=False)
    for image in truth:
        image["iscrowd"] = torch.zeros_like(image["iscrowd"])
    assert before != measured(found, truth, masks=False)


def test_sizes_are_those_of_the_annotations():
    """COCO's small, medium and large are by the annotation's area, which for an object with a mask is not that of its box."""
    found, truth = detection_ranks.made(6, 2)
    for image in truth:
        image["area"] = torch.full_like(image["area"], 500.0)
    ours = measured(found, truth, masks=False)
    assert ours["map_small"] > 0
    assert {"map_medium", "map_large"}.isdisjoint(ours), "there is nothing to find of these sizes"


def test_the_result_does_not_depend_on_order_batches_or_repeated_images():
    found, truth = detection_ranks.made(7, 3)
    once = measured(found, truth, masks=True)
    back = measured(found[::-1] + found[:2], truth[::-1] + truth[:2], masks=True, batch=2)
    assert once == back


def test_a_new_evaluation_begins_with_nothing():
    found, truth = detection_ranks.made(5, 0)
    precision = AveragePrecision()
    precision.add(found, truth)
    first = precision.compute()
    precision.reset()
    precision.add(found[:2], truth[:2])
    assert precision.compute() == measured(found[:2], truth[:2], masks=False) != first


def test_nothing_found_is_zero():
    found, truth = detection_ranks.made(3, 0)
    none = [{name: value[:0] for name, value in image.items()} for image in found]
    ours = measured(none, truth, masks=True)
    assert ours["map"] == ours["mask_map"] == 0


def test_two_processes_measure_what_one_does(tmp_path):
    """Of five images one has three and the other has two and one of the first's."""
    torch.multiprocessing.spawn(detection_ranks.work, (str(tmp_path), 1), nprocs=2)
    alone = detection_ranks.measured([0, 1, 2, 3, 4], 1)
    assert [torch.load(tmp_path / f"rank{rank}") for rank in range(2)] == [alone, alone]


def test_what_is_missing_is_said(tmp_path):
    """In a Python in which the package cannot be found."""
    code = (
        "import sys; from importlib import machinery as m; find = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(lambda c, n, *a: None if n == 'faster_coco_eval' else find(n, *a))\n"
        "from nofm.tasks.average_precision import AveragePrecision; AveragePrecision()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "NofmError: mean average precision needs faster-coco-eval, which is not installed: pip install 'nofm[vision]'" in result.stderr


# ---- the task ----


def tiny(name: str = "fasterrcnn_tiny", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return build_detector(name, 3, min_size=64, max_size=128, norm="group", **options)


def batch(masks: bool = True) -> dict[str, Any]:
    targets = []
    for index in range(2):
        mask = torch.zeros(1, 64, 80, dtype=torch.uint8)
        mask[0, 10:50, 20:60] = 1
        box = torch.tensor([[20.0, 10.0, 60.0, 50.0]])
        targets.append({"boxes": box, "labels": torch.tensor([1 + index]), **({"masks": mask} if masks else {})})
        targets[-1] |= {"area": torch.tensor([1600.0]), "iscrowd": torch.tensor([0]), "index": torch.tensor(index)}
    return {"image": list(torch.rand(2, 3, 64, 80)), "target": targets}


def test_the_loss_is_the_sum_of_all_parts():
    for task, parts in ((Detection(tiny(), LABELS), 4), (Segmentation(tiny("maskrcnn_tiny"), LABELS), 5)):
        out = task.train()(batch())
        named = {name: value for name, value in out.items() if name != "loss"}
        assert len(named) == parts
        assert out["loss"].item() == pytest.approx(sum(value.item() for value in named.values()), rel=1e-5)
        assert not any(value.requires_grad for value in named.values())
        out["loss"].backward()
        silent = [name for name, p in task.named_parameters() if p.grad is None]
        assert not silent, silent


@pytest.mark.parametrize(("make", "name"), [(Detection, "fasterrcnn_tiny"), (Segmentation, "maskrcnn_tiny")])
def test_a_task_measures_and_shows(make, name):
    task = make(tiny(name, box_score_thresh=0.0), LABELS).eval()
    data = batch(make.has_masks)
    with torch.no_grad():
        sums = task.measure(data)
    assert sums["images"].item() == 2
    metrics = task.metrics({})
    there = set(NAMES) - {"map_small", "map_large"}  # all objects are of medium size
    assert set(metrics) == {*there, *(f"mask_{name}" for name in there if make.has_masks)}
    assert task.headline in metrics
    samples = task.samples()
    assert [s.index for s in samples] == [0, 1]
    assert samples[0].image.shape == (64, 80, 3)
    assert np.array_equal(samples[0].truth.boxes, [[20, 10, 60, 50]])
    assert (samples[0].found.masks is None) is (not make.has_masks)
    if make.has_masks:
        assert samples[0].found.masks.shape == (len(samples[0].found.boxes), 64, 80)
        assert samples[0].truth.masks.sum() == 1600
    files = task.sample_files()
    assert list(files) == ["objects-0.npz", "objects-1.npz"]
    arrays = np.load(io.BytesIO(files["objects-1.npz"]), allow_pickle=False)
    assert arrays["names"].tolist() == LABELS
    assert arrays["truth_labels"].tolist() == [2]
    assert np.array_equal(arrays["image"], samples[1].image)
    assert arrays["found_boxes"].shape == (len(arrays["found_scores"]), 4)
    assert (arrays["found_scores"] >= 0.3).all()
    assert ("found_masks" in arrays) == ("truth_masks" in arrays) == make.has_masks
    assert set(task.versions()) == {"torchmetrics", "faster-coco-eval"}
    task.reset()
    assert task.samples() == []
    assert task.sample_files() == {}
    assert not [key for key in task.state_dict() if not key.startswith("model.")], "a metric is no part of a checkpoint"


@pytest.mark.parametrize("name", ["fasterrcnn_tiny", "maskrcnn_tiny"])
def test_coordinates_stay_in_fp32_under_autocast(name):
    """bf16 has 8 bits: of anchors beyond pixel 256 every second would be lost."""
    task = (Segmentation if name.startswith("mask") else Detection)(tiny(name, box_score_thresh=0.0), LABELS).eval()
    kinds: dict[str, set[torch.dtype]] = {}

    def look(part: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if part == "rpn" else output
            kinds[part] = {x.dtype for x in ([output] if isinstance(output, Tensor) else output)}

        return hook

    heads = task.model.roi_heads
    parts = {"anchors": task.model.rpn.anchor_generator, "rpn": task.model.rpn, "box_predictor": heads.box_predictor}
    parts |= {"mask_predictor": heads.mask_predictor} if heads.has_mask() else {}
    for part, module in parts.items():
        module.register_forward_hook(look(part))
    task.model.backbone.body.register_forward_hook(lambda m, a, out: kinds.update(body={x.dtype for x in out.values()}))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = task.predict(torch.rand(1, 3, 64, 80))
    assert kinds.pop("body") == {torch.bfloat16}, "the work itself is in bf16"
    assert all(dtypes == {torch.float32} for dtypes in kinds.values()), kinds
    assert len(kinds) == len(parts)
    assert found[0]["boxes"].dtype == torch.float32


# ---- detectors ----


@pytest.mark.parametrize(
    ("name", "theirs"), [("fasterrcnn_resnet50_fpn", fasterrcnn_resnet50_fpn), ("maskrcnn_resnet50_fpn", maskrcnn_resnet50_fpn)]
)
def test_detectors_are_torchvisions(name, theirs):
    with torch.device("meta"):
        ours = build_detector(name, 20, min_size=(480, 512), max_size=900)
        expected = theirs(weights=None, weights_backbone=None, num_classes=21, min_size=(480, 512), max_size=900)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in expected.state_dict().items()}
    assert repr(ours) == repr(expected)
    with torch.device("meta"):
        resnet = resnet50()
    body = {name for name in resnet.state_dict() if not name.startswith("fc.")}
    assert set(ours.backbone.body.state_dict()) == body, "keys of a classification run"


@pytest.mark.parametrize(("norm", "kind"), [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm), (None, nn.BatchNorm2d)])
def test_norms_from_scratch(norm, kind):
    model = build_detector("fasterrcnn_tiny", 2, norm=norm)
    found = {type(m) for m in model.modules() if "Norm" in type(m).__name__ and isinstance(m, nn.Module)}
    assert {k for k in found if k.__name__ != "Conv2dNormActivation"} == {kind}
    assert all(p.requires_grad for p in model.parameters())


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A finished classification run's, as far as a detector looks."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(3)
    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    network(torch.rand(4, 3, 32, 32))  # statistics of its own
    save_file(network.state_dict(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("norm", "frozen"), [(None, {"conv1", "layer1"}), ("frozen", {"conv1", "layer1"}), ("batch", set())])
@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_backbone_begins_with_the_weights_of_a_run(run_folder, norm, frozen, given):
    source = run_folder if given == "folder" else run_folder / "model.safetensors"
    model = build_detector("fasterrcnn_tiny", 2, backbone=source, norm=norm)
    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    network.load_state_dict(load_file(run_folder / "model.safetensors"))
    image = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        features = model.backbone.body.eval()(image)["3"]
        x = network.eval().maxpool(network.relu(network.bn1(network.conv1(image))))
        expected = network.layer4(network.layer3(network.layer2(network.layer1(x))))
    assert torch.allclose(features, expected, atol=1e-5)
    stages = {name.split(".")[2] for name, p in model.named_parameters() if not p.requires_grad}
    assert stages == frozen
    assert any(isinstance(m, FrozenBatchNorm2d) for m in model.modules()) is (norm != "batch")


def test_trainable_layers(run_folder):
    model = build_detector("fasterrcnn_tiny", 2, backbone=run_folder, norm="batch", trainable_layers=1)
    stages = {name.split(".")[2] for name, p in model.named_parameters() if not p.requires_grad}
    assert stages == {"conv1", "bn1", "layer1", "layer2", "layer3"}
    heads = [p.requires_grad for name, p in model.named_parameters() if not name.startswith("backbone.body")]
    assert all(heads)


def saved(folder: Path, **changes: Any) -> Path:
    state = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10).state_dict()
    for key in changes.get("without", ()):
        del state[key]
    state |= changes.get("more", {})
    save_file(state, folder / "model.safetensors")
    return folder


BAD_BACKBONES = {
    "missing": (
        {"without": ["layer2.0.conv1.weight"]},
        {},
        "model.safetensors: is not a backbone of this detector, .*missing: layer2.0.conv1.weight)",
    ),
    "unexpected": ({"more": {"layer1.1.conv1.weight": torch.zeros(1)}}, {}, "(unexpected: layer1.1.conv1.weight)"),
    "shape": ({"more": {"conv1.weight": torch.zeros(64, 1, 7, 7)}}, {}, "(of another shape: conv1.weight (64, 1, 7, 7) for (64, 3, 7, 7))"),
    "group": ({}, {"norm": "group"}, "and 21 more); GroupNorm has no running statistics: use model.norm frozen or batch"),
}


@pytest.mark.parametrize(("changes", "options", "said"), BAD_BACKBONES.values(), ids=BAD_BACKBONES)
def test_another_backbone_is_named_by_its_keys(tmp_path, changes, options, said):
    with pytest.raises(nofm.NofmError, match=re.escape(said).replace(r"\.\*", ".*")):
        build_detector("fasterrcnn_tiny", 2, backbone=saved(tmp_path, **changes), **options)


def test_no_backbone_there(tmp_path):
    with pytest.raises(nofm.NofmError, match=r"there is no .*model\.safetensors; give a finished run's folder"):
        build_detector("fasterrcnn_tiny", 2, backbone=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678 what is this")
    with pytest.raises(nofm.NofmError, match=r"model\.safetensors: cannot be read as safetensors"):
        build_detector("fasterrcnn_tiny", 2, backbone=tmp_path)


BAD = {
    "name": ("ssd300", {}, "model.name = ssd300: is no detector; there are fasterrcnn_resnet50_fpn"),
    "frozen chance": ("fasterrcnn_tiny", {"norm": "frozen"}, "model.norm = frozen: would keep what chance has put there"),
    "chance in stages": ("fasterrcnn_tiny", {"trainable_layers": 3}, "model.trainable_layers = 3: would keep what chance"),
    "stages": ("fasterrcnn_tiny", {"trainable_layers": 6}, "model.trainable_layers = 6: a ResNet has 5 stages"),
    "norm": ("fasterrcnn_tiny", {"norm": "layer"}, "model.norm = layer: must be frozen, batch or group"),
}


@pytest.mark.parametrize(("name", "options", "said"), BAD.values(), ids=BAD)
def test_bad_options(name, options, said):
    with pytest.raises(nofm.NofmError, match=re.escape(said)):
        build_detector(name, 2, **options)
    with pytest.raises(nofm.NofmError, match="0 categories"):
        build_detector("fasterrcnn_tiny", 0)


# ---- which layers are sparse, and what it costs ----


def test_layers_that_predict_stay_dense():
    model = build_detector("maskrcnn_resnet50_fpn", 80)
    names = (
        "rpn.head.cls_logits",
        "rpn.head.bbox_pred",
        "roi_heads.box_predictor.cls_score",
        "roi_heads.box_predictor.bbox_pred",
        "roi_heads.mask_predictor.mask_fcn_logits",
    )
    assert predictors(model) == names
    summary = nofm.sparsify_(model, "2:4", skip=predictors(model))
    assert {row.name for row in summary.dense} == {"backbone.body.conv1", *names}
    sparse = [row.name for row in summary.sparse]
    assert len(sparse) == 68
    for part, count in {"backbone.body": 52, "backbone.fpn": 8, "rpn.head.conv": 1, "box_head": 2, "mask_head": 4, "conv5_mask": 1}.items():
        assert sum(part in name for name in sparse) == count, part
    cost = nofm.cost(FixedWork(model), (1, 3, 64, 96))
    macs = {layer.name.removeprefix("model."): layer.macs for layer in cost.layers}
    assert macs["roi_heads.box_head.fc6"] == 1000 * 256 * 7 * 7 * 1024
    assert macs["roi_heads.mask_head.0.0"] == 100 * 14 * 14 * 256 * 256 * 9
    assert macs["rpn.head.conv.0.0"] == 256 * 256 * 9 * sum((64 // s) * (96 // s) for s in (4, 8, 16, 32)) + 256 * 256 * 9 * 2  # 1x2 at 64
    assert cost.params == sum(p.numel() for p in model.parameters())
    assert cost.params_sparse == cost.params - sum(row.weights - row.kept for row in summary.sparse)


def test_faster_rcnn_has_no_mask_to_predict():
    assert len(predictors(tiny())) == 4


def test_rules_for_parts():
    model = tiny("maskrcnn_tiny")
    rules: dict[str, str | None] = {
        **dict.fromkeys(predictors(model)),
        "backbone.fpn.*": "1:4",
        "rpn.*": None,
        "roi_heads.*": "2:8",
        "*": "2:4",
    }
    patterns = {row.name: row.pattern for row in nofm.sparsify_(model, rules).rows}
    assert patterns["backbone.fpn.inner_blocks.0.0"] == "1:4"
    assert patterns["rpn.head.conv.0.0"] == ""
    assert patterns["roi_heads.mask_head.0.0"] == "2:8"
    assert patterns["backbone.body.layer1.0.conv1"] == "2:4"
    assert patterns["roi_heads.mask_predictor.mask_fcn_logits"] == ""


def test_json_can_hold_the_metrics():
    found, truth = detection_ranks.made(2, 0)
    assert json.loads(json.dumps(measured(found, truth, masks=False), allow_nan=False))
