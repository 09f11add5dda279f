"""Detection and instance segmentation: torchvision's Faster R-CNN and Mask R-CNN, their own losses, COCO's mean average precision.

Both are one task; a mask is one more thing to find. The losses are torchvision's, each a mean over what was sampled from the batch, so
that a step of several micro-batches is their mean and not exactly that of one large batch.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..hooks import leaves_weights
from .average_precision import AveragePrecision
from .base import Task

__all__ = ["Detection", "Objects", "Sample", "Segmentation"]

_SAMPLES = 8  # images kept for a look
_SHOWN = 0.3  # the least score of what is kept of them


@dataclass(frozen=True, slots=True)
class Objects:
    """What is in an image: boxes (N, 4) left, top, right, bottom; labels (N,); scores (N,) of what was found; masks (N, H, W)."""

    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    scores: NDArray[np.float32] | None = None
    masks: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """An image (H, W, 3), what was found in it and what is there."""

    index: int
    image: NDArray[np.uint8]
    found: Objects
    truth: Objects


class Detection(Task):
    """{"image": [(3, H, W) from 0 to 1, ...], "target": [{"boxes", "labels", ...}, ...]} -> the sum of the network's losses.

    Metrics, from 0 to 1: map (mean average precision over IoU of 0.5 to 0.95), map_50, map_75, map_small, map_medium, map_large. They are
    -1 where there is no such object.
    """

    headline = "map"
    measure_on_host = True
    has_masks = False

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """`names[label]` is a category's; `names[0]` is the background's."""
        super().__init__()
        self.model, self.names = model, list(names)
        self._precision = AveragePrecision(self.has_masks)
        self._samples: dict[int, Sample] = {}
        _in_fp32(model)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """The loss, and the parts that it is the sum of."""
        assert self.model.training, "the network gives losses in training, and detections otherwise"
        names = ("boxes", "labels", *(("masks",) if self.has_masks else ()))
        targets = [{name: target[name] for name in names} for target in batch["target"]]
        parts: dict[str, Tensor] = self.model(batch["image"], targets)
        return {"loss": torch.stack(list(parts.values())).sum(), **{name: part.detach() for name, part in parts.items()}}

    def predict(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """For each image "boxes", "labels" and "scores", the surest first, and for Mask R-CNN "masks" (N, H, W) of True and False."""
        found: list[dict[str, Tensor]] = self.model(list(images))
        for image in found:
            if "masks" in image:
                image["masks"] = image["masks"][:, 0] > 0.5
        return found

    # ---- measuring ----

    def reset(self) -> None:
        """Forget what was measured: an evaluation begins."""
        self._precision.reset()
        self._samples.clear()

    def measure(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        images, truth = batch["image"], batch["target"]
        found = self.predict(images)
        self._precision.add(found, truth)
        for image, here, there in zip(images, found, truth, strict=True):
            if len(self._samples) < _SAMPLES:
                index = int(there["index"])
                pixels = (image * 255).round().byte().permute(1, 2, 0).cpu().numpy()
                sure = {name: value[here["scores"] >= _SHOWN] for name, value in here.items()}
                self._samples[index] = Sample(index, pixels, _objects(sure), _objects(there))
        return {"images": torch.tensor(len(images), dtype=torch.float64, device=images[0].device)}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Of all that was measured since `reset`, by all processes, which must all ask."""
        return self._precision.compute()

    def samples(self, count: int = _SAMPLES) -> list[Sample]:
        """The first images measured by this process since `reset`."""
        return [self._samples[index] for index in sorted(self._samples)[:count]]

    def sample_files(self) -> dict[str, bytes]:
        """The first images: "image" (H, W, 3), "names" of labels; "found_" and "truth_" "boxes", "labels", "scores", "masks"."""
        return {f"objects-{sample.index}.npz": _npz(sample, self.names) for sample in self.samples()}

    def versions(self) -> dict[str, str]:
        return self._precision.versions()


class Segmentation(Detection):
    """Detection with a mask for every object: targets have "masks" (N, H, W). Metrics also of masks: mask_map, mask_map_50, and so on."""

    headline = "mask_map"
    has_masks = True


def _objects(image: Mapping[str, Tensor]) -> Objects:
    parts = {name: image[name].detach().cpu().numpy() for name in ("boxes", "labels", "scores", "masks") if name in image}
    if "masks" in parts:
        parts["masks"] = parts["masks"].astype(np.bool_)
    return Objects(**parts)


def _npz(sample: Sample, names: list[str]) -> bytes:
    arrays: dict[str, NDArray[Any]] = {"image": sample.image, "names": np.array(names)}
    for side, objects in (("found", sample.found), ("truth", sample.truth)):
        parts = {name: getattr(objects, name) for name in ("boxes", "labels", "scores", "masks")}
        arrays |= {f"{side}_{name}": part for name, part in parts.items() if part is not None}
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _in_fp32(model: torch.nn.Module) -> None:
    """Have features and the predictors' outputs in fp32 under autocast as well.

    torchvision makes anchors in the type of the features and decodes boxes in that of the predictions, and bf16 cannot tell pixel 301 from
    pixel 302. Convolutions and linear layers still run in bf16.
    """
    for name in ("backbone", "rpn.head", "roi_heads.box_predictor", "roi_heads.mask_predictor"):
        part = model
        for step in name.split("."):
            part = getattr(part, step, None)  # type: ignore[assignment]
        if part is not None:
            part.register_forward_hook(_to_fp32)


@leaves_weights
def _to_fp32(module: torch.nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.float()
    if isinstance(output, dict):
        return type(output)((key, _to_fp32(module, args, value)) for key, value in output.items())
    return type(output)(_to_fp32(module, args, value) for value in output)
