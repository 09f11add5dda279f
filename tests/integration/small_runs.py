"""A run of a dozen steps on the embedded digits, to be changed and run in this process. No batch norm, so that a batch can be split."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from nofm.engine.checkpoint import Store
from nofm.engine.config import (
    DataConfig,
    EngineConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SparsityConfig,
)

SMALL = RunConfig(
    model=ModelConfig(name="cnn", width=16, norm="group"),
    data=DataConfig(name="digits", crop=1),
    sparsity=SparsityConfig(pattern="2:4", method=MethodConfig(kind="srste", decay=5e-3)),
    optim=OptimConfig(lr=0.05, weight_decay=5e-4),
    schedule=ScheduleConfig(kind="cosine", warmup=4),
    engine=EngineConfig(steps=12, batch_size=32, log_every=4, eval_every=6, checkpoint_every=6, threads=1),
    seed=1,
    device="cpu",
)


def changed(config: RunConfig, **groups: Any) -> RunConfig:
    """`config` with some fields of some groups changed: changed(SMALL, engine={"steps": 3}, seed=2)."""
    values = {k: dataclasses.replace(getattr(config, k), **v) if isinstance(v, dict) else v for k, v in groups.items()}
    return dataclasses.replace(config, **values)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The dense weights of the last checkpoint."""
    return Store(out / "checkpoints").load()["model"]


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
