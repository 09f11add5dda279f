"""Dense, STE and SR-STE on real handwritten digits, side by side, on two CPU cores: `make demo`.

The training loop below is an ordinary one. What makes a network sparse are the two lines marked with <--. Each method trains
from the same starting weights on the same batches; the table at the end and runs/demo/digits.png show what came out.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import nofm

BATCH, EVERY = 64, 20  # images in a batch; steps between two measurements


@dataclass
class Run:
    method: str
    seed: int
    steps: list[int] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    flips: dict[int, float] = field(default_factory=dict)
    sad: int = 0
    params: int = 0
    density: float = 1.0
    seconds: float = 0.0


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 real 8x8 digits from scikit-learn, every fifth held out for testing."""
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16 - 0.3
    y = torch.tensor(data.target)
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def network(width: int) -> nn.Sequential:
    def block(c_in: int, c_out: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]

    convs = [*block(1, width, 1), *block(width, width, 2), *block(width, 2 * width, 2)]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))


def train(method: nofm.Method, name: str, pattern: str, seed: int, steps: int, width: int, progress: Progress) -> Run:
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    run, model = Run(name, seed), network(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, pct_start=0.1, anneal_strategy="cos")

    nofm.sparsify_(model, pattern)  # <--
    nofm.attach(method, model, optimizer)  # <--

    sad = nofm.SAD(model)
    sad.record(0)
    task = progress.add_task(f"{name}, seed {seed}", total=steps, loss="", accuracy="")
    began = time.perf_counter()
    for step in range(1, steps + 1):
        batch = torch.randint(len(x), (BATCH,))
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % EVERY == 0 or step == steps:
            sad.record(step)
            run.steps.append(step)
            run.accuracy.append(accuracy(model, x_test, y_test))
            progress.update(task, completed=step, loss=f"loss {loss.item():.3f}", accuracy=f"accuracy {run.accuracy[-1]:.1f} %")
    run.seconds = time.perf_counter() - began
    run.flips, run.sad = sad.flip_rate(), sum(round(r * EVERY * sad.between(0, steps).weights) for r in sad.flip_rate().values())
    if not isinstance(method, nofm.Dense):
        nofm.fold_(model)
        assert accuracy(model, x_test, y_test) == run.accuracy[-1], "folding must not change the network"
    kept = [p.count_nonzero().item() for p in model.parameters()]
    run.params = int(sum(kept))
    run.density = run.params / sum(p.numel() for p in model.parameters())
    return run


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = (model(x).argmax(1) == y).double().mean().item()
    model.train()
    return 100 * right


def table(runs: list[Run], pattern: str) -> Table:
    shown = Table(title=f"digits, {pattern}, {len({r.seed for r in runs})} seeds: mean ± standard deviation")
    columns = ("method", "accuracy %", "density", "params", "SAD, whole run", "seconds a run")
    for column in columns:
        shown.add_column(column, justify="left" if column == "method" else "right")
    for name in dict.fromkeys(r.method for r in runs):
        mine = [r for r in runs if r.method == name]
        shown.add_row(
            name,
            spread([r.accuracy[-1] for r in mine], ".1f"),
            f"{mine[0].density:.3f}",
            f"{mine[0].params:,}",
            spread([float(r.sad) for r in mine], ",.0f"),
            f"{mean(r.seconds for r in mine):.1f}",
        )
    return shown


def spread(values: list[float], form: str) -> str:
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def picture(runs: list[Run], pattern: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 7), sharex=True, layout="constrained")
    for name, colour in zip(dict.fromkeys(r.method for r in runs), ("#555555", "#d95f02", "#1b7f79"), strict=False):
        mine = [r for r in runs if r.method == name]
        steps = mine[0].steps
        for axes, curves in ((above, [r.accuracy for r in mine]), (below, [[100 * f for f in r.flips.values()] for r in mine])):
            curves_T = torch.tensor(curves, dtype=torch.float64)
            middle, width = curves_T.mean(0), curves_T.std(0) if len(mine) > 1 else torch.zeros(len(steps))
            axes.plot(steps, middle, label=name, color=colour)
            axes.fill_between(steps, middle - width, middle + width, color=colour, alpha=0.15, linewidth=0)
    above.set(ylabel="test accuracy (%)", ylim=(80, 100), title=f"Digits, {pattern} sparse convolutions, mean and spread of seeds")
    below.set(ylabel="weights whose mask flips (% a step)", xlabel="step", yscale="log")
    below.set_title(f"Mask movement: SAD over {EVERY} steps, per weight and step", fontsize=10)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pattern", default="1:16", help="N:M of the sparse convolutions (default 1:16)")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each method (default 10)")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of a run (default 400)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution (default 16)")
    parser.add_argument("--decay", type=float, default=5e-3, help="lambda of SR-STE; short runs want more than the paper's 2e-4")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the table and the picture")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the network is tiny: a second thread mostly waits, and on a busy machine waits long
    methods = {"dense": nofm.Dense(), "STE": nofm.STE(), "SR-STE": nofm.SRSTE(decay=args.decay)}
    console = Console()
    bar = (
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}  {task.fields[accuracy]}"),
    )
    with Progress(*bar, TimeRemainingColumn(), console=console) as progress:
        runs = [
            train(method, name, args.pattern, seed, args.steps, args.width, progress)
            for name, method in methods.items()
            for seed in range(args.seeds)
        ]
    console.print(table(runs, args.pattern))
    picture(runs, args.pattern, args.out / "digits.png")
    with (args.out / "digits.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("method", "seed", "accuracy", "density", "params", "sad", "seconds"))
        writer.writerows((r.method, r.seed, r.accuracy[-1], r.density, r.params, r.sad, r.seconds) for r in runs)
    console.print(f"picture and numbers: {args.out / 'digits.png'}, {args.out / 'digits.csv'}")


if __name__ == "__main__":
    main()
