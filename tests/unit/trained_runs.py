"""Run folders from real training: a small network on real digits, trained by nofm, written down as the engine writes it.

Nothing in them is invented: losses, accuracies, SAD, masks, layer tables and costs come from the run itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import nofm
from nofm.masks import unpack

METHODS = {"dense": nofm.Dense(), "ste": nofm.STE(), "srste": nofm.SRSTE(decay=5e-3), "asp": nofm.ASP()}


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16 - 0.3, torch.tensor(data.target)
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def network(width: int) -> nn.Sequential:
    def block(c_in: int, c_out: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]

    convs = [*block(1, width, 1), *block(width, width, 2), *block(width, 2 * width, 2)]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def train(
    folder: Path, method: str, seed: int, pattern: str = "1:4", steps: int = 60, every: int = 10, width: int = 8
) -> tuple[nn.Module, nofm.SAD]:
    """Train one run and write its folder; return the model as it is at the end, and the masks that were recorded."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    (folder / "masks").mkdir(parents=True)
    x, y, x_test, y_test = digits()
    model = network(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    nofm.sparsify_(model, pattern)
    nofm.attach(METHODS[method], model, optimizer)
    _write_run_json(folder, model, method, seed, pattern, steps)
    sad, began = nofm.SAD(model), time.time()
    sad.record(0)
    losses, metrics = [], {}
    with (folder / "events.jsonl").open("w") as file:

        def log(event: str, step: int, **data: object) -> None:
            file.write(json.dumps({"event": event, "step": step, "time": time.time(), **data}) + "\n")

        log("start", 0, resumed_from=None)
        for step in range(1, steps + 1):
            batch = torch.randint(len(x), (64,))
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if step % every == 0:
                speed = 64 * step / (time.time() - began)
                log(
                    "train",
                    step,
                    loss=sum(losses) / len(losses),
                    lr=schedule.get_last_lr()[0],
                    images_per_second=speed,
                    epoch=64 * step / len(x),
                )
                losses = []
                before = sad.steps[-1]
                sad.record(step)
                moved = sad.between(before, step)
                log("sad", step, since=before, changed=dict(moved), weights=moved.weights)
                metrics = evaluate(model, x_test, y_test)
                log("eval", step, metrics=metrics, epoch=64 * step / len(x), ema=False)
        shapes = {site.name: list(site.weight.shape) for site in nofm.sites(model)}
        patterns = {site.name: str(site.grouping.pattern) for site in nofm.sites(model)}
        save_file(
            sad.packed(steps),
            folder / "masks" / f"step-{steps:08d}.safetensors",
            {"shapes": json.dumps(shapes), "patterns": json.dumps(patterns)},
        )
        log("end", steps, metrics=metrics, seconds=time.time() - began)
    for site in nofm.sites(model):
        assert torch.equal(unpack(sad.packed(steps)[site.name], site.weight.shape), site.mask())
    return model, sad


def _write_run_json(folder: Path, model: nn.Module, method: str, seed: int, pattern: str, steps: int) -> None:
    value = METHODS[method]
    info = {
        "format": 1,
        "recipe": "digits",
        "config": {
            "seed": seed,
            "sparsity": {"pattern": pattern, "method": {"kind": method, **dataclasses.asdict(value)}},
            "optim": {"kind": "sgd", "lr": 0.1, "momentum": 0.9},
            "schedule": {"steps": steps},
        },
        "command": ["nofm", "train", "digits", "--sparsity.pattern", pattern, "--sparsity.method.kind", method, "--seed", str(seed)],
        "seed": seed,
        "versions": {"nofm": nofm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "hardware": {"device": "cpu", "name": platform.machine(), "cpus": os.cpu_count(), "world_size": 1},
        "started": "2026-01-02T03:04:05+00:00",
        "layers": [dataclasses.asdict(row) for row in nofm.summary(model).rows],
        "cost": dataclasses.asdict(nofm.cost(model, (1, 1, 8, 8))),
    }
    (folder / "run.json").write_text(json.dumps(info))


@torch.no_grad()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    model.eval()
    logits = model(x)
    model.train()
    return {"accuracy": 100 * (logits.argmax(1) == y).double().mean().item(), "loss": F.cross_entropy(logits, y).item()}
