"""How the cost grows: time a weight from 10^6 to 10^9 weights, and the host's time for a step from 10 to 1,000 layers.

python benchmarks/scaling_gpu.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

import torch
from masks_gpu import timed
from torch import nn

import nofm
from nofm.kernels.multi import Fleet
from nofm.masks import Grouping
from nofm.patterns import Pattern


def by_weights() -> list[dict[str, float]]:
    """The masked copy (fp32 to bf16) of one 2:4 weight, beside a plain copy of it."""
    rows = []
    for size in (10**6, 4 * 10**6, 16 * 10**6, 64 * 10**6, 256 * 10**6, 1024 * 10**6):
        w = torch.randn(size // 1000, 1000, device="cuda")
        out, fleet, grouping = torch.empty_like(w, dtype=torch.bfloat16), Fleet(), Grouping(Pattern("2:4"))
        seconds = timed({"copy": partial(out.copy_, w), "masked": partial(fleet.masked_into, [w], [grouping], [out])}, repeats=10)
        rows.append(
            {
                "weights": w.numel(),
                "ps_a_weight": 1e12 * seconds["masked"] / w.numel(),
                "share_of_copy": seconds["copy"] / seconds["masked"],
            }
        )
        print({k: round(v, 3) for k, v in rows[-1].items()}, flush=True)
    return rows


def host_seconds(layers: int, sparse: bool) -> float:
    """The host's time for one step of a stack of small linear layers; the GPU has little to do."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(layers)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    if sparse:
        nofm.sparsify_(model, "2:4")
        nofm.attach(nofm.SRSTE(decay=2e-4), model, optimizer)
    x, times = torch.randn(8, 64, device="cuda"), []
    for turn in range(25):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if turn >= 5:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def by_layers() -> list[dict[str, float]]:
    rows = []
    for layers in (10, 30, 100, 300, 1000):
        dense, sparse = host_seconds(layers, False), host_seconds(layers, True)
        rows.append(
            {"layers": layers, "dense_ms": 1e3 * dense, "sparse_ms": 1e3 * sparse, "more_us_a_layer": 1e6 * (sparse - dense) / layers}
        )
        print({k: round(v, 3) for k, v in rows[-1].items()}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "by_weights": by_weights(), "by_layers": by_layers()}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
