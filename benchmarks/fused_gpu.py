"""The optimizer's step alone, on the GPU: with SR-STE's term inside it (`attach(..., fused=True)`), and with the term in a pass of its
own before it, against torch's fused optimizer without a term.

    python benchmarks/fused_gpu.py [--patterns 2:4 4:8 1:16] [--sizes 512 1024 2048] [--json FILE]

67 M fp32 weights in eight tensors, as linear layers and as 3x3 convolutions in both layouts. All take turns in one process; a figure is
the median over turns of the time as a multiple of torch's own, for each number of weights that a program works on (`ways.STEP_WEIGHTS`).
The floor is 1: a step reads and writes what torch's does (SGD with momentum 20 bytes a weight, AdamW 28), and the term is in registers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import nn

import nofm
from nofm.kernels import ways

LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(2048, 4096, bias=False),
    "conv 3x3 channels_last": lambda: nn.Conv2d(1024, 912, 3, bias=False).to(memory_format=torch.channels_last),
    "conv 3x3 contiguous": lambda: nn.Conv2d(1024, 912, 3, bias=False),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, 0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-4, fused=True, capturable=True),
}


def stepper(layout: str, optimizer: str, pattern: str | None, fused: bool, size: int) -> Callable[[], None]:
    """A function that takes a step, by replaying a graph: the host has no part in its time."""
    ways.STEP_WEIGHTS = size
    torch.manual_seed(0)
    model = nn.Sequential(*[LAYOUTS[layout]() for _ in range(8)]).cuda()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    if pattern is not None:
        nofm.sparsify_(model, pattern, preset="all")
        nofm.attach(nofm.SRSTE(decay=2e-4), model, chosen, fused=fused)._drivers[0].watch.look = lambda *_: None  # timed elsewhere
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    for _ in range(3):
        chosen.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen.step()

    def step(kept: object = (model, chosen)) -> None:  # a graph does not hold the memory that it works on
        graph.replay()

    return step


def milliseconds(step: Callable[[], None], repeats: int = 10) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="+", default=["2:4", "4:8", "1:16"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    usual, rows = ways.STEP_WEIGHTS, []
    for layout in args.layouts:
        for optimizer in OPTIMIZERS:
            for pattern in args.patterns:
                steps = {"torch": stepper(layout, optimizer, None, False, usual)}
                steps["two passes"] = stepper(layout, optimizer, pattern, False, usual)
                steps |= {f"fused, {size}": stepper(layout, optimizer, pattern, True, size) for size in args.sizes}
                times = {name: [] for name in steps}
                for _ in range(args.turns):
                    for name, step in steps.items():
                        times[name].append(milliseconds(step))
                row = {"layout": layout, "optimizer": optimizer, "pattern": pattern, "torch_ms": statistics.median(times["torch"])}
                for name in list(steps)[1:]:
                    row[name] = statistics.median(t / base for t, base in zip(times[name], times["torch"], strict=True))
                rows.append(row)
                print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
                del steps
                torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "nofm": nofm.__version__, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
