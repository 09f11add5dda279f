"""Detection and instance segmentation (--data.root in COCO's format). The first convolution and the layers that predict stay dense.

From scratch where no --model.backbone is given: a run of imagenet/resnet50, say, dense or N:M sparse.
"""

from __future__ import annotations

from ..engine.config import (
    DataConfig,
    EngineConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SparsityConfig,
    TaskConfig,
)

__all__ = ["bccd", "coco_boxes", "coco_boxes_2x", "coco_masks", "coco_masks_2x", "nuclei"]

_BOXES = ("rpn.head.cls_logits", "rpn.head.bbox_pred", "roi_heads.box_predictor.*")
_MASKS = (*_BOXES, "roi_heads.mask_predictor.mask_fcn_logits")


def _recipe(masks: bool, data: DataConfig, lr: float, epochs: int, warmup: float, engine: EngineConfig) -> RunConfig:
    return RunConfig(
        task=TaskConfig(kind="segmentation" if masks else "detection"),
        model=ModelConfig(name="maskrcnn_resnet50_fpn" if masks else "fasterrcnn_resnet50_fpn"),
        data=data,
        sparsity=SparsityConfig(pattern="2:4", skip=_MASKS if masks else _BOXES, method=MethodConfig(kind="srste", decay=2e-4)),
        optim=OptimConfig(kind="sgd", lr=lr, momentum=0.9, weight_decay=1e-4),
        schedule=ScheduleConfig(kind="step", warmup=warmup, milestones=(round(epochs * 8 / 12), round(epochs * 11 / 12))),
        engine=engine,
    )


# ---- COCO, as detectors are compared: 16 images a step, 12 epochs (1x) or 24 (2x), 500 steps of warm-up ----


def _coco(masks: bool, epochs: int) -> RunConfig:
    data = DataConfig(name="coco", size=800, flip=True, loader="workers")
    engine = EngineConfig(epochs=epochs, batch_size=16, workers=12, precision="bf16", log_every=50)
    return _recipe(masks, data, lr=0.02, epochs=epochs, warmup=0.07, engine=engine)


def coco_boxes() -> RunConfig:
    """Faster R-CNN R50-FPN on COCO, 2:4 SR-STE, 1x: 12 epochs."""
    return _coco(False, 12)


def coco_boxes_2x() -> RunConfig:
    """Faster R-CNN R50-FPN on COCO, 2:4 SR-STE, 2x: 24 epochs."""
    return _coco(False, 24)


def coco_masks() -> RunConfig:
    """Mask R-CNN R50-FPN on COCO, 2:4 SR-STE, 1x: 12 epochs."""
    return _coco(True, 12)


def coco_masks_2x() -> RunConfig:
    """Mask R-CNN R50-FPN on COCO, 2:4 SR-STE, 2x: 24 epochs."""
    return _coco(True, 24)


# ---- a few hundred images, sized for one GPU ----


def _few(masks: bool, epochs: int, warmup: int, scale_jitter: tuple[float, float]) -> RunConfig:
    data = DataConfig(name="coco", size=384, flip=True, scale_jitter=scale_jitter)
    engine = EngineConfig(
        epochs=epochs, batch_size=8, clip=10.0, precision="bf16", channels_last=True, log_every=50, eval_every=epochs // 4
    )
    return _recipe(masks, data, lr=0.01, epochs=epochs, warmup=warmup, engine=engine)


def bccd() -> RunConfig:
    """Faster R-CNN R50-FPN from scratch on BCCD's blood cells, 2:4 SR-STE, 2,000 steps, sized for one GPU."""
    return _few(False, 80, 20, (0.8, 1.25))


def nuclei() -> RunConfig:
    """Mask R-CNN R50-FPN from scratch on DSB2018's nuclei, 2:4 SR-STE, 1,500 steps, sized for one GPU."""
    return _few(True, 48, 12, (0.6, 1.6))
