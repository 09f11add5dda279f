"""Train RAFT for optical flow, dense or N:M sparse, with an ordinary loop; results as JSON and pictures.

    python examples/flow.py --pack stamps-train.npz stamps-val.npz --method srste --pattern 2:4 --precision bf16 --seeds 0 1 2 \\
        --eval sintel=/data/Sintel --eval middlebury=/data/middlebury --out results/flow-srste.json --pictures results/flow-srste
    python examples/flow.py --sources packages --pairs 2000 --workers 16 ...      # render the pairs first (see make_stamps.py)
    python examples/flow.py --chairs /data/FlyingChairs --crop 368 496 --steps 100000 --batch 10 --workers 12 ...

The defaults are sized for one GPU; the recipe flow/stamps has smaller crops (--crop 160 224 --batch 8 --steps 5000). Every convolution is
sparse as in the paper, but for those whose input channels the pattern does not divide: the two that read frames (3 channels) and the one
that reads flow (2), for M = 8 also the one that reads 324 correlations. They stay dense and are printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

import nofm
from nofm.data.flow import FlowFiles, ResidentFlow
from nofm.data.flow_augment import Augmentation
from nofm.data.flow_layouts import LAYOUTS, Pair, find_pairs
from nofm.data.loader import Batch, Loader, batches
from nofm.data.order import Order, Share
from nofm.data.stamp_sets import as_arrays, read_pack
from nofm.data.stamp_sources import find_sources
from nofm.data.stamps import make_pairs
from nofm.report.flow_colors import draw_flow
from nofm.tasks.flow import FLOW_MODELS, OpticalFlow, build_flow_model


@dataclass
class Run:
    """What came out of one seed."""

    seed: int
    train: list[dict[str, float]] = field(default_factory=list)  # loss and EPE of training, by step
    eval: list[dict[str, float]] = field(default_factory=list)  # on held-out pairs, by step
    real: dict[str, dict[str, float]] = field(default_factory=dict)  # on real data, at the end
    flip_rate: dict[int, float] = field(default_factory=dict)
    sad: int = 0
    seconds: float = 0.0


# ---- data ----


class Data:
    """Read once, for all seeds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        if args.chairs:
            self.train, self.val = (find_pairs("chairs", args.chairs, part) for part in ("train", "val"))
        elif args.pack:
            self.train, self.val = (read_pack(path) for path in args.pack)
        else:
            self.train, self.val = (
                as_arrays(make_pairs(find_sources(args.sources, part), count, *args.frame, seed=0, workers=args.workers))
                for part, count in (("train", args.pairs), ("val", args.val_pairs))
            )
        self.real = {name: find_pairs(name, root) for name, root in args.eval}

    def loader(self, seed: int) -> Loader:
        order, crop = Order(len(self.train), self.args.batch, seed), tuple(self.args.crop)
        if self.args.chairs:
            return FlowFiles(self.train, self.val, order, Share(), Augmentation(size=crop), self.args.workers, self.device.type == "cuda")
        return ResidentFlow(self.train, self.val, order, Share(), self.device, crop)


def real_batches(pairs: list[Pair], device: torch.device) -> Iterator[Batch]:
    loader = FlowFiles(pairs, pairs, Order(len(pairs), 1, 0), Share(), Augmentation())
    for batch in loader.test():
        yield {name: value.to(device) for name, value in batch.items()}


# ---- training ----


def train(args: argparse.Namespace, data: Data, seed: int) -> tuple[Run, OpticalFlow, nofm.Cost]:
    torch.manual_seed(seed)
    device, run = torch.device(args.device), Run(seed)
    task = OpticalFlow(build_flow_model(args.model), args.updates, args.test_updates).to(device)
    optimizer = torch.optim.AdamW(task.parameters(), args.lr, weight_decay=args.weight_decay, fused=device.type == "cuda")
    schedule = OneCycleLR(optimizer, args.lr, total_steps=args.steps + 1, pct_start=0.05, anneal_strategy="linear", cycle_momentum=False)

    summary = nofm.sparsify_(task.model, args.pattern, preset="paper")
    nofm.attach(method(args), task.model, optimizer)
    cost = nofm.cost(task.model, [(1, 3, *args.crop)] * 2)
    if seed == args.seeds[0]:
        print("\n".join(f"dense: {row.name}: {row.note}" for row in summary.dense), cost, sep="\n", flush=True)

    loader, sad, began = data.loader(seed), nofm.SAD(task.model), time.perf_counter()
    sad.record(0)
    found = batches(loader, 0)
    for step in range(1, args.steps + 1):
        batch = {name: value.to(device, non_blocking=True) for name, value in next(found).items()}
        task.train()
        with autocast(args):
            out = task(batch)
        optimizer.zero_grad(set_to_none=True)
        out["loss"].backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        if step % args.log_every == 0 or step == args.steps:
            sad.record(step)
            values = {name: value.item() for name, value in out.items()}
            if not values["loss"] < float("inf"):
                sys.exit(f"the loss of step {step} is {values['loss']}; lower --lr or use --precision fp32")
            run.train.append({"step": step, **values, "seconds": time.perf_counter() - began})
        if step % args.eval_every == 0 or step == args.steps:
            run.eval.append({"step": step, **measured(task, loader.test(), args)})
            print(f"seed {seed} step {step}: {shown(run.train[-1])}; held out: {shown(run.eval[-1])}", flush=True)
    loader.close()
    run.seconds = time.perf_counter() - began
    run.flip_rate = sad.flip_rate()
    steps = [0, *run.flip_rate]
    run.sad = sum(sad.between(i, j).total for i, j in itertools.pairwise(steps))
    return run, task, cost


def method(args: argparse.Namespace) -> nofm.Method:
    if args.method == "srste":
        return nofm.SRSTE(decay=args.decay, placement=args.placement)
    return nofm.STE() if args.method == "ste" else nofm.Dense()


def autocast(args: argparse.Namespace) -> torch.autocast:
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.precision == "bf16")


@torch.no_grad()
def measured(task: OpticalFlow, found: Iterator[Batch], args: argparse.Namespace) -> dict[str, float]:
    task.eval()
    sums: dict[str, Tensor] = {}
    for batch in found:
        with autocast(args):
            for name, value in task.measure({name: x.to(args.device) for name, x in batch.items()}).items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
    return task.metrics({name: value.item() for name, value in sums.items()})


def shown(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items() if name not in ("step", "seconds"))


# ---- what is left behind ----


@torch.no_grad()
def pictures(task: OpticalFlow, data: Data, seed: int, args: argparse.Namespace) -> None:
    """The first held-out pairs and the real ones: frame, prediction, true flow."""
    task.eval()
    shown = [(f"held-out-{i}", batch) for i, batch in zip(range(2), data.loader(seed).test(), strict=False)]
    shown += [(f"{name}-{i}", batch) for name, pairs in data.real.items() for i, batch in enumerate(real_batches(pairs, data.device))]
    for name, batch in shown:
        one = {key: value[:1].to(data.device) for key, value in batch.items()}
        with autocast(args):
            predicted = task.predict(one["image1"], one["image2"])
        frame = ((one["image1"][0] + 1) * 127.5).round().byte().permute(1, 2, 0).cpu().numpy()
        prediction, truth = (x[0].permute(1, 2, 0).cpu().numpy() for x in (predicted, one["flow"]))
        label = args.method if args.method == "dense" else f"{args.method} {args.pattern}"
        draw_flow(args.pictures / f"{name}-seed{seed}.png", frame, {label: prediction}, truth, one["valid"][0].cpu().numpy())


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    cuda = torch.device(args.device).type == "cuda"
    return {
        "command": sys.argv,
        "commit": commit or None,
        "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
    }


def report(args: argparse.Namespace, runs: list[Run], cost: nofm.Cost) -> None:
    last = torch.tensor([run.eval[-1]["epe"] for run in runs], dtype=torch.float64)
    spread = f" ± {last.std():.3f}" if len(runs) > 1 else ""
    sparse = args.method != "dense"
    params, macs = (cost.params_sparse, cost.macs_sparse) if sparse else (cost.params, cost.macs)
    print(
        f"{args.method} {args.pattern}: EPE {last.mean():.3f}{spread} px, {params / 1e6:.2f} M parameters, {macs / 1e9:.1f} G multiply-adds"
    )
    found = {**conditions(args), "params": params, "macs": macs, "runs": [vars(run) for run in runs]}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1, default=str))


def layout(text: str) -> tuple[str, str]:
    name, _, root = text.partition("=")
    if name not in LAYOUTS or not root:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ROOT with NAME one of {', '.join(LAYOUTS)}")
    return name, root


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pack", type=Path, nargs=2, metavar=("TRAIN", "VAL"), help="files of make_stamps.py")
    source.add_argument("--sources", type=Path, help="stamps and photographs to render pairs from")
    source.add_argument("--chairs", type=Path, help="the folder of FlyingChairs")
    add("--pairs", type=int, default=600, help="with --sources: training pairs (default 600)")
    add("--val-pairs", type=int, default=64, help="with --sources: held-out pairs (default 64)")
    add("--frame", type=int, nargs=2, default=(288, 384), help="with --sources: size of frames (default 288 384)")
    add("--eval", type=layout, action="append", default=[], metavar="NAME=ROOT", help="real data to evaluate at the end")
    add("--model", choices=FLOW_MODELS, default="raft_large")
    add("--method", choices=("dense", "ste", "srste"), default="srste")
    add("--pattern", default="2:4")
    add("--decay", type=float, default=2e-4, help="lambda of SR-STE (default 2e-4)")
    add("--placement", choices=("gradient", "decoupled", "backward"), default="gradient", help="of the SR-STE term")
    add("--steps", type=int, default=3000)
    add("--batch", type=int, default=10)
    add("--crop", type=int, nargs=2, default=(256, 320), metavar=("H", "W"))
    add("--updates", type=int, default=12, help="refinements in training (default 12)")
    add("--test-updates", type=int, default=24, help="refinements in tests (default 24)")
    add("--lr", type=float, default=4e-4)
    add("--weight-decay", type=float, default=1e-4)
    add("--clip", type=float, default=1.0)
    add("--seeds", type=int, nargs="+", default=[0])
    add("--precision", choices=("fp32", "bf16"), default="fp32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=0, help="processes that render or read (default 0)")
    add("--log-every", type=int, default=50)
    add("--eval-every", type=int, default=500)
    add("--out", type=Path, help="JSON of results")
    add("--pictures", type=Path, help="folder for pictures")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    data, runs = Data(args), []
    for seed in args.seeds:
        run, task, cost = train(args, data, seed)
        for name, pairs in data.real.items():
            run.real[name] = measured(task, real_batches(pairs, data.device), args)
            print(f"seed {seed}, {name}: {shown(run.real[name])}", flush=True)
        if args.pictures:
            pictures(task, data, seed, args)
        runs.append(run)
        report(args, runs, cost)


if __name__ == "__main__":
    main()
