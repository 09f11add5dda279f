"""Faster R-CNN and Mask R-CNN from torchvision's parts: with which norm, from which backbone, for how many categories.

fasterrcnn_resnet50_fpn    torchvision's: ResNet-50, feature pyramid of 256 channels, 41 M parameters
maskrcnn_resnet50_fpn      the same with a mask head, 44 M
fasterrcnn_tiny            ResNet of one block a stage, pyramid and heads of 64 channels, anchors from 8 pixels on: for tests on a CPU
maskrcnn_tiny

Norm layers of the backbone (the rest has none):
  frozen   BatchNorm with the statistics and scales that the backbone came with, as detectors are trained from an ImageNet backbone.
           Without one there is nothing to freeze.
  batch    BatchNorm that learns. From scratch, with 8 images a micro-batch or more: its statistics are of what this process sees at once.
  group    GroupNorm, the same for any batch: from scratch with few images. Cannot take over a backbone with BatchNorm.
The default is frozen with a backbone and batch without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from ..errors import NofmError
from .weights import listed, misfits, read_weights

__all__ = ["DETECTORS", "FixedWork", "build_detector", "load_backbone_", "predictors"]

Norm = Literal["frozen", "batch", "group"]

DETECTORS = ("fasterrcnn_resnet50_fpn", "fasterrcnn_tiny", "maskrcnn_resnet50_fpn", "maskrcnn_tiny")
_TINY = 64


def build_detector(
    name: str,
    categories: int,
    *,
    min_size: int | Sequence[int] = 800,
    max_size: int = 1333,
    norm: Norm | None = None,
    backbone: str | Path | None = None,
    trainable_layers: int | None = None,
    blank: bool = False,
    **options: Any,
) -> nn.Module:
    """A detector of `categories` categories, background not counted, that resizes images to `min_size` at their shorter side.

    min_size           several sizes: one of them by chance for every training image, the last one in tests.
    max_size           a longer side has at most so many pixels.
    backbone           weights of a classification network that its ResNet begins with: a run's folder or a safetensors file.
    trainable_layers   how many of the ResNet's five stages are trained, counted from the last. All; with a frozen norm 3, as is custom.
    blank              do not read the backbone's weights: all weights will come from a file.
    options            of torchvision's FasterRCNN and MaskRCNN, such as box_detections_per_img.
    """
    if name not in DETECTORS:
        raise NofmError(f"model.name = {name}: is no detector; there are {', '.join(DETECTORS)}")
    if categories < 1:
        raise NofmError(f"{name}: a detector of {categories} categories has nothing to find")
    norm = norm or ("batch" if backbone is None else "frozen")
    trainable = (3 if norm == "frozen" else 5) if trainable_layers is None else trainable_layers
    if not 0 <= trainable <= 5:
        raise NofmError(f"model.trainable_layers = {trainable}: a ResNet has 5 stages, so 0 to 5 of them are trained")
    if backbone is None and not blank and (norm == "frozen" or trainable < 5):
        what = "model.norm = frozen" if norm == "frozen" else f"model.trainable_layers = {trainable}"
        raise NofmError(
            f"{what}: would keep what chance has put there, since no model.backbone is given; use norm batch or group and all 5 layers"
        )
    build = _tiny if name.endswith("_tiny") else _resnet50_fpn
    sizes = {"min_size": min_size, "max_size": max_size}
    model = build(name.startswith("maskrcnn"), categories + 1, _norm_layer(norm), trainable, sizes | options)
    if backbone is not None and not blank:
        load_backbone_(model, backbone)
    return model


def _norm_layer(kind: str) -> Any:
    if kind == "frozen":
        from torchvision.ops import FrozenBatchNorm2d

        return FrozenBatchNorm2d
    if kind not in ("batch", "group"):
        raise NofmError(f"model.norm = {kind}: must be frozen, batch or group")
    return nn.BatchNorm2d if kind == "batch" else _group_norm


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(32, channels)


def _resnet50_fpn(masks: bool, classes: int, norm: Any, trainable: int, options: dict[str, Any]) -> nn.Module:
    from torchvision.models import detection
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    # What fasterrcnn_resnet50_fpn does, but for the norm, which it chooses by whether it has downloaded weights.
    body = resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=norm, trainable_layers=trainable)
    model: nn.Module = (detection.MaskRCNN if masks else detection.FasterRCNN)(body, num_classes=classes, **options)
    return model


def _tiny(masks: bool, classes: int, norm: Any, trainable: int, options: dict[str, Any]) -> nn.Module:
    from torchvision.models import ResNet, detection
    from torchvision.models.detection import backbone_utils, faster_rcnn, mask_rcnn, rpn
    from torchvision.models.resnet import BasicBlock
    from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

    resnet = ResNet(BasicBlock, [1, 1, 1, 1], norm_layer=norm)
    frozen = ["layer4", "layer3", "layer2", "layer1", "conv1"][trainable:]
    for name, parameter in resnet.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in (*frozen, *(["bn1"] if trainable < 5 else [])))
    stages = {f"layer{i}": str(i - 1) for i in (1, 2, 3, 4)}
    body = backbone_utils.BackboneWithFPN(resnet, stages, [64, 128, 256, 512], _TINY, extra_blocks=LastLevelMaxPool())
    parts: dict[str, Any] = {
        "rpn_anchor_generator": rpn.AnchorGenerator(((8,), (16,), (32,), (64,), (128,)), ((0.5, 1.0, 2.0),) * 5),
        "box_head": faster_rcnn.TwoMLPHead(_TINY * 7 * 7, 128),
        "box_predictor": faster_rcnn.FastRCNNPredictor(128, classes),
    }
    if masks:
        parts |= {
            "mask_head": mask_rcnn.MaskRCNNHeads(_TINY, (_TINY, _TINY), 1),
            "mask_predictor": mask_rcnn.MaskRCNNPredictor(_TINY, _TINY, classes),
        }
    model: nn.Module = (detection.MaskRCNN if masks else detection.FasterRCNN)(body, **parts, **options)
    return model


# ---- a backbone from elsewhere ----


def load_backbone_(model: nn.Module, source: str | Path) -> None:
    """Begin with the weights of a classification network: those of a run's folder (its model.safetensors) or of a safetensors file."""
    path = Path(source)
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise NofmError(f"model.backbone = {source}: there is no {file}; give a finished run's folder or a safetensors file")
    given = read_weights(file)
    body: nn.Module = model.backbone.body  # type: ignore[assignment, union-attr]
    wanted = body.state_dict()
    # The classifier is left behind, and batches are counted only where a BatchNorm learns.
    if found := misfits(wanted, given, lambda key: key.startswith("fc.") or key.endswith(".num_batches_tracked")):
        statistics = any("running_mean" in key for key in found.get("unexpected", ()))
        hint = "; GroupNorm has no running statistics: use model.norm frozen or batch" * statistics
        raise NofmError(f"{file}: is not a backbone of this detector, whose keys are torchvision's ResNet's ({listed(found)}){hint}")
    body.load_state_dict({key: given[key] for key in given if key in wanted}, strict=False)


# ---- which layers, and what they cost ----


def predictors(model: nn.Module) -> tuple[str, ...]:
    """The names of the last layers, which say what and where an object is: the detector's classifiers, to be kept dense.

    `sparsify_(model, "2:4", skip=predictors(model))` leaves these and the first convolution dense. A preset alone knows one classifier, the
    last linear layer.
    """
    last = ("rpn.head.cls_logits", "rpn.head.bbox_pred", "roi_heads.box_predictor", "roi_heads.mask_predictor.mask_fcn_logits")
    layers = (name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear))
    return tuple(name for name in layers if any(name == prefix or name.startswith(f"{prefix}.") for prefix in last))


class FixedWork(nn.Module):
    """A detector's layers on a fixed number of proposals and detections, to count multiply-adds with `nofm.cost`.

    How much a detector computes depends on what it sees; the custom is to count 1,000 proposals, and 100 masks.
    """

    def __init__(self, model: nn.Module, proposals: int = 1000, masks: int = 100) -> None:
        super().__init__()
        self.model, self.proposals, self.masks = model, proposals, masks

    def forward(self, image_B3HW: Tensor) -> None:
        """Images already resized."""
        model: Any = self.model
        features = model.backbone(image_B3HW)
        model.rpn.head(list(features.values()))
        heads, channels = model.roi_heads, model.backbone.out_channels
        pooled = image_B3HW.new_zeros(self.proposals, channels, *heads.box_roi_pool.output_size)
        heads.box_predictor(heads.box_head(pooled))
        if heads.has_mask():
            heads.mask_predictor(heads.mask_head(image_B3HW.new_zeros(self.masks, channels, *heads.mask_roi_pool.output_size)))
