"""Mask and masked copy on the GPU: bandwidth as a share of a plain copy's, and speed against argsort + scatter.

    python benchmarks/masks_gpu.py [--weights 67108864] [--json FILE]

Each figure is a ratio of two things timed in turns in the same run (CUDA events, median), on random data. Copy and masked copy both go
from fp32 to bf16: 4 bytes read and 2 written a weight. The masks of all timed tensors are compared with the oracle first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch

import nofm
from nofm.kernels import multi, reference
from nofm.masks import Grouping
from nofm.patterns import Pattern

PATTERNS = ("1:2", "2:4", "1:4", "4:8", "2:8", "1:16", "8:16", "16:32")


def timed(functions: dict[str, Callable[[], object]], repeats: int = 30, warm: int = 3, inner: int = 10) -> dict[str, float]:
    """Median seconds of each, run in turns, `inner` times in a row so that the GPU never waits for the host."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm + repeats):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                function()
            end.record()
            end.synchronize()
            if turn >= warm:
                times[name].append(start.elapsed_time(end) / 1e3 / inner)
    return {name: statistics.median(values) for name, values in times.items()}


def released_formulation(w: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """How the code released with the paper makes a masked weight (groups contiguous)."""
    groups = w.detach().abs().reshape(-1, m)
    pruned = torch.argsort(groups, dim=1)[:, : m - n]
    mask = torch.ones_like(groups).scatter_(1, pruned, 0).reshape(w.shape)
    return w * mask


def layouts(weights: int) -> dict[str, torch.Tensor]:
    side = int(weights**0.5) // 1024 * 1024
    o = weights // (1024 * 9)
    return {
        "linear": torch.randn(side, weights // side, device="cuda"),
        "conv 3x3, channels_last": torch.randn(o, 1024, 3, 3, device="cuda").to(memory_format=torch.channels_last),
        "conv 3x3, contiguous": torch.randn(o, 1024, 3, 3, device="cuda"),
        "transposed": torch.randn(side, weights // side, device="cuda").t(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=1 << 26)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, nofm {nofm.__version__}")
    rows = []
    for layout, w in layouts(args.weights).items():
        for text in PATTERNS:
            pattern = Pattern(text)
            grouping, out = Grouping(pattern), torch.empty_like(w, dtype=torch.bfloat16)
            fleet = multi.Fleet()
            fleet.masked_into([w], [grouping], [out])
            part = slice(0, 64)
            assert torch.equal(out[part], torch.where(reference.mask(w[part], grouping), w[part], 0.0).bfloat16()), (layout, text)
            seconds = timed({"copy": partial(out.copy_, w), "masked": partial(fleet.masked_into, [w], [grouping], [out])})
            row = {"layout": layout, "pattern": text, "weights": w.numel()}
            row |= {f"{name}_us": value * 1e6 for name, value in seconds.items()}
            row["share_of_copy"] = seconds["copy"] / seconds["masked"]
            row["gb_per_s"] = 6 * w.numel() / seconds["masked"] / 1e9
            if layout == "linear":
                released = partial(released_formulation, w, pattern.n, pattern.m)
                row["argsort_over_masked"] = timed({"argsort": released}, repeats=3, warm=1, inner=1)["argsort"] / seconds["masked"]
            rows.append(row)
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
