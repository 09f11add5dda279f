"""Compiled training steps, SR-STE against dense, on one GPU, in a few minutes for all networks.

    python benchmarks/compiled_gpu.py [--cases resnet50-64 transformer] [--patterns 2:4 2:8 1:16] [--only-steady] [--json FILE]

`torch.compile` of the model, eager optimizer; networks, data and optimizers are those of `steps_gpu.py` (bf16 autocast). Compiling is what
takes long, so it is done first and side by side, one process for each network and pattern, into torch's caches on disk. Then there is one
process for each network, which finds everything there (its line says how many graphs came from the cache), and in which dense and sparse
models (the first pattern also with `attach(..., fused=True)`) take turns: first as they are, then as replays of a CUDA graph of the
whole step, where the host has no part. They get ready side by side, and measure one after the other. Kernels have no numbers in their
names here, so that dense and sparse models share the very same code where they compute the same.

Compiling ResNet-50 is minutes of many cores with hardly anything on the GPU. So that it can do other work meanwhile, `--hold FILE` lets
everything get ready and then waits until that file is there.

Beside it one process counts graph breaks and compilations over 200 steps of a ResNet and a ViT, with a learning rate that moves, and
compares compiled masked weights with eager ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import torch
from steps_gpu import CASES, Trainer, cifar_resnet18
from torch import Tensor, nn
from torch.nn import functional as F

import nofm
from nofm import ste

ORDER = ("transformer", "resnet18-cifar-512", "resnet50-64", "resnet50-256")


# ---- what the processes do ----


def set_up(measuring: bool) -> None:
    torch.backends.cudnn.benchmark = measuring
    # Compile the backward pass with the forward pass, and not while activations lie on the GPU: sixteen processes share its memory. It is
    # part of the key in the cache, so all processes must agree on it.
    functorch: Any = torch._functorch.config  # type: ignore[attr-defined]
    functorch.force_non_lazy_backward_lowering = True


def cache_counts() -> str:
    from torch._dynamo.utils import counters

    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    hits = [inductor["fxgraph_cache_hit"], autograd["autograd_cache_hit"]]
    misses = [inductor[name] for name in ("fxgraph_cache_miss", "fxgraph_cache_bypass")]
    misses += [autograd[name] for name in ("autograd_cache_miss", "autograd_cache_bypass")]
    return f"from the cache: {hits[0]} graphs, {hits[1]} whole models; not: {sum(misses[:2])}, {sum(misses[2:])}"


def make_trainer(case: str, what: str, data: tuple[Tensor, Tensor]) -> Trainer:
    pattern, _, fused = what.partition(" ")
    trainer = Trainer(case, None if what == "dense" else pattern, True, False, data, fused=bool(fused))
    for attempt in range(10):
        try:
            trainer.block(1)
            return trainer
        except torch.OutOfMemoryError:  # the others are at it as well
            torch.cuda.empty_cache()
            time.sleep(1 + attempt)
    raise SystemExit(f"{case} {what}: out of memory ten times")


def warm(case: str, what: str) -> None:
    make_trainer(case, what, CASES[case][1]())
    print(cache_counts(), flush=True)


def measure(case: str, patterns: list[str], blocks: int, block_seconds: float) -> None:
    """Says it is ready, waits for a line, and prints a line of JSON for each model, twice."""
    data = CASES[case][1]()
    fused = f"{patterns[0]} fused"  # the same compiled model; the term goes into the optimizer's pass
    trainers = {what: make_trainer(case, what, data) for what in ("dense", *patterns, fused)}
    for trainer in trainers.values():
        trainer.block(3)
    torch.cuda.empty_cache()
    print("READY", cache_counts(), flush=True)
    sys.stdin.readline()
    for mode in ("compiled", "compiled graph"):
        pool = torch.cuda.graph_pool_handle()  # shared: they take turns, and five networks of batch 256 would not fit side by side
        for trainer in trainers.values():
            if mode == "compiled graph":
                trainer.capture(pool)
            trainer.block(2)
        for row in taking_turns(trainers, blocks, block_seconds):
            print("ROW", json.dumps({"case": case, "mode": mode, **row}), flush=True)


def taking_turns(trainers: dict[str, Trainer], blocks: int, block_seconds: float) -> list[dict[str, Any]]:
    steps = max(2, min(10, round(block_seconds / trainers["dense"].block(3)[0])))
    times: dict[str, list[tuple[float, float]]] = {what: [] for what in trainers}
    for _ in range(blocks):
        for what, trainer in trainers.items():
            times[what].append(trainer.block(steps))
    dense, rows = [seconds for seconds, _ in times["dense"]], []
    for what, measured in times.items():
        ratios = [seconds / base for (seconds, _), base in zip(measured, dense, strict=True)]
        row: dict[str, Any] = {"what": what, "ms": 1e3 * statistics.median(s for s, _ in measured)}
        row |= {"more_percent": 100 * (statistics.median(ratios) - 1), "spread_percent": 100 * statistics.stdev(ratios)}
        row |= {"host_ms": 1e3 * statistics.median(h for _, h in measured), "blocks": blocks, "steps": steps}
        rows.append(row)
    return rows


def small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(image_size=32, patch_size=4, num_layers=4, num_heads=4, hidden_dim=128, mlp_dim=256, num_classes=10)


def steady(device: str = "cuda", steps: int = 200) -> None:
    """Prints a line of JSON for each network: graphs, breaks and recompilations over many steps, and whether masks are those of eager."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    for name, network in (("resnet18", cifar_resnet18()), ("vit", small_vit())):
        torch._dynamo.reset()
        counters.clear()
        model = network.to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
        nofm.sparsify_(model, "2:4")
        nofm.attach(nofm.SRSTE(decay=2e-4), model, optimizer)
        counter = CompileCounterWithBackend("inductor")
        compiled = torch.compile(model, backend=counter)
        x, y = torch.randn(16, 3, 32, 32, device=device), torch.randint(10, (16,), device=device)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / steps)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(compiled(x), y)
            loss.backward()
            optimizer.step()
        nodes = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
        row: dict[str, Any] = {"model": name, "steps": steps, "graph_breaks": sum(counters["graph_break"].values())}
        row |= {"recompilations": counter.frame_count - 1, "sparse_layers": len(list(nofm.sites(model)))}
        row |= {"masked_by_our_kernel": sum("nofm.masked" in node or "triton_kernel_wrapper" in node for node in nodes)}
        print("STEADY", json.dumps(row | {"masks_equal_eager": same_masks(model)}), flush=True)


def same_masks(model: nn.Module) -> bool:
    sites = list(nofm.sites(model))

    def seen(weights: list[Tensor]) -> list[Tensor]:
        return [ste.straight_through(w, site.grouping, None, torch.bfloat16) for w, site in zip(weights, sites, strict=True)]

    weights = [site.weight.detach() for site in sites]
    torch._dynamo.reset()
    return all(torch.equal(a, b) for a, b in zip(torch.compile(seen)(weights), seen(weights), strict=True))


# ---- who starts them ----


class Child:
    """A process of this script, its output in a file, so that nobody waits for a reader."""

    def __init__(self, name: str, folder: Path, arguments: list[str], threads: int) -> None:
        self.name, self.began, self.seen = name, time.perf_counter(), 0
        self.out, self.err = folder / f"{name}.out".replace(":", "of"), folder / f"{name}.err".replace(":", "of")
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_UNIQUE_KERNEL_NAMES": "0",
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "OMP_NUM_THREADS": "1",
        }
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process: subprocess.Popen[str] = subprocess.Popen(
                [sys.executable, __file__, *arguments], env=environment, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True
            )

    def new_lines(self) -> list[str]:
        """Whole lines of output that have not been asked for yet."""
        lines = [line for line in self.out.read_text().splitlines(keepends=True) if line.endswith("\n")]
        fresh, self.seen = lines[self.seen :], len(lines)
        return [line.rstrip() for line in fresh]

    def go(self) -> None:
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write("go\n")
        stdin.flush()

    def is_done(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> None:
        if not self.is_done():
            self.process.kill()
            self.process.wait()

    def trouble(self) -> str:
        """Why it is of no use, or nothing."""
        if not self.is_done():
            return "out of time"
        return "" if self.process.returncode == 0 else f"failed: {self.err.read_text()[-1500:]}"


class Run:
    """All results so far, printed as they come and written to the file each time."""

    def __init__(self, path: str) -> None:
        self.path, self.began = path, time.perf_counter()
        self.found: dict[str, Any] = {"torch": torch.__version__, "nofm": nofm.__version__, "rows": [], "steady": [], "notes": []}

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.began:6.1f} s  {text}", flush=True)

    def note(self, text: str) -> None:
        self.say(text)
        self.found["notes"].append(text)

    def take(self, line: str) -> None:
        """A line of a child's output."""
        kind, _, rest = line.partition(" ")
        if kind not in ("ROW", "STEADY"):
            return
        row = json.loads(rest)
        self.found["rows" if kind == "ROW" else "steady"].append(row)
        self.say(" ".join(f"{key}={value:.2f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()))
        if self.path:
            Path(self.path).write_text(json.dumps(self.found, indent=1))


def fill_the_caches(run: Run, args: argparse.Namespace, folder: Path) -> None:
    children = [Child("steady", folder, ["--role", "steady"], 1)]
    for case in [] if args.only_steady else args.cases:
        for what in ("dense", *args.patterns):
            threads = (2 if "50" in case else 1) * (2 if what.endswith(":16") else 1)  # sorting networks take long to compile
            children.append(Child(f"{case}-{what}", folder, ["--role", "warm", "--case", case, "--what", what], threads))
    waiting = list(children)
    while waiting and time.perf_counter() - run.began < args.compile_limit:
        time.sleep(0.5)
        for child in [child for child in waiting if child.is_done()]:
            waiting.remove(child)
            for line in child.new_lines():
                run.take(line)
            run.say(f"{child.name}: {child.trouble() or 'compiled'} after {time.perf_counter() - child.began:.0f} s")
    for child in waiting:
        child.stop()
        for line in child.new_lines():
            run.take(line)
        run.note(f"{child.name}: not compiled within {args.compile_limit:.0f} s")


def measure_all(run: Run, args: argparse.Namespace, folder: Path) -> None:
    passed_on = ["--patterns", *args.patterns, "--blocks", str(args.blocks), "--block-seconds", str(args.block_seconds)]
    children = [Child(f"measure-{case}", folder, ["--role", "measure", "--case", case, *passed_on], 4) for case in args.cases]
    deadline, waiting = time.perf_counter() + args.ready_limit, list(children)
    try:
        while waiting and time.perf_counter() < deadline:
            time.sleep(0.2)
            for child in list(waiting):
                ready = [line for line in child.new_lines() if line.startswith("READY")]
                if ready or child.is_done():
                    waiting.remove(child)
                    run.say(f"{child.name}: {ready[0] if ready else child.trouble()}")
        for child in children:
            if child in waiting:
                run.note(f"{child.name}: not ready within {args.ready_limit:.0f} s")
                child.stop()
        if args.hold:
            run.say(f"ready, waiting for {args.hold}")
            while not args.hold.exists():
                time.sleep(0.2)
        for child in [child for child in children if not child.is_done()]:
            measure_one(run, child, args.measure_limit)
    finally:
        for child in children:
            child.stop()


def measure_one(run: Run, child: Child, limit: float) -> None:
    child.go()
    deadline = time.perf_counter() + limit
    while not child.is_done() and time.perf_counter() < deadline:
        time.sleep(0.2)
        for line in child.new_lines():
            run.take(line)
    child_is_late = not child.is_done()
    child.stop()
    for line in child.new_lines():
        run.take(line)
    if child_is_late or child.process.returncode:
        run.note(f"{child.name}: {'out of time' if child_is_late else child.trouble()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=ORDER, default=list(ORDER))
    parser.add_argument("--patterns", nargs="+", default=["2:4", "2:8", "1:16"])
    parser.add_argument("--only-steady", action="store_true", help="only count graph breaks and recompilations")
    parser.add_argument("--hold", type=Path, metavar="FILE", help="when all is ready to be measured, wait until this file is there")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--block-seconds", type=float, default=0.2)
    parser.add_argument("--compile-limit", type=float, default=200, help="seconds until measuring begins, compiled or not")
    parser.add_argument("--ready-limit", type=float, default=100, help="seconds for the measuring processes to get ready")
    parser.add_argument("--measure-limit", type=float, default=60, help="seconds for each network's measurement")
    parser.add_argument("--cache", default="", help="folder for the caches; a new one if none is given")
    parser.add_argument("--json", default="")
    parser.add_argument("--role", choices=("warm", "measure", "steady"), help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        set_up(measuring=args.role == "measure")
    if args.role == "warm":
        warm(args.case, args.what)
    elif args.role == "measure":
        measure(args.case, args.patterns, args.blocks, args.block_seconds)
    elif args.role == "steady":
        steady()
    else:
        run, folder = Run(args.json), Path(args.cache or tempfile.mkdtemp(prefix="compiled_gpu_"))
        folder.mkdir(parents=True, exist_ok=True)
        run.say(f"torch {torch.__version__}, caches in {folder}")
        fill_the_caches(run, args, folder)
        if not args.only_steady:
            measure_all(run, args, folder)
        run.say("done")


if __name__ == "__main__":
    main()
