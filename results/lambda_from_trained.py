"""Lambda where training begins with trained weights: the table of docs/lambda.md, on digits at 1:16, in about ten minutes of one core.

Each network is trained dense for 400 steps by the loop of examples/from_trained.py and then made 1:16 in every way from the same
weights, with the same batches. A row's E is lambda times the sum of the learning rates of the second training: by itself the term of
SR-STE shrinks a pruned weight by exp(-E) (decoupled).

    python results/lambda_from_trained.py [--seeds 10] [--steps 60 200 600]
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nofm

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from digits import accuracy, digits, network
from from_trained import AGAIN, RATE, load, sgd, train

PATTERN = "1:16"
ADAMW = 5e-3  # its highest learning rate
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: sgd(model, AGAIN),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=ADAMW, weight_decay=0.01),
}


def ways(optimizer: str, steps: int, sum_of_rates: float) -> dict[str, nofm.Method]:
    """The second trainings, by name."""
    found: dict[str, nofm.Method] = {"ASP": nofm.ASP(), "STE": nofm.STE()}
    found |= {f"SR-STE, lambda {decay:g}": nofm.SRSTE(decay=decay) for decay in (2e-4, 5e-3, 5e-2)}
    if optimizer == "AdamW":
        found |= {f"decoupled, E {e:g}": nofm.SRSTE(decay=e / sum_of_rates, placement="decoupled") for e in (0.25, 1, 4)}
    if steps >= 300:
        found["SR-STE, lambda auto"] = nofm.SRSTE(decay="auto", probe=100)
    return found


def second(weights: dict[str, Tensor], optimizer: str, name: str, seed: int, steps: int) -> tuple[float, float, float]:
    """Accuracy in %, loss on the test images, and the share of weights whose mask is another at the end."""
    *_, x_test, y_test = digits()
    model = load(weights, PATTERN)
    stepping = OPTIMIZERS[optimizer](model)
    sad = nofm.SAD(model)
    sad.record(0)
    train(model, stepping, ways(optimizer, steps, sum_of_rates(optimizer, steps))[name], seed, steps)
    sad.record(1)
    moved = sad.between(0, 1)
    right = accuracy(model, x_test, y_test)
    with torch.no_grad():
        lost = F.cross_entropy(model.eval()(x_test), y_test).item()
    return right, lost, 100 * moved.total / moved.weights


def sum_of_rates(optimizer: str, steps: int) -> float:
    """Of a second training."""
    idle = OPTIMIZERS[optimizer](nn.Linear(1, 1))
    schedule = torch.optim.lr_scheduler.OneCycleLR(idle, idle.param_groups[0]["lr"], total_steps=steps, pct_start=0.1)
    total = 0.0
    for _ in range(steps):
        total += schedule.get_last_lr()[0]
        idle.step()
        schedule.step()
    return total


def main() -> None:
    """Train all of them and print the table, line by line as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="networks to begin with (default 10)")
    parser.add_argument("--steps", type=int, nargs="+", default=[60, 200, 600], help="lengths of the second training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    starts = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        dense = network()
        train(dense, sgd(dense, RATE), None, seed, 400)
        starts.append(copy.deepcopy(dense.state_dict()))
    print("| optimizer | steps | way | accuracy % | test loss | weights with another mask, % |\n| --- | --- | --- | --- | --- | --- |")
    for optimizer in OPTIMIZERS:
        for steps in args.steps:
            for name in ways(optimizer, steps, 1.0):
                runs = [second(weights, optimizer, name, seed, steps) for seed, weights in enumerate(starts)]
                right, lost, moved = zip(*runs, strict=True)
                cells = [f"{mean(right):.2f} ± {stdev(right):.2f}", f"{mean(lost):.3f} ± {stdev(lost):.3f}", f"{mean(moved):.1f}"]
                print(f"| {optimizer} | {steps} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
