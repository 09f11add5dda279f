"""Whole networks on the CPU, dense and without their zeros (`nofm.pack_`): fp32, in turns, medians.

    python benchmarks/inference_cpu.py [--networks torchvision/resnet50 ...] [--patterns 2:4 1:4 1:16] [--batches 1 16] [--threads 1]
                                       [--compile] [--json FILE]
    python benchmarks/inference_cpu.py --linear 4096 [--batches 1 8 64 512] ...     one linear layer of that many inputs and outputs

Weights are from chance and pruned by magnitude, which is all the same to the time. Ratios are to the faster dense network: eager in both
memory layouts, and with --compile both compiled by torch's inductor.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

import nofm
from nofm.deploy import bench
from nofm.tasks.models import build_model


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    )
    return names[0] if names else platform.processor()


def measured(name: str, pattern: str, batch: int, compiled: bool) -> dict[str, object]:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = build_model(name, 1000, 3).eval()
    nofm.sparsify_(model, pattern)
    nofm.fold_(model)
    found = bench(model, torch.randn(batch, 3, 224, 224), rounds=9, compiled=compiled)
    ms = {what: round(1e3 * seconds, 3) for what, seconds in found.seconds.items()}
    layers = [row for row in found.packing.rows if row.without_zeros]
    row = {
        "network": name,
        "pattern": pattern,
        "batch": batch,
        "packed_layers": found.packing.packed,
        "layers": len(layers),
        "ms": ms,
        "times_faster": round(found.speed_up, 3),
    }
    if compiled:
        row["times_faster_compiled"] = round(ms["dense, compiled"] / ms["packed, compiled"], 3)
    return row


def linear(size: int, pattern: str, batch: int) -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(size, size)).eval()
    nofm.sparsify_(model, pattern, preset="all")
    nofm.fold_(model)
    (row,) = nofm.pack_(model, torch.randn(batch, size), only_faster=False).rows
    ms = {"dense": round(1e3 * row.dense, 4), "packed": round(1e3 * row.without_zeros, 4)}
    return {
        "layer": f"linear {size} x {size}",
        "pattern": pattern,
        "batch": batch,
        "ms": ms,
        "times_faster": round(ms["dense"] / ms["packed"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["torchvision/resnet50", "torchvision/resnet18", "timm/vit_small_patch16_224"])
    parser.add_argument("--patterns", nargs="+", default=["2:4", "1:4", "1:8", "1:16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--linear", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    about = {"processor": processor(), "threads": args.threads, "torch": torch.__version__, "isa": torch.backends.cpu.get_cpu_capability()}
    print(about, flush=True)
    rows = []
    for name in args.networks if args.linear is None else [args.linear]:
        for batch in args.batches:
            for pattern in args.patterns:
                rows.append(measured(name, pattern, batch, args.compile) if args.linear is None else linear(name, pattern, batch))
                print(rows[-1], flush=True)
                if args.json:  # whatever comes after, these are measured
                    args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
