"""ImageNet-1K as in the paper (Appendix, "Training scheduler"): batch 256, 120 epochs, SGD 0.9, learning rate 0.1 to 0 by a cosine
after 5 epochs of warm-up, lambda 2e-4. Only the classifier stays dense, as in its parameter counts. --data.root holds train/ and
val/ with one folder a class."""

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
)

__all__ = ["resnet18", "resnet50"]


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
