"""COCO's mean average precision of boxes and masks, by torchmetrics and faster-coco-eval, to the digits of COCO's own tools.

It is no sum over images: detections of all images are ranked together. So everything measured is kept until the end, and the processes
then exchange what they have, ordered by image: the result is the same for any number of them. (torchmetrics would exchange image by
image, which never ends where processes have different numbers of images.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor, distributed

from ..errors import NofmError

__all__ = ["AveragePrecision"]

_SIZES = ("small", "medium", "large")
_NAMES = ("map", "map_50", "map_75", *(f"map_{size}" for size in _SIZES))


class AveragePrecision:
    """`add` what was found and what is there, then `compute`. `masks`: also of masks, in names that begin with mask_."""

    def __init__(self, masks: bool = False) -> None:
        self._masks = masks
        self._metric = self._new()
        self._index: list[int] = []

    def _new(self) -> Any:
        _need("torchmetrics", "faster_coco_eval")
        from torchmetrics.detection import MeanAveragePrecision

        # The steps are COCO's to the last bit: torchmetrics' own are rounded to fp32, and an IoU of exactly 0.55 would not reach them.
        metric = MeanAveragePrecision(
            iou_type=("bbox", "segm") if self._masks else "bbox",
            iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(),
            rec_thresholds=np.linspace(0.0, 1.0, 101).tolist(),
            backend="faster_coco_eval",
            sync_on_compute=False,
        )
        metric.warn_on_many_detections = False  # COCO's measure is of the best 100
        return metric

    def reset(self) -> None:
        """Begin anew."""
        self._metric.reset()
        self._index.clear()

    def add(self, found: Sequence[Mapping[str, Tensor]], truth: Sequence[Mapping[str, Tensor]]) -> None:
        """Images: "boxes", "scores", "labels" (and "masks") found; "boxes", "labels", "area", "iscrowd", "index" (and "masks") there."""
        wanted = ("boxes", "labels", *(("masks",) if self._masks else ()))
        as_found = [{name: image[name].detach().cpu() for name in (*wanted, "scores")} for image in found]
        as_there = [{name: image[name].cpu() for name in (*wanted, "area", "iscrowd")} for image in truth]
        self._metric.update(as_found, as_there)
        self._index += [int(image["index"]) for image in truth]

    def compute(self) -> dict[str, float]:
        """From 0 to 1, without the sizes of which there is no object (COCO writes -1 there). To be called by all processes."""
        metric, images = self._new(), self._of_all_processes()
        metric.update([], [])  # or it would warn that it was not
        for name in metric.metric_state:
            setattr(metric, name, [image[name] for image in images.values() if name in image])
        values = metric.compute()
        own = {"": "bbox_", "mask_": "segm_"} if self._masks else {"": ""}
        found = {f"{ours}{name}": float(values[f"{theirs}{name}"]) for ours, theirs in own.items() for name in _NAMES}
        return {name: value for name, value in found.items() if value >= 0 or name.endswith("map")}

    def versions(self) -> dict[str, str]:
        """Of what computes it."""
        return {package: version(package) for package in ("torchmetrics", "faster-coco-eval")}

    def _of_all_processes(self) -> dict[int, dict[str, Any]]:
        """What is known of each image, in the order of the images; one that two processes have seen counts once."""
        states = self._metric.metric_state
        own = {index: {name: rows[at] for name, rows in states.items() if rows} for at, index in enumerate(self._index)}
        everyone = [own]
        if distributed.is_available() and distributed.is_initialized():
            everyone = [{} for _ in range(distributed.get_world_size())]
            distributed.all_gather_object(everyone, own)
        merged = {index: image for part in everyone for index, image in part.items()}
        return dict(sorted(merged.items()))


def _need(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise NofmError(
                f"mean average precision needs {package.replace('_', '-')}, which is not installed: "
                "pip install 'nofm[vision]' (in a clone '.[vision]') (torchmetrics and faster-coco-eval)"
            )
