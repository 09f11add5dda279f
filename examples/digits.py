"""Dense, STE and SR-STE on real handwritten digits in a training loop of your own.

The loop below is an ordinary one. What makes a network sparse are the two lines marked with <--. Each method trains from the same
starting weights on the same batches. (`make demo` trains the same kind of network without writing a loop: `nofm train digits`. Its
batches are drawn in another way, so the numbers are near those here but not the same.)
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import nofm

BATCH, EVERY = 64, 20  # images in a batch; steps between two measurements


@dataclass
class Result:
    accuracy: float
    kept: float
    sad: float


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 real 8x8 digits from scikit-learn, every fifth held out for testing."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16 - 0.3
    y = torch.tensor(data.target)
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def network(width: int = 16) -> nn.Sequential:
    def block(c_in: int, c_out: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]

    convs = [*block(1, width, 1), *block(width, width, 2), *block(width, 2 * width, 2)]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def train(method: nofm.Method, pattern: str, seed: int, steps: int) -> Result:
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, pct_start=0.1)

    nofm.sparsify_(model, pattern)  # <--
    nofm.attach(method, model, optimizer)  # <--

    sad, moved = nofm.SAD(model), 0
    sad.record(0)
    for step in range(1, steps + 1):
        batch = torch.randint(len(x), (BATCH,))
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % EVERY == 0:
            sad.record(step)
            moved += sad.between(step - EVERY, step).total

    right = accuracy(model, x_test, y_test)
    if not isinstance(method, nofm.Dense):
        nofm.fold_(model)
        assert accuracy(model, x_test, y_test) == right, "folding must not change the network"
    weights = [p for p in model.parameters() if p.dim() > 1]
    return Result(right, sum(int(w.count_nonzero()) for w in weights) / sum(w.numel() for w in weights), moved)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = (model(x).argmax(1) == y).double().mean().item()
    model.train()
    return 100 * right


def spread(values: list[float], form: str) -> str:
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pattern", default="1:16", help="N:M of the sparse convolutions (default 1:16)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (default 3)")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of a run (default 400)")
    parser.add_argument("--decay", type=float, default=5e-3, help="lambda of SR-STE; short runs want more than the paper's 2e-4")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the network is tiny: a second thread mostly waits, and on a busy machine waits long
    shown = Table(
        "method",
        "accuracy %",
        "weights kept in all layers",
        "mask changes of all weights (SAD)",
        title=f"digits, {args.pattern}, {args.seeds} seeds",
    )
    for name, method in {"dense": nofm.Dense(), "STE": nofm.STE(), "SR-STE": nofm.SRSTE(decay=args.decay)}.items():
        runs = [train(method, args.pattern, seed, args.steps) for seed in range(args.seeds)]
        shown.add_row(name, spread([r.accuracy for r in runs], ".2f"), f"{runs[0].kept:.1%}", spread([r.sad for r in runs], ",.0f"))
    Console().print(shown)


if __name__ == "__main__":
    main()
