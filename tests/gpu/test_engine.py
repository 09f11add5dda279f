"""The engine on a GPU: whole-step CUDA graphs give what steps run one by one give; fp16; what a graph must not swallow.

The images are generated, in the binary layout of CIFAR-10: a class is a colour, which a small network learns.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nofm.engine.checkpoint import Store
from nofm.engine.config import (
    ConfigError,
    DataConfig,
    EngineConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SparsityConfig,
)
from nofm.engine.loop import Trainer
from nofm.engine.precision import NonFiniteLossError
from nofm.engine.signals import Stopped, StopRequest
from nofm.engine.train import Job, train, train_together
from nofm.errors import NonFiniteWeightError

pytestmark = pytest.mark.gpu

BASE = RunConfig(
    model=ModelConfig(name="cnn", width=16, dropout=0.2),
    data=DataConfig(name="cifar10", crop=2, flip=True),
    sparsity=SparsityConfig(pattern="2:4", method=MethodConfig(kind="srste", decay=5e-3)),
    optim=OptimConfig(lr=0.05, weight_decay=5e-4),
    schedule=ScheduleConfig(kind="cosine", warmup=4),
    engine=EngineConfig(steps=40, batch_size=64, log_every=10, eval_every=20, checkpoint_every=20, deterministic=True, graph="on"),
    seed=1,
    device="cuda",
)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,000 training and 500 test images: noise in one of ten colours."""
    folder = tmp_path_factory.mktemp("cifar")
    generator = torch.Generator().manual_seed(0)
    for i, name in enumerate((*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")):
        count = 500 if i == 5 else 200
        labels = torch.randint(10, (count,), generator=generator)
        pixels = torch.randint(100, (count, 3, 32, 32), generator=generator)
        pixels[:, 0] += 40 * (labels % 4).view(-1, 1, 1)
        pixels[:, 1] += 40 * (labels // 4).view(-1, 1, 1)
        records = torch.cat([labels[:, None], pixels.flatten(1)], dim=1).to(torch.uint8)
        (folder / f"{name}.bin").write_bytes(records.numpy().tobytes())
    return str(folder)


def changed(root: str, **groups: Any) -> RunConfig:
    values = {k: dataclasses.replace(getattr(BASE, k), **v) if isinstance(v, dict) else v for k, v in groups.items()}
    return dataclasses.replace(BASE, data=dataclasses.replace(BASE.data, root=root), **values)


def final(out: Path) -> dict[str, Any]:
    state = Store(out / "checkpoints").load()
    return {"model": state["model"], "optimizer": state["optimizer"]["state"], "average": state["average"], "sad": state["sad"]["masks"]}


def assert_same(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), f"{where}: {(a.double() - b.double()).abs().max()} apart"
    else:
        assert a == b, where


METHODS = {
    "srste": {"kind": "srste", "decay": 5e-3},
    "srste decoupled": {"kind": "srste", "decay": 5e-3, "placement": "decoupled"},
    "srste gradient": {"kind": "srste", "decay": 5e-3, "refine": "gradient"},
    "srste after a dense start": {"kind": "srste", "decay": 5e-3, "begin_at": 15},
    "srste after a gradual start": {"kind": "srste", "decay": 5e-3, "begin_at": 20, "ramp_at": 5},
    "dense": {"kind": "dense", "decay": None},
    "asp in the middle": {"kind": "asp", "decay": None, "prune_at": 15},
}


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_a_graph_gives_the_same_bits_as_steps_one_by_one(options, root, tmp_path):
    sparsity = {"method": dataclasses.replace(BASE.sparsity.method, **options)}
    one, two = tmp_path / "eager", tmp_path / "graph"
    train(changed(root, sparsity=sparsity, engine={"graph": "off"}), one)
    train(changed(root, sparsity=sparsity), two)
    assert_same(final(one), final(two))


# As the studies train them: bf16, channels_last, Nesterov's momentum, the learning rate's schedule begun again.
RIVALS: dict[str, dict[str, Any]] = {
    "gmp": {"begin_at": 4, "end_at": 30, "every": 5},
    "rigl": {"end_at": 30, "every": 8},
    "set": {"end_at": 30, "every": 8},
    "snfs": {"end_at": 30, "every": 8},
    "dsr": {"end_at": 30, "every": 8},
    "deepr": {"l1": 1e-3, "temperature": 1e-6},
    "ste_unstructured": {},
    "dnw": {},
    "snip": {},
    "str": {"sparsity": None, "initial": -4.0},
    "lottery": {"rounds": 1, "every": 24, "rewind_to": 4},
}


@pytest.mark.parametrize("kind", RIVALS)
def test_rivals_too(kind, root, tmp_path):
    method = MethodConfig(**{"kind": kind, "sparsity": 0.8, **RIVALS[kind]})
    parts: dict[str, Any] = {"sparsity": {"pattern": "1:1", "method": method}, "optim": {"nesterov": True}, "schedule": {"restarts": (24,)}}
    engine = {"precision": "bf16", "channels_last": True}
    one, two = tmp_path / "eager", tmp_path / "graph"
    train(changed(root, engine={**engine, "graph": "off"}, **parts), one)
    train(changed(root, engine=engine, **parts), two)
    assert_same(final(one), final(two))


@pytest.mark.parametrize("kind", ["srste", "ste_unstructured", "rigl", "str"])
def test_compiled_steps_are_a_graph_too(kind, root, tmp_path):
    """As `nofm study --engine.compile true` trains: bit for bit what compiled steps give one by one, and learned as without a compiler."""
    sparse = {"sparsity": 0.8} if kind not in ("srste", "str") else {}
    method = MethodConfig(**{"kind": kind, **sparse, **(METHODS["srste"] if kind == "srste" else RIVALS[kind])})
    parts: dict[str, Any] = {"sparsity": {"pattern": "2:4" if kind == "srste" else "1:1", "method": method}}
    engine = {"precision": "bf16", "channels_last": True, "compile": True}
    one, two, plain = tmp_path / "one by one", tmp_path / "graph", tmp_path / "plain"
    train(changed(root, engine={**engine, "graph": "off"}, **parts), one)
    train(changed(root, engine=engine, **parts), two)
    train(changed(root, engine={**engine, "compile": False}, **parts), plain)
    assert_same(final(one), final(two))
    losses = [
        [json.loads(line)["loss"] for line in (out / "events.jsonl").read_text().splitlines() if '"train"' in line] for out in (two, plain)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


@pytest.mark.parametrize(
    ("engine", "optim"),
    [
        ({"ema": 0.9, "clip": 1.0}, {}),
        ({"accumulate": 4}, {"nesterov": True}),
        ({"precision": "bf16", "channels_last": True}, {}),
        ({}, {"kind": "adamw", "lr": 1e-3}),
        ({"accumulate": 2}, {"kind": "adam", "lr": 1e-3}),
        ({"precision": "bf16", "channels_last": True}, {"fused": True, "nesterov": True}),
        ({"clip": 1.0}, {"fused": True, "kind": "adamw", "lr": 1e-3}),
    ],
    ids=["ema and clipping", "micro-batches", "bf16 channels_last", "adamw", "adam", "fused sgd", "fused adamw"],
)
def test_so_does_it_with_other_parts(engine, optim, root, tmp_path):
    one, two = tmp_path / "eager", tmp_path / "graph"
    train(changed(root, optim=optim, engine={**engine, "graph": "off"}), one)
    train(changed(root, optim=optim, engine=engine), two)
    assert_same(final(one), final(two))


class StopAt(StopRequest):
    """Asks to stop when the run has written its checkpoint of step 20."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self._latest = out / "checkpoints" / "latest"

    @property
    def number(self) -> int:  # type: ignore[override]
        return 15 if self._latest.exists() else 0

    @number.setter
    def number(self, value: int) -> None:
        pass


def test_a_graphed_run_resumes_bit_for_bit(root, tmp_path):
    config = changed(root, engine={"ema": 0.9})
    train(config, tmp_path / "straight")
    with pytest.raises(Stopped):
        train(config, tmp_path / "stopped", stop=StopAt(tmp_path / "stopped"))
    train(config, tmp_path / "stopped", resume=True)
    assert_same(final(tmp_path / "straight"), final(tmp_path / "stopped"))


def test_a_loss_that_is_no_number_is_found_in_a_graph_and_its_step_named(root, tmp_path, monkeypatch):
    finish = Trainer._after_step

    def poisoned(trainer: Trainer) -> None:
        finish(trainer)
        if trainer.step == 12:  # long after the steps that run by themselves
            next(trainer.task.parameters()).data.fill_(math.nan)

    monkeypatch.setattr(Trainer, "_after_step", poisoned)
    with pytest.raises((NonFiniteLossError, NonFiniteWeightError)) as caught:
        train(changed(root), tmp_path / "run")
    assert caught.value.step == 13
    errors = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert errors[-1]["event"] == "error"
    assert not (tmp_path / "run" / "checkpoints" / "step-00000020").exists(), "weights that are no numbers are not saved"


def test_fp16_trains_under_its_loss_scale(root, tmp_path):
    metrics = train(changed(root, engine={"precision": "fp16", "graph": "auto", "steps": 150, "eval_every": 50}), tmp_path / "run")
    assert metrics["accuracy"] > 60
    state = Store(tmp_path / "run" / "checkpoints").load()
    assert math.isfinite(state["scaler"]["scale"])


def test_fp16_and_a_graph_do_not_go_together(root, tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.graph = on: cannot hold fp16's loss scale"):
        train(changed(root, engine={"precision": "fp16"}), tmp_path / "run")


def test_runs_that_share_the_gpu_end_as_runs_alone(root, tmp_path):
    configs = [changed(root, seed=seed, engine={"ema": 0.9}) for seed in (1, 2, 3)]
    for i, config in enumerate(configs):
        train(config, tmp_path / f"alone-{i}")
    results = train_together([Job(config, tmp_path / f"together-{i}") for i, config in enumerate(configs)], lanes=3)
    assert all(isinstance(metrics, dict) for metrics in results)
    for i in range(3):
        assert_same(final(tmp_path / f"alone-{i}"), final(tmp_path / f"together-{i}"))
