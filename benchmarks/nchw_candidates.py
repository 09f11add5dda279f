"""Ways to the groups of NCHW convolutions, side by side: which one `nofm.kernels.ways.IN_ORDER` should name for (kernel positions, M).

    python benchmarks/nchw_candidates.py [--patterns 1:2 4:8] [--positions 9 25 49] [--refine] [--seconds 55] [--json FILE]

Masked copy of 67 M weights, fp32 to bf16, as a share of the bandwidth of a plain copy timed in turns with it (with --refine: the SR-STE
term onto fp32 gradients, as a share of `grad.add_(w)`). Every result is compared with the oracle on the first and last rows and with the
present kernel everywhere, before it is timed. Stops early rather than run for more than --seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from masks_gpu import timed
from torch import Tensor

from nofm.kernels import reference, ways
from nofm.kernels.multi import Fleet
from nofm.kernels.ways import Way, whole_blocks
from nofm.masks import Grouping
from nofm.patterns import Pattern

WEIGHTS = 1 << 26


def candidates(positions: int, m: int, refine: bool) -> dict[str, Way | None]:
    """By name, what to try; None is what is there now."""
    found: dict[str, Way | None] = {"walk 128 (now)": None, "walk 512": Way("walk", 512)}
    for size, stretches in ((2048, 1), (2048, 4), (2048, 8), (1024, 4), (4096, 1), (4096, 4)):
        if whole_blocks(size, m, positions) > 0.9 * size and size // m >= 128:  # a group for each thread
            found[f"exchange {size} x {stretches}"] = Way("exchange", size, stretches)
    block = m * positions
    for rows in () if refine else (1, 2, 4):
        if rows * block <= 72 and rows * block % 4 == 0:
            found[f"blocks {rows * block}"] = Way("blocks", 128, row=rows * block)
    return found


def runner(w: Tensor, out: Tensor, grouping: Grouping, way: Way | None, refine: bool) -> Callable[[], None]:
    """One call of a candidate. A fleet plans at its first call, and keeps to its plan."""
    key = (w.stride(1), grouping.pattern.m)
    ways.IN_ORDER.pop(key, None)
    if way is not None:
        ways.IN_ORDER[key] = way
    fleet, one = Fleet(), torch.ones(1, device="cuda")
    call = (
        partial(fleet.refine_into, [w], [grouping], [out], one, one, False)
        if refine
        else partial(fleet.masked_into, [w], [grouping], [out])
    )
    call()
    ways.IN_ORDER.pop(key, None)
    return call


def compare(w: Tensor, grouping: Grouping, result: Tensor, present: Tensor, what: str) -> None:
    assert torch.equal(result, present), f"{what} differs from the present kernel"
    for rows in (slice(0, 16), slice(w.shape[0] - 16, w.shape[0])):
        mask = reference.mask(w[rows], grouping)
        kept = mask if result.dtype == torch.bfloat16 else ~mask  # the term, with a factor of 1 onto zeros, is the pruned weights
        assert torch.equal(result[rows], torch.where(kept, w[rows], 0.0).to(result.dtype)), f"{what} differs from the oracle"


def rows(args: argparse.Namespace, began: float) -> Iterator[dict[str, object]]:
    for positions in args.positions:
        side = int(positions**0.5)
        w = torch.randn(WEIGHTS // (512 * positions), 512, side, side, device="cuda")
        for text in args.patterns:
            grouping, calls, compile_s = Grouping(Pattern(text)), {}, {}
            out = present = torch.zeros_like(w, dtype=torch.float32 if args.refine else torch.bfloat16)
            for name, way in candidates(positions, grouping.pattern.m, args.refine).items():
                if time.perf_counter() - began > args.seconds:
                    print("out of time before", positions, text, name)
                    break
                out.zero_()
                torch.cuda.synchronize()
                start = time.perf_counter()
                calls[name] = runner(w, out, grouping, way, args.refine)
                torch.cuda.synchronize()
                compile_s[name] = time.perf_counter() - start
                present = out.clone() if way is None else present
                compare(w, grouping, out, present, f"{name} at {text}, {positions} positions")
            if not calls:
                return
            copy = partial(out.add_, w, alpha=1e-4) if args.refine else partial(out.copy_, w)
            seconds = timed({"copy": copy, **calls}, repeats=10, warm=1)
            for name in calls:
                share = seconds["copy"] / seconds[name]
                yield {"positions": positions, "pattern": text, "way": name, "us": 1e6 * seconds[name], "share_of_copy": share,
                       "first_call_s": compile_s[name]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="+", default=["1:2", "2:4", "4:8", "8:16"])
    parser.add_argument("--positions", nargs="+", type=int, default=[9, 25, 49])
    parser.add_argument("--refine", action="store_true")
    parser.add_argument("--seconds", type=float, default=55)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    began, found = time.perf_counter(), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'positions':>9} {'pattern':>7}  {'way':18} {'us':>8} {'share of copy':>14} {'first call s':>13}")
    for row in rows(args, began):
        found.append(row)
        print("{positions:9d} {pattern:>7}  {way:18} {us:8.1f} {share_of_copy:14.3f} {first_call_s:13.1f}".format(**row), flush=True)
    print(f"{time.perf_counter() - began:.0f} s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
