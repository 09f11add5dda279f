"""What a step costs the host in Python, apart from what the device does: the optimizer's hooks, by number of layers.

    TRITON_INTERPRET=1 python benchmarks/host.py [--layers 10 60 300 1000] [--json FILE]

Runs anywhere: the GPU's code path is taken with its launches replaced by nothing, on small weights in the CPU's memory, so what is timed
is what the host does before and after the optimizer's own step. Medians; microseconds a step. A launch itself costs about 25 more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import nofm
from nofm.kernels import triton_masks
from nofm.kernels.select import interpreting, use


class NoLaunch:
    """Stands where a kernel was."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def median_us(function: Callable[[], object], repeats: int) -> float:
    times = []
    for turn in range(repeats + 5):
        began = time.process_time()  # of this process only: others may be at work on the machine
        function()
        if turn >= 5:
            times.append(time.process_time() - began)
    return 1e6 * statistics.median(times)


def measure(layers: int) -> dict[str, float]:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(layers)])
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = nofm.attach(nofm.SRSTE(decay=2e-4), model, optimizer)
    driver = handle._drivers[0]
    driver.watch.look = lambda *args: None  # its work is the device's: see below
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    repeats = max(20, 20_000 // layers)
    with use("triton"), torch.no_grad():
        before = median_us(lambda: driver._before(optimizer, (optimizer,), {}), repeats)
        step = driver._step()

        def finish() -> None:
            driver.current = step  # as `_before` leaves it
            driver._after(optimizer, (optimizer,), {})

        after = median_us(finish, repeats)

        def scheduled() -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.999
            driver._before(optimizer, (optimizer,), {})

        changing = median_us(scheduled, repeats)
    return {"layers": layers, "before_us": before, "after_us": after, "before_with_a_new_lr_us": changing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[10, 60, 300, 1000])
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if not interpreting():
        sys.exit("set TRITON_INTERPRET=1, so that the GPU's path serves weights in the CPU's memory")
    torch.set_num_threads(1)
    triton_masks.refine_kernel = NoLaunch()
    rows = []
    for layers in args.layers:
        rows.append(measure(layers))
        print({key: round(value, 1) for key, value in rows[-1].items()}, flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
