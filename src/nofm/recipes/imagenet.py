"""ImageNet-1K as in the paper (Appendix, "Training scheduler"): batch 256, 120 epochs, SGD 0.9, learning rate 0.1 to 0 by a cosine
after 5 epochs of warm-up, lambda 2e-4. Only the classifier stays dense, as in its parameter counts. --data.root holds train/ and
val/ with one folder a class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..engine.config import (
    DataConfig,
    EngineConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SparsityConfig,
)

__all__ = ["REGNETS", "regnetx", "resnet18", "resnet50", "wide_resnet50"]

REGNETS = ("002", "004", "006", "008", "016", "032")


def _recipe(model: str) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name=model),
        data=DataConfig(name="folder", size=224, flip=True, loader="workers"),
        sparsity=SparsityConfig(pattern="2:4", preset="paper", method=MethodConfig(kind="srste", decay=2e-4)),
        optim=OptimConfig(kind="sgd", lr=0.1, momentum=0.9, weight_decay=5e-5),
        schedule=ScheduleConfig(kind="cosine", warmup=5),
        engine=EngineConfig(epochs=120, batch_size=256, workers=16, log_every=100, precision="bf16", channels_last=True),
    )


def resnet50() -> RunConfig:
    """ResNet-50 on ImageNet-1K with the paper's settings, 2:4 SR-STE."""
    return _recipe("torchvision/resnet50")


def resnet18() -> RunConfig:
    """ResNet-18 on ImageNet-1K with the paper's settings, 2:4 SR-STE."""
    return _recipe("torchvision/resnet18")


def wide_resnet50() -> RunConfig:
    """ResNet-50 x1.25 on ImageNet-1K with the paper's settings, 2:8 SR-STE."""
    base = _recipe("resnet50x1.25")
    return dataclasses.replace(base, sparsity=dataclasses.replace(base.sparsity, pattern="2:8"))


def regnetx(size: str) -> Callable[[], RunConfig]:
    """The recipe of a RegNetX: 002, 004, 006, 008, 016 or 032, by its multiply-adds in hundreds of millions."""

    def recipe() -> RunConfig:
        return _recipe(f"timm/regnetx_{size}")

    recipe.__doc__ = f"RegNetX{size} on ImageNet-1K with the paper's settings, 2:4 SR-STE."
    return recipe
