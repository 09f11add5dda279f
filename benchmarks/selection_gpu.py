"""Choosing the largest weights, and drawing, on the GPU: Triton against plain torch, as a CUDA graph replays them.

    python benchmarks/selection_gpu.py [--json FILE]

What methods do in every step that choose weights anew: `strongest` (UnstructuredSTE: 10 % of each layer), `best` (Deep R: 1 % of the places
that are not taken, by a count on the device) and `draw` (Deep R). Single layers, and all 20 of a ResNet-18 for CIFAR together. Both ways
are captured once and replayed in turns in the same run (CUDA events, median). What they give is compared first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch
from masks_gpu import timed
from torch import Tensor

import nofm
from nofm.kernels import selection
from nofm.kernels.select import Path, use
from nofm.methods.draws import draw
from nofm.methods.pruning import strongest

SINGLE = {"36,864": (64, 64, 3, 3), "589,824": (256, 256, 3, 3), "2,359,296": (512, 512, 3, 3)}


def resnet18() -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), *[(64, 64, 3, 3)] * 4]
    for width in (128, 256, 512):
        shapes += [(width, width // 2, 3, 3), *[(width, width, 3, 3)] * 3, (width, width // 2, 1, 1)]
    return shapes


def tasks(shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], list[Tensor]]]:
    torch.manual_seed(0)
    weights = [torch.randn(shape, device="cuda") * 0.05 for shape in shapes]
    uniform = [torch.rand(shape, device="cuda") for shape in shapes]
    free = [torch.rand(shape, device="cuda") < 0.9 for shape in shapes]
    counts = [mask.sum() // 100 for mask in free]
    number = torch.tensor(5, device="cuda")

    def drawn() -> list[Tensor]:
        return [part for i, shape in enumerate(shapes) for part in draw(0, str(i), number, torch.Size(shape))]

    return {
        "strongest": partial(strongest, weights, [w.numel() // 10 for w in weights]),
        "best": partial(selection.largest, uniform, counts, free),
        "draw": drawn,
    }


def captured(task: Callable[[], list[Tensor]], path: Path) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with use(path):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                task()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            results = task()
    return graph, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, nofm {nofm.__version__}")
    rows = []
    for layers, shapes in {**{name: [shape] for name, shape in SINGLE.items()}, "ResNet-18": resnet18()}.items():
        for name, task in tasks(shapes).items():
            (old, expected), (new, found) = captured(task, "torch"), captured(task, "triton")
            old.replay(), new.replay()
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (layers, name)
            seconds = timed({"torch": old.replay, "triton": new.replay})
            row = {"layers": layers, "weights": sum(torch.Size(shape).numel() for shape in shapes), "task": name}
            row |= {f"{path}_us": value * 1e6 for path, value in seconds.items()}
            row["torch_over_triton"] = seconds["torch"] / seconds["triton"]
            rows.append(row)
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
