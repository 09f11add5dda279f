"""From trained weights: a dense network is trained, and becomes N:M in three ways, beside one that is N:M from the start.

Load weights before `sparsify_` or after it, as is handier (`load` below does it after): a sparsified model has the keys of the dense one.
What differs between the ways is the method given to `attach`. The second training begins at a third of the first's rate. At 1:16, where
most weights go, a tenth (`--again 0.01`) was a point worse for SR-STE and all of it no better; at 2:4 (`--pattern 2:4`) neither rates nor
the three ways are told apart.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from statistics import mean

import torch
from digits import BATCH, accuracy, digits, network, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import nofm

RATE, AGAIN = 0.1, 0.03  # the highest learning rate of the first training, and of the second


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, method: nofm.Method | None, seed: int, steps: int) -> None:
    """An ordinary loop, whose batches depend on the seed alone; without a method the network is a plain dense one."""
    x, y, *_ = digits()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, optimizer.param_groups[0]["lr"], total_steps=steps, pct_start=0.1)
    if method is not None:
        nofm.attach(method, model, optimizer)
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,), generator=draws)
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def load(weights: dict[str, Tensor], pattern: str) -> nn.Module:
    model = network()
    nofm.sparsify_(model, pattern)
    model.load_state_dict(weights)
    return model


def scores(pattern: str, seed: int, steps: int, more: int, decay: float, again: float) -> dict[str, float]:
    """Accuracy of each way, in %."""
    *_, x_test, y_test = digits()
    torch.manual_seed(seed)
    dense = network()
    random = copy.deepcopy(dense.state_dict())
    train(dense, sgd(dense, RATE), None, seed, steps)
    trained = copy.deepcopy(dense.state_dict())
    found = {
        "dense, as trained": accuracy(dense, x_test, y_test),
        "pruned, not trained on": accuracy(load(trained, pattern), x_test, y_test),
    }
    train(dense, sgd(dense, again), None, seed, more)
    found["trained on dense"] = accuracy(dense, x_test, y_test)

    ways: dict[str, Callable[[], nofm.Method]] = {
        "ASP: pruned once, trained on with that mask": nofm.ASP,
        "STE: masks may change": nofm.STE,
        "SR-STE: masks may change, and settle": lambda: nofm.SRSTE(decay=decay),
    }
    for name, method in ways.items():
        model = load(trained, pattern)
        train(model, sgd(model, again), method(), seed, more)
        found[name] = accuracy(model, x_test, y_test)
    scratch = load(random, pattern)
    train(scratch, sgd(scratch, RATE), nofm.SRSTE(decay=decay), seed, steps + more)
    found["SR-STE from scratch, as many steps in all"] = accuracy(scratch, x_test, y_test)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pattern", default="1:16", help="N:M of the sparse convolutions (default 1:16)")
    parser.add_argument("--seeds", type=int, default=3, help="networks to begin with (default 3)")
    parser.add_argument("--steps", type=int, default=400, help="steps of the first, dense training (default 400)")
    parser.add_argument("--more", type=int, default=200, help="steps of the second training (default 200)")
    parser.add_argument("--decay", type=float, default=5e-3, help="lambda of SR-STE (default 5e-3; longer runs want less)")
    parser.add_argument("--again", type=float, default=AGAIN, help=f"highest learning rate of the second training (default {AGAIN:g})")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the network is tiny: a second thread mostly waits
    runs = [scores(args.pattern, seed, args.steps, args.more, args.decay, args.again) for seed in range(args.seeds)]
    shown = Table("way", "accuracy %", title=f"digits, {args.pattern}, {args.seeds} seeds")
    for name in runs[0]:
        shown.add_row(name, spread([run[name] for run in runs], ".2f"))
    Console().print(shown)
    assert mean(run["dense, as trained"] for run in runs) > 50, "too few steps to learn anything"


if __name__ == "__main__":
    main()
