"""Sparse against dense on the CPU: masks against argsort, and whole training steps of a digits network, a CIFAR ResNet-20 and a ResNet-18.

    python benchmarks/cpu.py [--threads 2] [--json FILE]

fp32. Things that are compared take turns in the same run; medians. The weight path of the released code is its forward (argsort, scatter,
multiply) and its backward (gradient + lambda * (1 - mask) * weight); ours is the masked weight and the term.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nofm
from nofm.kernels import cpu
from nofm.patterns import Pattern
from nofm.tasks.models import build_model


def in_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 2):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            if turn >= 2:
                times[name].append(time.perf_counter() - began)
    return times


def released(w: Tensor, grad: Tensor, n: int, m: int) -> Tensor:
    groups = w.abs().reshape(-1, m)
    pruned = torch.argsort(groups, dim=1)[:, : m - n]
    mask = torch.ones_like(groups).scatter_(1, pruned, 0).reshape(w.shape)
    return (w * mask).add_(grad + 2e-4 * (1 - mask) * w)


def ours(w: Tensor, grad: Tensor, n: int, m: int) -> Tensor:
    masked = cpu.masked(w, n, m, 1)
    cpu.refine_(w, grad, 2e-4, False, n, m, 1)
    return masked


def masks() -> list[dict[str, object]]:
    rows = []
    w = torch.randn(2048, 2048)
    for text in ("1:2", "2:4", "1:4", "4:8", "2:8", "1:16", "8:16", "16:32"):
        n, m = Pattern(text).n, Pattern(text).m
        grad = torch.randn_like(w)
        times = in_turns({"released": lambda g=grad, n=n, m=m: released(w, g, n, m), "ours": lambda g=grad, n=n, m=m: ours(w, g, n, m)}, 7)
        ms = {name: 1e3 * statistics.median(values) for name, values in times.items()}
        rows.append({"what": "weight path", "pattern": text, "weights": w.numel(), **ms, "times_faster": ms["released"] / ms["ours"]})
        print(rows[-1], flush=True)
    return rows


def trainer(model: nn.Module, x: Tensor, y: Tensor, pattern: str | None) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if pattern is not None:
        nofm.sparsify_(model, pattern)
        nofm.attach(nofm.SRSTE(decay=2e-4), model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


# The last network is the same twice: what sparsity costs goes by weights, what a step costs by images too.
STEPS = (
    ("cnn", (1, 8, 8), 64),
    ("cifar/resnet20", (3, 32, 32), 128),
    ("torchvision/resnet18", (3, 32, 32), 16),
    ("torchvision/resnet18", (3, 64, 64), 64),
)


def steps() -> list[dict[str, object]]:
    rows = []
    for name, shape, batch in STEPS:
        x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
        functions = {}
        for pattern in (None, "2:4", "2:8", "1:16"):
            torch.manual_seed(0)
            functions[pattern or "dense"] = trainer(build_model(name, 10, shape[0]), x, y, pattern)
        times = in_turns(functions, 60 if name == "cnn" else 12)
        for what in ("2:4", "2:8", "1:16"):
            ratios = [sparse / dense for sparse, dense in zip(times[what], times["dense"], strict=True)]
            dense_ms = 1e3 * statistics.median(times["dense"])
            more = [sparse - dense for sparse, dense in zip(times[what], times["dense"], strict=True)]
            about = f"step of {name}, {batch} images of {shape[1]} x {shape[2]}"
            rows.append({"what": about, "pattern": what, "dense_ms": dense_ms, "more_ms": 1e3 * statistics.median(more)})
            rows[-1]["more_percent"] = 100 * (statistics.median(ratios) - 1)
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {"threads": args.threads, "torch": torch.__version__, "nofm": nofm.__version__, "masks": masks(), "steps": steps()}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
