"""Convolutions of few channels on a GPU: plain, and with parts of the batch side by side as groups (`nofm.tasks.narrow`).

    python benchmarks/narrow_gpu.py [--images 512] [--json FILE]

Forward, gradient of the input and gradient of the weight, each 20 times in one CUDA graph, in bf16 and channels_last, with cuDNN choosing
its algorithms. All ways of one convolution are timed in turns, five rounds, and the median counts. What lies between convolutions is the
same either way and left out; `epoch_gpu.py --parts 1 4` times whole trainings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from masks_gpu import timed
from torch import Tensor
from torch.nn import functional as F

REPEATS, ROUNDS = 20, 5
# Inputs, outputs, height and width, stride, and the parts that are compared.
CASES = (
    (16, 16, 32, 1, (1, 2, 4, 8, 16)),
    (32, 32, 16, 1, (1, 2, 4)),
    (64, 64, 8, 1, (1, 2)),
    (16, 32, 32, 2, (1, 4, 8)),
)


def replayed(work: Callable[[], object]) -> Callable[[], object]:
    """`work`, so many times, as a graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(REPEATS):
                work()
    torch.cuda.synchronize()

    def replay(kept: object = work) -> None:  # a graph does not hold the memory that it works on
        graph.replay()

    return replay


def works(images: int, c_in: int, c_out: int, size: int, stride: int, parts: int) -> dict[str, Callable[[], object]]:
    """Forward and both gradients of one convolution."""
    made = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(images // parts, parts * c_in, size, size, **made).to(memory_format=torch.channels_last)
    weight = torch.randn(parts * c_out, c_in, 3, 3, **made).to(memory_format=torch.channels_last)
    grad = torch.randn_like(F.conv2d(x, weight, stride=stride, padding=1, groups=parts))

    def backward(of_input: bool) -> tuple[Tensor | None, ...]:
        asked = [of_input, not of_input, False]
        return torch.ops.aten.convolution_backward(grad, x, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], parts, asked)

    forward = lambda: F.conv2d(x, weight, stride=stride, padding=1, groups=parts)  # noqa: E731
    return {"forward": forward, "input": lambda: backward(True), "weight": lambda: backward(False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = []
    for c_in, c_out, size, stride, all_parts in CASES:
        made = {parts: works(args.images, c_in, c_out, size, stride, parts) for parts in all_parts}
        functions = {f"{parts} {name}": replayed(work) for parts, named in made.items() for name, work in named.items()}
        seconds = timed(functions, repeats=ROUNDS, warm=1, inner=1)
        microseconds = {name: 1e6 * value / REPEATS for name, value in seconds.items()}
        for parts in all_parts:
            took = {name: microseconds[f"{parts} {name}"] for name in made[parts]}
            plain = sum(microseconds[f"1 {name}"] for name in took)
            rows.append({"in": c_in, "out": c_out, "size": size, "stride": stride, "parts": parts, **took})
            said = ", ".join(f"{name} {value:.1f} us" for name, value in took.items())
            what = f"{c_in} to {c_out} channels, {size} x {size}, stride {stride}, {parts} parts"
            print(f"{what}: {said}, {sum(took.values()) / plain:.2f} of plain", flush=True)
    if args.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "images": args.images, "rows": rows}
        Path(args.json).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
