"""Recipes that need neither a GPU nor patience."""

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

__all__ = ["digits", "fashion_cnn"]


def digits() -> RunConfig:
    """A small CNN on scikit-learn's handwritten digits, 1:16 SR-STE: seconds on two CPU cores.

    A short run wants a larger decay than the paper's 2e-4, and a network this small a high sparsity, or methods do not differ.
    Much longer, and the task is too easy for any of them.
    """
    return RunConfig(
        model=ModelConfig(name="cnn", width=16),
        data=DataConfig(name="digits"),
        sparsity=SparsityConfig(pattern="1:16", method=MethodConfig(kind="srste", decay=5e-3)),
        optim=OptimConfig(lr=0.1, momentum=0.9, weight_decay=5e-4),
        schedule=ScheduleConfig(kind="onecycle", warmup=40),
        # One thread whatever the machine has: the number of threads decides the order of sums, and so the last bits; and where cores
        # are shared, threads of a network this small spend most of their time waiting for each other.
        engine=EngineConfig(steps=400, batch_size=64, log_every=20, eval_every=20, checkpoint_every=200, threads=1, deterministic=True),
        device="cpu",
    )


def fashion_cnn() -> RunConfig:
    """A small CNN on Fashion-MNIST (--data.root with the idx files), 2:4 SR-STE: minutes on a CPU."""
    return RunConfig(
        model=ModelConfig(name="cnn", width=32),
        data=DataConfig(name="fashion", crop=2, flip=True),
        sparsity=SparsityConfig(pattern="2:4", method=MethodConfig(kind="srste", decay=2e-4)),
        optim=OptimConfig(lr=0.1, momentum=0.9, weight_decay=5e-4),
        schedule=ScheduleConfig(kind="cosine", warmup=1),
        engine=EngineConfig(epochs=15, batch_size=256, log_every=50),
    )
