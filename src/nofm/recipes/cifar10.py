"""CIFAR-10 (--data.root with its PNG sheets or binary files). Small nets and high sparsity separate the methods; 2:4 hardly does."""

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

__all__ = ["resnet18", "resnet20", "resnet32"]


def _recipe(model: str, pattern: str, decay: float, batch: int, lr: float, epochs: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name=model),
        data=DataConfig(name="cifar10", crop=4, flip=True),
        sparsity=SparsityConfig(pattern=pattern, method=MethodConfig(kind="srste", decay=decay)),
        optim=OptimConfig(lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=ScheduleConfig(kind="cosine", warmup=5),
        engine=EngineConfig(epochs=epochs, batch_size=batch, log_every=100, checkpoint_every=10, channels_last=True),
    )


def resnet20() -> RunConfig:
    """ResNet-20 (widths 16, 32, 64) on CIFAR-10, 1:16 SR-STE, 100 epochs."""
    return _recipe("cifar/resnet20", "1:16", 1.6e-3, 512, 0.4, 100)


def resnet32() -> RunConfig:
    """ResNet-32 (widths 16, 32, 64) on CIFAR-10, 1:16 SR-STE, 100 epochs."""
    return _recipe("cifar/resnet32", "1:16", 1.6e-3, 512, 0.4, 100)


def resnet18() -> RunConfig:
    """ResNet-18 with a 3x3 stem on CIFAR-10, 2:4 SR-STE, 100 epochs."""
    return _recipe("cifar/resnet18", "2:4", 2e-4, 256, 0.2, 100)
