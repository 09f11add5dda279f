"""Objects in images, by boxes or by masks: Faster R-CNN and Mask R-CNN on data in COCO's format."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.errors import DataError
from ..complaints import Complaints, batch_divides, folder, number, weights
from ..config import ConfigError, RunConfig
from ..resolve import near
from .base import CLASSES, Problem, known_classes

if TYPE_CHECKING:
    from torch import nn

    from ...analysis import Cost
    from ...data.loader import Loader, Tests
    from ...tasks.base import Task
    from ..world import World

__all__ = ["MODELS", "Detection", "Segmentation"]

MODELS = {
    "detection": ("fasterrcnn_resnet50_fpn", "fasterrcnn_tiny"),
    "segmentation": ("maskrcnn_resnet50_fpn", "maskrcnn_tiny"),
}
_SIZE, _MAX_SIZE = 800, 1333


class Detection(Problem):
    """Networks resize images themselves, so that a batch has images of many sizes."""

    fields = (
        "model.norm",
        "model.backbone",
        "model.trainable_layers",
        "data.size",
        "data.max_size",
        "data.flip",
        "data.scale_jitter",
        "data.loader",
        "data.corrupt",
        "data.test",
    )
    test_fields = ("data.root", "data.size", "data.max_size", "data.corrupt", "data.test")
    data = ("coco",)
    packages, extra = ("torchvision", "torchmetrics", "faster_coco_eval"), "vision"
    kind = "detection"
    has_masks = False
    same_shapes = False
    not_captured = "cannot hold a detector, which chooses boxes by their values"

    # ---- settings ----

    def check(self, c: RunConfig) -> Complaints:
        d, models = c.data, MODELS[self.kind]
        if c.model.name not in models:
            yield "model.name", f"must be {' or '.join(models)} for {self.kind}{near(c.model.name, models)}"
        yield from self._check_backbone(c)
        yield from _check_sizes(c)
        if d.scale_jitter is not None and not 0 < d.scale_jitter[0] <= d.scale_jitter[1] < float("inf"):
            yield "data.scale_jitter", "must be two factors, 0 < lowest <= highest"
        yield from batch_divides(c)
        yield from self._check_files(c)

    def _check_backbone(self, c: RunConfig) -> Complaints:
        m = c.model
        yield from number("model.trainable_layers", m.trainable_layers, 0, 5, open_high=False)
        if m.norm not in ("frozen", "batch", "group", None):
            yield "model.norm", f"must be frozen, batch or group for {self.kind}"
        if m.backbone is None and m.weights is None:
            if m.norm == "frozen":
                yield "model.norm", "frozen would keep what chance has put there; give model.backbone, or use batch or group"
            if m.trainable_layers is not None and m.trainable_layers < 5:
                yield "model.trainable_layers", "would keep what chance has put there; give model.backbone, or train all 5"
        yield from weights("model.backbone", m.backbone)

    def _check_files(self, c: RunConfig, splits: tuple[str, ...] = ("train", "test")) -> Complaints:
        from ...data.coco import find_coco

        missing = list(folder(c))
        yield from missing
        if missing or c.data.root is None:
            return
        looked_for = {"train": ("data.root", "train"), "test": ("data.root" if c.data.test is None else "data.test", _test_split(c))}
        for key, split in (looked_for[which] for which in splits):
            try:
                find_coco(c.data.root, split)
            except DataError as error:
                yield key, str(error)

    # ---- network ----

    def draft(self, c: RunConfig) -> nn.Module:
        return _model(c, 1)

    def task(self, c: RunConfig, loader: Any, *, blank: bool = False) -> Task:
        from ...tasks.detection import Detection as DetectionTask
        from ...tasks.detection import Segmentation as SegmentationTask

        model = _model(c, len(loader.names) - 1, blank=blank)
        return (SegmentationTask if self.has_masks else DetectionTask)(model, loader.names)

    def cost(self, c: RunConfig, task: Task) -> Cost | None:
        from ...analysis import cost
        from ...tasks.detectors import FixedWork

        side, longest = c.data.size or _SIZE, c.data.max_size or _MAX_SIZE
        return cost(FixedWork(task.model), (1, 3, side, min(longest, side * 4 // 3 // 32 * 32)))

    # ---- data ----

    def loader(self, c: RunConfig, world: World) -> Loader:
        from ...data.coco import read_coco
        from ...data.coco_loader import Augment, CocoLoader
        from ...data.order import Order, Share

        d, e = c.data, c.engine
        sets = [read_coco(d.root or "", split, masks=self.has_masks, corrupt=d.corrupt) for split in ("train", _test_split(c))]
        train = sets[0].with_objects()
        return CocoLoader(
            train,
            sets[1],
            Order(len(train), e.batch_size, c.seed),
            Share(world.rank, world.size, e.accumulate),
            Augment(flip=d.flip, scale=d.scale_jitter or (1.0, 1.0)),
            device=world.device,
            resident=d.loader == "resident",
            workers=e.workers,
            pin=world.device.type == "cuda",
            skip=d.corrupt == "skip",
        )

    def companions(self, loader: Any) -> dict[str, bytes]:
        return {CLASSES: json.dumps(loader.names[1:], indent=1).encode()}

    # ---- measuring a finished network ----

    def for_tests(self, own: RunConfig, c: RunConfig) -> RunConfig:
        """Images that are seen once are not kept on the device."""
        return dataclasses.replace(c, data=dataclasses.replace(c.data, loader="workers"))

    def check_tests(self, c: RunConfig) -> Complaints:
        yield from _check_sizes(c)
        yield from self._check_files(c, ("test",))

    def tests(self, own: RunConfig, c: RunConfig, world: World, run: Path) -> Tests:
        from ...data.coco import read_coco
        from ...data.coco_loader import CocoTests

        d, e = c.data, c.engine
        images = read_coco(d.root or "", _test_split(c), masks=self.has_masks, corrupt=d.corrupt)
        known = known_classes(run) or _trained_on(c, run)
        if images.names[1:] != known:
            pairs = zip([*images.names[1:], None], [*known, None], strict=False)
            theirs, ours = next(pair for pair in pairs if pair[0] != pair[1])
            raise DataError(f"{images.path}: its categories are not the network's; the first that differs is {theirs!r}, not {ours!r}")
        batch, pin = e.batch_size // e.accumulate, world.device.type == "cuda"
        return CocoTests(images, batch, workers=e.workers, pin=pin, skip=d.corrupt == "skip")


class Segmentation(Detection):
    """Detection with a mask for every object."""

    kind = "segmentation"
    has_masks = True


def _trained_on(c: RunConfig, run: Path) -> list[str]:
    """The categories of a run that has not written them down: those of the training images beside the ones to be measured."""
    from ...data.coco import read_coco

    try:
        return read_coco(c.data.root or "", "train", corrupt="skip").names[1:]
    except DataError as error:
        raise ConfigError(
            f"{run / CLASSES}: is missing, which names the network's categories, and there are no training images to take them from "
            f"({error}); write the names of the categories that it was trained on into it, a JSON list in the order of their ids"
        ) from None


def _check_sizes(c: RunConfig) -> Complaints:
    yield from number("data.size", c.data.size, 32)
    yield from number("data.max_size", c.data.max_size, c.data.size or _SIZE)


def _test_split(c: RunConfig) -> str:
    return c.data.test or "val"


def _model(c: RunConfig, categories: int, *, blank: bool = False) -> nn.Module:
    from ...tasks.detectors import build_detector

    m, d = c.model, c.data
    return build_detector(
        m.name,
        categories,
        min_size=d.size or _SIZE,
        max_size=d.max_size or _MAX_SIZE,
        norm=m.norm,  # type: ignore[arg-type]
        backbone=m.backbone,
        trainable_layers=m.trainable_layers,
        blank=blank or m.weights is not None,
    )
