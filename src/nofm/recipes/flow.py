"""Optical flow by RAFT (--data.root), every convolution sparse that the pattern divides, as in the paper: AdamW, one cycle that rises
for 5 % of the run, gradients clipped to 1."""

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

__all__ = ["chairs", "stamps"]


def _recipe(data: DataConfig, engine: EngineConfig) -> RunConfig:
    return RunConfig(
        task=TaskConfig(kind="flow", updates=12, test_updates=24),
        model=ModelConfig(name="raft_large"),
        data=data,
        sparsity=SparsityConfig(pattern="2:4", preset="paper", method=MethodConfig(kind="srste", decay=2e-4)),
        optim=OptimConfig(kind="adamw", lr=4e-4, weight_decay=1e-4),
        schedule=ScheduleConfig(kind="onecycle", shape="linear", warmup=(engine.steps or 0) // 20),
        engine=engine,
    )


def chairs() -> RunConfig:
    """RAFT on FlyingChairs with the paper's settings, 2:4 SR-STE, 100,000 steps."""
    return _recipe(
        DataConfig(name="chairs", crop_size=(368, 496), loader="workers"),
        EngineConfig(steps=100_000, batch_size=10, clip=1.0, channels_last=True, workers=12, log_every=100, eval_every=5000),
    )


def stamps() -> RunConfig:
    """RAFT on flying stamps (train.npz, val.npz of examples/make_stamps.py), 2:4 SR-STE, 5,000 steps of small crops, sized for one GPU."""
    return _recipe(
        DataConfig(name="stamps", crop_size=(160, 224)),
        EngineConfig(steps=5000, batch_size=8, clip=1.0, precision="bf16", channels_last=True, log_every=100, eval_every=1250),
    )
