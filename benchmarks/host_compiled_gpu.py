"""Where the host's time goes in a training step, dense against SR-STE, compiled or eager.

    python benchmarks/host_compiled_gpu.py [--blocks 6] [--what dense 2:4 "2:4 fused" ...] [--eager] [--device cpu] [--json FILE]

The network of `compiled_gpu.py` (Transformer blocks of four linear layers) made narrow and given few tokens, so that a GPU never keeps the
host waiting and what is timed is the host alone. Prints for each model milliseconds a step in forward, zero_grad, backward and
optimizer.step (models take turns; medians), and what is more than dense; then kernels and copies of a step, by name (torch.profiler);
and the functions that take more time in the sparse step than in the dense one (cProfile).
"2:4 fused" is `attach(fused=True)`; "2:4 plain" masks by plain torch operations, which Inductor fuses, in place of our kernel;
"2:4 static" lets Inductor launch our kernel as it launches its own (an option of torch.compile).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from steps_gpu import Block
from torch import Tensor, nn
from torch.nn import functional as F

import nofm
from nofm.masks import Grouping

PARTS = ("forward", "zero_grad", "backward", "step")


class Narrow(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.body = nn.Sequential(*[Block(width, 4) for _ in range(blocks)])
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens))).flatten(0, 1)


def plain(weight: Tensor, grouping: Grouping, stored: Tensor | None) -> Tensor:
    """What `ste.straight_through` gives, by operations that Inductor fuses."""
    seen = weight.clone()
    with torch.no_grad():
        seen.masked_fill_(~grouping.mask(weight), 0.0)
    return seen


class Trainer:
    """A model that takes steps, part by part."""

    def __init__(self, what: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device, (pattern, _, how) = torch.device(args.device), what.partition(" ")
        model = Narrow(args.blocks, args.width).to(self.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if pattern != "dense":
            nofm.sparsify_(model, pattern)
            nofm.attach(nofm.SRSTE(decay=2e-4), model, self.optimizer, fused=how == "fused")
            for site in nofm.sites(model) if how == "plain" else ():
                site.look_through(plain)
        options = {"static_launch_user_defined_triton_kernels": True} if how == "static" else None
        self.run: Callable[[Tensor], Tensor] = model if args.eager else torch.compile(model, options=options)
        self.x = torch.randint(64, (2, args.tokens), device=self.device)
        self.y = torch.randint(64, (2 * args.tokens,), device=self.device)
        for _ in range(5):  # compiles, and starts what is kept from step to step
            self.step()

    def step(self) -> list[float]:
        """Takes a step; seconds of the host for each part."""
        began = time.perf_counter()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            out = self.run(self.x)
        forward = time.perf_counter()
        loss = F.cross_entropy(out.float(), self.y)
        with_loss = time.perf_counter()
        self.optimizer.zero_grad()
        zeroed = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        return [forward - began, zeroed - with_loss, backward - zeroed, time.perf_counter() - backward]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def taking_turns(trainers: dict[str, Trainer], blocks: int, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step of each model, by part; medians over blocks of the median over a block's steps."""
    found: dict[str, list[list[float]]] = {what: [] for what in trainers}
    for _ in range(blocks):
        for what, trainer in trainers.items():
            trainer.wait()
            trainer.step()
            taken = [trainer.step() for _ in range(steps)]
            found[what].append([statistics.median(part) for part in zip(*taken, strict=True)])
    rows = {}
    for what, rounds in found.items():
        row = {part: 1e3 * statistics.median(each) for part, each in zip(PARTS, zip(*rounds, strict=True), strict=True)}
        totals = [1e3 * sum(each) for each in rounds]
        rows[what] = {**row, "all": statistics.median(totals), "spread": statistics.stdev(totals)}
    return rows


def launches(trainer: Trainer, steps: int = 5) -> dict[str, float]:
    """Kernels and copies (on the CPU: operators) of a step, by name, and calls of CUDA."""
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (trainer.device.type == "cuda")
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            trainer.step()
        trainer.wait()
    on_gpu = trainer.device.type == "cuda"
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    names = Counter(event.name for event in profile.events() if event.device_type == wanted)
    calls = Counter(
        e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CPU and e.name.startswith(("cuda", "cu"))
    )
    return {**{f"call {n}": c / steps for n, c in calls.items()}, **{n: c / steps for n, c in names.items()}}


def by_function(trainer: Trainer, steps: int) -> dict[str, tuple[float, float, float]]:
    """Calls, own time and time with what it calls (us a step) of each Python function."""
    trainer.wait()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        trainer.step()
    profile.disable()
    stats: Any = pstats.Stats(profile)
    found: dict[str, tuple[float, float, float]] = {}
    for (file, _, name), (_, calls, own, cumulative, _) in stats.stats.items():
        short = "/".join(file.split("/")[-2:])
        short = "(compiled code)" if "torchinductor" in file else short
        before = found.get(f"{short}:{name}", (0.0, 0.0, 0.0))
        found[f"{short}:{name}"] = before[0] + calls / steps, before[1] + 1e6 * own / steps, before[2] + 1e6 * cumulative / steps
    return found


def print_differences(what: str, sparse: dict[str, Any], dense: dict[str, Any], top: int) -> None:
    nothing = (0.0, 0.0, 0.0)
    for place, title in ((1, "own time"), (2, "time with what it calls")):
        print(f"\n-- {what} more than dense, us a step under cProfile, by {title}: us | calls | us in dense")
        more = {name: values[place] - dense.get(name, nothing)[place] for name, values in sparse.items()}
        more |= {name: -values[place] for name, values in dense.items() if name not in sparse}
        for name in sorted(more, key=lambda name: -abs(more[name]))[:top]:
            calls = sparse.get(name, nothing)[0] - dense.get(name, nothing)[0]
            print(f"{more[name]:9.1f} {calls:+7.1f} {dense.get(name, nothing)[place]:9.1f}  {name}")


def print_launches(counts: dict[str, dict[str, float]], top: int) -> None:
    dense = counts["dense"]
    for what, found in counts.items():
        kernels = sum(n for name, n in found.items() if not name.startswith("call "))
        print(f"\n-- {what}: {kernels:.1f} kernels and copies (or operators) a step; different from dense:")
        differ = {name: found.get(name, 0) - dense.get(name, 0) for name in {*found, *dense}}
        for name in sorted(differ, key=lambda name: -abs(differ[name]))[:top]:
            if differ[name]:
                print(f"{differ[name]:+8.1f}  {name[:130]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--what", nargs="+", default=["dense", "2:4", "2:4 fused", "2:4 plain", "2:4 static"], help="dense must be one of them"
    )
    parser.add_argument("--blocks", type=int, default=6, help="Transformer blocks, of four sparse layers each")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--top", type=int, default=30, help="lines of each list")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if "dense" not in args.what:
        parser.error("what is more than dense needs dense")
    torch.set_num_threads(1)
    began, trainers = time.perf_counter(), {}
    print(f"torch {torch.__version__}, {'eager' if args.eager else 'compiled'}, {4 * args.blocks} sparse layers, {args.device}", flush=True)
    for what in args.what:
        trainers[what] = Trainer(what, args)
        print(f"{time.perf_counter() - began:6.1f} s  {what} is ready", flush=True)
    rows = taking_turns(trainers, args.turns, args.steps)
    for what, row in rows.items():
        text = "  ".join(f"{name} {value:7.3f} ({value - rows['dense'][name]:+.3f})" for name, value in row.items() if name != "spread")
        print(f"{what:12s} ms of the host: {text}  spread {row['spread']:.3f}", flush=True)
    counts = {what: launches(trainer) for what, trainer in trainers.items()}
    print_launches(counts, args.top)
    profiles = {what: by_function(trainer, 3 * args.steps) for what, trainer in trainers.items()}
    for what in trainers:
        if what != "dense":
            print_differences(what, profiles[what], profiles["dense"], args.top)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "arguments": vars(args), "rows": rows, "launches": counts}, file, indent=1)
    print(f"\n{time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
