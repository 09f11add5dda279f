"""Train Faster R-CNN or Mask R-CNN, dense or N:M sparse, with an ordinary loop; results as JSON and pictures.

    python examples/detection.py --data PATH/bccd --method srste --pattern 2:4 --seeds 0 1 2 --out bccd-srste.json --pictures bccd-srste
    python examples/detection.py --data PATH/nuclei --task segmentation --min-size 320 --scale-jitter 0.6 1.6 --method dense
    python examples/detection.py --data PATH/coco --epochs 12 --batch 16 --lr 0.02 --min-size 800 --backbone RUN --workers 12   # 1x
    python examples/detection.py --costs                                       # layers, parameters and multiply-adds

The data are a folder in COCO's format with the splits train and val, and test where there is one (see nofm/data/coco.py). What makes the
network sparse are the two lines marked with <--: the first convolution and the layers that predict stay dense. All steps of a run are taken
and the last weights are measured: nothing is chosen by val or test. The defaults are sized for one GPU.

A step of a detector is thousands of small operations whose number depends on what is found, so it waits for the host and leaves a GPU idle.
Seeds of one command run one after another; several processes share a GPU better:
    for seed in 0 1 2; do python examples/detection.py --data PATH/bccd --seeds $seed --out bccd-$seed.json & done; wait
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

import nofm
from nofm.data.coco import CocoSet, find_coco, read_coco
from nofm.data.coco_loader import Augment, CocoLoader
from nofm.data.order import Order
from nofm.report.boxes import draw_detection
from nofm.tasks.detection import Detection, Segmentation
from nofm.tasks.detectors import DETECTORS, FixedWork, build_detector, predictors


@dataclass
class Run:
    """What came out of one seed."""

    seed: int
    train: list[dict[str, float]] = field(default_factory=list)  # losses, by step
    val: list[dict[str, float]] = field(default_factory=list)  # by step; the last is the result
    test: dict[str, float] | None = None
    flip_rate: dict[int, float] = field(default_factory=dict)
    sad: int = 0
    seconds: float = 0.0
    images_per_second: float = 0.0


class Data:
    """Read once, for all seeds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, masks = args, args.task == "segmentation"
        self.train = read_coco(args.data, "train", masks=masks, corrupt=args.corrupt).with_objects()
        self.val = read_coco(args.data, "val", masks=masks, corrupt=args.corrupt)
        self.test = read_coco(args.data, "test", masks=masks, corrupt=args.corrupt) if has_split(args.data, "test") else None

    def loader(self, seed: int, held_out: CocoSet) -> CocoLoader:
        args, device = self.args, torch.device(self.args.device)
        augment = Augment(flip=True, scale=tuple(args.scale_jitter))
        return CocoLoader(
            self.train,
            held_out,
            Order(len(self.train), args.batch, seed),
            augment=augment,
            device=device,
            resident=args.workers == 0 and held_out is self.val,  # the test images are seen once
            workers=args.workers,
            pin=device.type == "cuda",
            skip=args.corrupt == "skip",
        )


def has_split(root: Path, split: str) -> bool:
    try:
        return bool(find_coco(root, split))
    except nofm.NofmError:
        return False


def on_device(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: on_device(part, device) for name, part in value.items()}
    return [on_device(part, device) for part in value]


def build(args: argparse.Namespace, categories: int) -> torch.nn.Module:
    sizes: dict[str, Any] = {"min_size": tuple(args.min_size) if len(args.min_size) > 1 else args.min_size[0], "max_size": args.max_size}
    return build_detector(args.model, categories, norm=args.norm, backbone=args.backbone, trainable_layers=args.trainable_layers, **sizes)


def make_method(args: argparse.Namespace) -> nofm.Method:
    if args.method == "srste":
        return nofm.SRSTE(decay=args.decay, placement=args.placement)
    return nofm.STE() if args.method == "ste" else nofm.Dense()


def learning_rate(step: int, steps: int, warmup: int, milestones: list[float]) -> float:
    """The share of the largest rate at `step`, from 0: up linearly, then a tenth after each milestone (a share of all steps)."""
    return min(1.0, (step + 1) / max(1, warmup)) * 0.1 ** sum(step >= part * steps for part in milestones)


def autocast(args: argparse.Namespace) -> torch.autocast:
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.precision == "bf16")


def train(args: argparse.Namespace, data: Data, seed: int) -> tuple[Run, Detection, nofm.Cost]:
    torch.manual_seed(seed)
    run, loader = Run(seed), data.loader(seed, data.val)
    model = build(args, len(data.train.categories))
    task = (Segmentation if args.task == "segmentation" else Detection)(model, data.train.names).to(args.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, args.lr, momentum=0.9, weight_decay=args.weight_decay, fused=args.device.startswith("cuda"))
    steps = args.steps or args.epochs * loader.order.steps_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps, args.warmup, args.milestones))

    summary = nofm.sparsify_(model, args.pattern, skip=predictors(model))  # <--
    nofm.attach(make_method(args), model, optimizer)  # <--

    cost = counted(args, model)
    if seed == args.seeds[0]:
        print("\n".join(f"dense: {row.name}: {row.note}" for row in summary.dense), cost, sep="\n", flush=True)
    sad, began = nofm.SAD(model), time.perf_counter()
    sad.record(0)
    measuring = 0.0
    for step, batch in enumerate(itertools.islice(map(loader.make, loader.keys(0)), steps), start=1):
        task.train()
        with autocast(args):
            out = task(on_device(batch, args.device))
        optimizer.zero_grad(set_to_none=True)
        out["loss"].backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(trained, args.clip)
        optimizer.step()
        schedule.step()
        if step % args.log_every == 0 or step == steps:
            sad.record(step)
            values = {name: value.item() for name, value in out.items()}
            if not values["loss"] < float("inf"):
                sys.exit(f"the loss of step {step} is {values['loss']}; lower --lr, or give --clip or --precision fp32")
            run.train.append({"step": step, **values, "seconds": time.perf_counter() - began})
        if step % args.eval_every == 0 or step == steps:
            since = time.perf_counter()
            run.val.append({"step": step, **measured(task, loader, args)})
            measuring += time.perf_counter() - since
            print(f"seed {seed} step {step} of {steps}: {shown(run.train[-1:])}; val: {shown(run.val[-1:])}", flush=True)
    run.seconds = time.perf_counter() - began
    run.images_per_second = steps * args.batch / (run.seconds - measuring)
    loader.close()
    run.flip_rate = sad.flip_rate()
    run.sad = sum(sad.between(i, j).total for i, j in itertools.pairwise([0, *run.flip_rate]))
    return run, task, cost


@torch.no_grad()
def measured(task: Detection, loader: CocoLoader, args: argparse.Namespace) -> dict[str, float]:
    task.eval()
    task.reset()
    for batch in loader.test():
        with autocast(args):
            task.measure(on_device(batch, args.device))
    return task.metrics({})


def shown(rows: list[dict[str, float]]) -> str:
    return ", ".join(f"{name} {value:.3f}" for row in rows for name, value in row.items() if name not in ("step", "seconds"))


# ---- what is left behind ----


def counted(args: argparse.Namespace, model: torch.nn.Module) -> nofm.Cost:
    side = args.min_size[-1]
    return nofm.cost(FixedWork(model), (1, 3, side, min(args.max_size, side * 4 // 3 // 32 * 32)))


def pictures(task: Detection, split: str, seed: int, args: argparse.Namespace) -> None:
    label = args.method if args.method == "dense" else f"{args.method} {args.pattern}"
    for sample in task.samples(args.drawn):
        path = args.pictures / f"{split}-{sample.index:04d}-seed{seed}.png"
        draw_detection(path, sample.image, {label: sample.found}, sample.truth, task.names)


def conditions(args: argparse.Namespace, versions: dict[str, str]) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    cuda = torch.device(args.device).type == "cuda"
    return {
        "command": sys.argv,
        "commit": commit or None,
        "torch": torch.__version__,
        **versions,
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
    }


def report(args: argparse.Namespace, runs: list[Run], cost: nofm.Cost, task: Detection) -> None:
    sparse = args.method != "dense"
    params, macs = (cost.params_sparse, cost.macs_sparse) if sparse else (cost.params, cost.macs)
    heads = ("map", "mask_map") if args.task == "segmentation" else ("map",)
    for split, rows in (("val", [run.val[-1] for run in runs]), ("test", [run.test for run in runs if run.test])):
        for name in heads if rows else ():
            values = torch.tensor([row[name] for row in rows], dtype=torch.float64)
            spread = f" ± {values.std():.4f}" if len(rows) > 1 else ""
            print(f"{args.method} {args.pattern} {split}: {name} {values.mean():.4f}{spread}", flush=True)
    print(f"{params / 1e6:.2f} M parameters, {macs / 1e9:.1f} G multiply-adds", flush=True)
    if args.out:
        found = {
            **conditions(args, task.versions()),
            "categories": task.names[1:],
            "params": params,
            "macs": macs,
            "runs": [vars(run) for run in runs],
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1, default=str))


def print_costs(args: argparse.Namespace) -> None:
    """Which layers a preset makes sparse, and what both networks cost for one image of 800x1216 pixels and COCO's 80 categories."""
    for name in ("fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn"):
        for pattern, rule in itertools.product(("2:4", "2:8"), ("preset default", "preset default, predictors skipped")):
            model = build_detector(name, 80)
            summary = nofm.sparsify_(model, pattern, skip=predictors(model) if "skipped" in rule else ())
            dense = ", ".join(row.name for row in summary.dense)
            print(f"{name} {pattern}, {rule}: {len(summary.sparse)} layers sparse; dense are {dense}")
            print(nofm.cost(FixedWork(model), (1, 3, 800, 1216)), end="\n\n")


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "--data", {"type": Path, "help": "folder in COCO's format"}
    yield "--task", {"choices": ("detection", "segmentation"), "default": "detection"}
    yield "--model", {"choices": DETECTORS, "help": "default: R50-FPN of the task"}
    yield "--method", {"choices": ("dense", "ste", "srste"), "default": "srste"}
    yield "--pattern", {"default": "2:4"}
    yield "--decay", {"type": float, "default": 2e-4, "help": "lambda of SR-STE (default 2e-4)"}
    yield "--placement", {"choices": ("gradient", "decoupled", "backward"), "default": "gradient", "help": "of the SR-STE term"}
    yield "--backbone", {"type": Path, "help": "a run's folder or a safetensors file that the ResNet begins with"}
    yield "--norm", {"choices": ("frozen", "batch", "group"), "help": "default: frozen with --backbone, batch without"}
    yield "--trainable-layers", {"type": int, "help": "stages of the ResNet that are trained, from the last (default all; 3 if frozen)"}
    yield "--epochs", {"type": int, "default": 100}
    yield "--steps", {"type": int, "help": "instead of --epochs"}
    yield "--batch", {"type": int, "default": 8}
    yield "--lr", {"type": float, "default": 0.01}
    yield "--weight-decay", {"type": float, "default": 1e-4}
    yield "--warmup", {"type": int, "default": 500, "help": "steps (default 500)"}
    yield "--milestones", {"type": float, "nargs": "*", "default": [8 / 12, 11 / 12], "help": "shares of all steps, after each a tenth"}
    yield "--clip", {"type": float, "default": 10.0, "help": "largest norm of the gradient; 0 for none (default 10)"}
    yield "--min-size", {"type": int, "nargs": "+", "default": [384], "help": "shorter side of images; several: one by chance"}
    yield "--max-size", {"type": int, "default": 1333}
    yield "--scale-jitter", {"type": float, "nargs": 2, "default": (0.8, 1.25), "metavar": ("LOW", "HIGH")}
    yield "--corrupt", {"choices": ("error", "skip"), "default": "error"}
    yield "--workers", {"type": int, "default": 0, "help": "processes that read files; 0: all images in the device's memory"}
    yield "--seeds", {"type": int, "nargs": "+", "default": [0]}
    yield "--device", {"default": "cuda" if torch.cuda.is_available() else "cpu"}
    yield "--precision", {"choices": ("fp32", "bf16"), "default": "bf16" if torch.cuda.is_available() else "fp32"}
    yield "--log-every", {"type": int, "default": 50}
    yield "--eval-every", {"type": int, "default": 500}
    yield "--drawn", {"type": int, "default": 4, "help": "pictures of each split (default 4)"}
    yield "--costs", {"action": "store_true", "help": "print layers and costs, and stop"}
    yield "--out", {"type": Path, "help": "JSON of results"}
    yield "--pictures", {"type": Path, "help": "folder for pictures"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, settings in options():
        parser.add_argument(name, **settings)
    args = parser.parse_args()
    if args.costs:
        return print_costs(args)
    if args.data is None:
        parser.error("--data is needed: the folder of the data set")
    args.model = args.model or ("maskrcnn_resnet50_fpn" if args.task == "segmentation" else "fasterrcnn_resnet50_fpn")
    if args.model.startswith("maskrcnn") != (args.task == "segmentation"):
        parser.error(f"--model {args.model} is not for --task {args.task}")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    runs: list[Run] = []
    try:
        data = Data(args)
        for seed in args.seeds:
            run, task, cost = train(args, data, seed)
            if args.pictures:
                pictures(task, "val", seed, args)
            if data.test is not None:
                run.test = measured(task, data.loader(seed, data.test), args)
                if args.pictures:
                    pictures(task, "test", seed, args)
            runs.append(run)
            report(args, runs, cost, task)
    except nofm.NofmError as error:
        parser.error(str(error))
    return None


if __name__ == "__main__":
    main()
