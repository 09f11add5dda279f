"""`sparsity.budget`: mixed N:M from a configuration, once, at the start; and runs with a dense start that go on after an interruption."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import signal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nofm.engine.mixed
from nofm.engine import chance
from nofm.engine.build import make_loader, make_task
from nofm.engine.config import DataConfig, MethodConfig, RunConfig, SparsityConfig
from nofm.engine.signals import Stopped, StopRequest
from nofm.engine.train import train
from nofm.engine.world import World
from nofm.recipes import find


def config(**sparsity) -> RunConfig:
    base = find("digits")
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, width=32),
        sparsity=SparsityConfig(**{"method": MethodConfig(kind="srste", decay=5e-3), **sparsity}),
        schedule=dataclasses.replace(base.schedule, warmup=2),
        engine=dataclasses.replace(base.engine, steps=8, eval_every=8, checkpoint_every=8, log_every=2, ema=0.5),
    )


def budget(by: str) -> RunConfig:
    return config(pattern=None, budget=1 / 8, allocation=by)


def layers(run: Path) -> dict[str, dict]:
    return {layer["name"]: layer for layer in json.loads((run / "run.json").read_text())["layers"]}


def weights(run: Path) -> tuple[bytes, ...]:
    return tuple((run / name).read_bytes() for name in ("model.safetensors", "model-ema.safetensors"))


@pytest.mark.parametrize("by", ["uniform", "erk", "magnitude", "sensitivity"])
def test_a_budget_is_rules_that_need_not_be_written(by, tmp_path):
    """Looking at the network and its first batch leaves no trace: the run is bit for bit that of the same patterns by name."""
    train(budget(by), tmp_path / "budget")
    found = layers(tmp_path / "budget")
    sparse = {name: layer for name, layer in found.items() if layer["pattern"]}
    assert set(sparse) == {"conv2", "conv3"}
    kept = sum(Fraction(layer["pattern"].replace(":", "/")) * 32 * 9 * layer["shape"][0] for layer in sparse.values())
    assert 0.9 / 8 < kept / (32 * 9 * (32 + 64)) <= Fraction(1, 8)
    assert (by == "uniform") <= (sparse["conv2"]["pattern"] == sparse["conv3"]["pattern"] == "1:8")
    train(config(pattern=None, rules=tuple(f"{name}={layer['pattern']}" for name, layer in sparse.items())), tmp_path / "rules")
    assert weights(tmp_path / "budget") == weights(tmp_path / "rules")


def test_sensitivity_tells_layers_apart(tmp_path):
    train(budget("sensitivity"), tmp_path / "run")
    assert layers(tmp_path / "run")["conv2"]["pattern"] != layers(tmp_path / "run")["conv3"]["pattern"]


@pytest.fixture
def images(tmp_path) -> str:
    """A folder as ImageNet is laid out: two classes of noise, 40 and 48 images, the first of which cannot be read."""
    noise, root = np.random.default_rng(0), tmp_path / "images"
    for part, counts in (("train", (40, 48)), ("val", (2, 2))):
        for name, count in zip(("n01440764", "n01443537"), counts, strict=True):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                image = noise.integers(0, 255, (12, 14, 3), dtype=np.uint8)
                Image.fromarray(image).save(root / part / name / f"{number:02}.JPEG")
    (root / "train" / "n01440764" / "00.JPEG").write_bytes(b"no image")
    return str(root)


def of_folder(root: str, workers: int, **sparsity) -> RunConfig:
    """One step of all its images, so that the first batch has the one that is passed by."""
    base = config(**sparsity)
    data = DataConfig(name="folder", root=root, size=8, flip=True, loader="workers", corrupt="skip")
    engine = dataclasses.replace(base.engine, steps=2, batch_size=88, workers=workers)
    return dataclasses.replace(base, data=data, engine=engine, schedule=dataclasses.replace(base.schedule, warmup=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_sensitivity_of_images_that_are_read_one_by_one(workers, images, tmp_path):
    """By the first batch, as a loader of one's own reads it, 30 images at a time; the run is bit for bit that of the same patterns by name,
    reads the batch again and counts what it passes by once."""
    asked = of_folder(images, workers, pattern=None, budget=1 / 8, allocation="sensitivity")
    metrics = train(asked, tmp_path / "budget")
    assert metrics["skipped_images"] == 2, "one in each step"
    assert not multiprocessing.active_children()

    chance.seed_all(asked.seed)
    loader = make_loader(asked, World(torch.device("cpu")))
    task = make_task(asked, loader).train()
    looked_at = nofm.engine.mixed._gradients(task, loader, torch.device("cpu"), 32)
    batch = next(loader.keys(0))
    for part in torch.arange(88).split([30, 29, 29]):
        (task({"image": batch["image"][part], "label": batch["label"][part]})["loss"] * len(part) / 88).backward()
    gradients = {name: weight.grad for name, weight in task.model.named_parameters()}
    for name, gradient in gradients.items():
        torch.testing.assert_close(looked_at[name], gradient, rtol=1e-4, atol=1e-6)
    rules = {name: str(rule) for name, rule in nofm.allocate_patterns(task.model, 1 / 8, by="sensitivity", gradients=gradients).items()}
    assert {name: layer["pattern"] for name, layer in layers(tmp_path / "budget").items() if layer["pattern"]} == rules

    named = of_folder(images, workers, pattern=None, rules=tuple(f"{name}={rule}" for name, rule in rules.items()))
    assert train(named, tmp_path / "rules") == metrics
    assert weights(tmp_path / "budget") == weights(tmp_path / "rules")


def test_a_batch_is_looked_at_in_parts_of_one_size():
    """A part of a single image would have no spread for a norm layer."""
    batch = {"image": torch.arange(65.0).view(65, 1), "label": torch.arange(65)}
    parts = list(nofm.engine.mixed._parts(batch, 32))
    assert [len(part["label"]) for part, _ in parts] == [22, 22, 21]
    assert sum(share for _, share in parts) == pytest.approx(1)
    assert torch.cat([part["image"] for part, _ in parts]).equal(batch["image"])
    assert list(nofm.engine.mixed._parts(batch, None)) == [(batch, 1.0)]


class StopAt:
    """Asks to stop when a step is logged."""

    def __init__(self, step: int, stop: StopRequest) -> None:
        self.step, self.stop = step, stop

    def log(self, event) -> None:
        if event["event"] == "train" and event["step"] == self.step:
            self.stop(signal.SIGTERM, None)

    def close(self) -> None:
        pass


def interrupted(asked: RunConfig, out: Path, step: int) -> None:
    stop = StopRequest()
    with pytest.raises(Stopped):
        train(asked, out, stop=stop, sinks=[StopAt(step, stop)])


def test_a_run_goes_on_with_the_patterns_that_it_began_with(tmp_path, monkeypatch):
    """Another machine may add up gradients otherwise, so they are read and not made again."""
    train(budget("sensitivity"), tmp_path / "whole")
    interrupted(budget("sensitivity"), tmp_path / "parts", 4)
    monkeypatch.setattr(nofm.engine.mixed, "allocated", lambda *_, **__: {"conv2": "1:16", "conv3": "1:16"})
    train(budget("sensitivity"), tmp_path / "parts", resume=True)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


@pytest.mark.parametrize("ramp", [None, 1], ids=["dense", "gradual"])
@pytest.mark.parametrize("step", [2, 6], ids=["before", "after"])
def test_a_dense_start_goes_on_where_it_was_stopped(step, ramp, tmp_path):
    asked = config(pattern="1:8", method=MethodConfig(kind="srste", decay=5e-3, begin_at=4, ramp_at=ramp))
    train(asked, tmp_path / "whole")
    interrupted(asked, tmp_path / "parts", step)
    train(asked, tmp_path / "parts", resume=True)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_layers_that_a_budget_keeps_dense_count_as_its_share(tmp_path):
    """conv2 has a third of 27,648 weights and stays dense; conv3 keeps 1 in 32 of the others: 35.4 % of all, 3.1 % of the sparse one."""
    from nofm.report.measures import MEASURES
    from nofm.report.read import load
    from nofm.report.study import measured

    train(
        dataclasses.replace(budget("erk"), sparsity=config(pattern=None, budget=0.36, candidates=("1:32", "dense")).sparsity),
        tmp_path / "run",
    )
    assert [layers(tmp_path / "run")[name]["pattern"] for name in ("conv2", "conv3")] == ["", "1:32"]
    found = measured("x", "", load(tmp_path / "run"), MEASURES["classification"])
    assert found.kept == pytest.approx((1 + 2 / 32) / 3)
