"""From a configuration to its parts: network, task, loader, optimizer, schedule, method. Also `preflight`, which tries them out on
a network without memory, before any data is opened."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from ..errors import LayerError, NofmError
from ..methods import METHODS, Method
from ..sparsify import sparsify_
from ..tasks.base import Task
from ..tasks.classification import Classification
from ..tasks.models import build_model
from .config import ConfigError, RunConfig
from .world import World

__all__ = [
    "Lengths",
    "image_shape",
    "make_loader",
    "make_method",
    "make_optimizer",
    "make_schedule",
    "make_task",
    "preflight",
    "sparsified_",
]

_SHAPES = {"digits": (1, 8, 8), "fashion": (1, 28, 28), "cifar10": (3, 32, 32)}


def image_shape(config: RunConfig) -> tuple[int, int, int]:
    """Channels, height and width of the images."""
    size = config.data.size or 224
    return _SHAPES.get(config.data.name, (3, size, size))


def _classes(config: RunConfig) -> int:
    if config.data.name != "folder":
        return 10
    return sum(entry.is_dir() for entry in Path(config.data.root or "", "train").iterdir())


# ---- network and task ----


def make_task(config: RunConfig, *, pretrained: bool | None = None) -> Task:
    """The task with its network, dense as yet."""
    m = config.model
    options = {"width": m.width, "dropout": m.dropout, "norm": m.norm}
    weights = m.pretrained if pretrained is None else pretrained
    model = build_model(m.name, _classes(config), image_shape(config)[0], pretrained=weights, **options)
    return Classification(model, config.task.label_smoothing)


def sparsified_(model: nn.Module, config: RunConfig) -> None:
    """Make the layers of `model` sparse as the configuration says."""
    s = config.sparsity
    pairs = [rule.rpartition("=") for rule in s.rules]
    rules = {glob: None if pattern == "dense" else pattern for glob, _, pattern in pairs}
    try:
        sparsify_(model, rules or s.pattern or "", preset=s.preset, skip=s.skip, axis=s.axis)
    except LayerError as error:
        about_skip = any(str(error).startswith(repr(glob)) for glob in s.skip)
        key = "sparsity.skip" if about_skip else "sparsity.rules" if s.rules else "sparsity.pattern"
        value = ", ".join(s.skip if about_skip else s.rules) or s.pattern
        raise ConfigError(f"{key} = {value}: {error}") from None


def make_method(config: RunConfig) -> Method:
    """The method by its name in `nofm.METHODS`, with the options that were given."""
    given = {k: v for k, v in dataclasses.asdict(config.sparsity.method).items() if k != "kind" and v is not None}
    try:
        return METHODS[config.sparsity.method.kind].method(**given)
    except NofmError as error:
        raise ConfigError(f"sparsity.method = {config.sparsity.method.kind} {given}: {error}") from None


def preflight(config: RunConfig, world: World) -> None:
    """Raise for whatever only the built network, this machine or an installed package can tell."""
    if config.engine.precision == "fp16" and world.device.type == "cpu":
        raise ConfigError("engine.precision = fp16: needs a CUDA device, and this run is on the CPU; allowed here: fp32, bf16")
    for name in config.engine.track:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"engine.track = {name}: is not installed; install it with pip install {name}, or leave it out")
    make_method(config)
    m, shape, classes = config.model, image_shape(config), _classes(config)
    if m.pretrained and m.name.startswith("torchvision/") and classes != 1000:
        raise ConfigError(
            f"model.pretrained = true: torchvision's weights are for 1000 classes, these data have {classes}; use a timm/ model"
        )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real network will say it again
        task = make_task(config, pretrained=False)
        try:
            with torch.no_grad():  # in training mode, in which some networks give more than scores
                out = task.model(torch.empty(2, *shape))
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(f"model.name = {m.name}: does not take images of {_x(shape)}: {str(error).splitlines()[0]}") from None
        sparsified_(task.model, config)
    if tuple(getattr(out, "shape", ())) != (2, classes):
        raise ConfigError(
            f"model.name = {m.name}: does not give one score for each of {classes} classes; classification needs such a model"
        )


def _x(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


# ---- data ----


def make_loader(config: RunConfig, world: World) -> Any:
    """The loader of the configuration's data."""
    from ..data.arrays import read_arrays
    from ..data.loader import ResidentLoader
    from ..data.order import Order, Share

    d, e = config.data, config.engine
    share = Share(world.rank, world.size, e.accumulate)
    if d.loader == "resident":
        arrays = read_arrays(d.name, d.root)
        order = Order(len(arrays.train_labels), e.batch_size, config.seed)
        return ResidentLoader(arrays, order, share, world.device, d.crop, d.flip)

    from ..data.workers import ArrayImages, FolderImages, WorkerLoader

    images: ArrayImages | FolderImages
    if d.name == "folder":
        images = FolderImages(d.root or "", d.size or 224, d.flip)
    else:
        images = ArrayImages(read_arrays(d.name, d.root), d.crop, d.flip)
    order = Order(images.train_size, e.batch_size, config.seed)
    return WorkerLoader(images, order, share, e.workers, world.device.type == "cuda", d.corrupt == "skip")


# ---- optimizer and schedule ----


class Lengths:
    """A configuration's lengths in steps, now that the number of steps in an epoch is known."""

    def __init__(self, config: RunConfig, steps_per_epoch: int) -> None:
        e = config.engine
        self.steps_per_epoch, self._in_epochs = steps_per_epoch, e.epochs is not None
        self.total = self.steps(e.epochs if e.epochs is not None else e.steps or 1)
        self.warmup = self.steps(config.schedule.warmup)
        self.milestones = [self.steps(m) for m in config.schedule.milestones]
        self.eval_every = max(1, self.steps(e.eval_every))
        self.checkpoint_every = self.eval_every if e.checkpoint_every is None else max(1, self.steps(e.checkpoint_every))
        prune_at = config.sparsity.method.prune_at
        if self.total < 1:
            raise ConfigError(f"engine.epochs = {e.epochs}: less than one step of {steps_per_epoch} in an epoch")
        if prune_at is not None and prune_at > self.total:
            raise ConfigError(f"sparsity.method.prune_at = {prune_at}: comes after the last step, {self.total}: nothing would be pruned")

    def steps(self, length: float) -> int:
        """A length of the configuration's unit, in steps."""
        return round(length * self.steps_per_epoch) if self._in_epochs else int(length)


def make_optimizer(config: RunConfig, parameters: Any) -> Optimizer:
    """SGD, Adam or AdamW."""
    o = config.optim
    if o.kind == "sgd":
        momentum = 0.9 if o.momentum is None else o.momentum
        return torch.optim.SGD(parameters, lr=o.lr, momentum=momentum, nesterov=o.nesterov, weight_decay=o.weight_decay)
    adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o.kind]
    return adam(parameters, lr=o.lr, betas=o.betas or (0.9, 0.999), eps=o.eps or 1e-8, weight_decay=o.weight_decay)


def make_schedule(config: RunConfig, optimizer: Optimizer, lengths: Lengths) -> lr_scheduler.LRScheduler:
    """The learning rate of every step: a linear warm-up, and then the schedule proper."""
    s, total, warmup = config.schedule, lengths.total, lengths.warmup
    if s.kind == "onecycle":
        share = warmup / total if warmup else 0.3
        return lr_scheduler.OneCycleLR(optimizer, config.optim.lr, total_steps=total + 1, pct_start=share, cycle_momentum=False)
    after: lr_scheduler.LRScheduler
    if s.kind == "cosine":
        after = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=s.final)
    elif s.kind == "step":
        after = lr_scheduler.MultiStepLR(optimizer, [m - warmup for m in lengths.milestones], gamma=0.1 if s.gamma is None else s.gamma)
    else:
        after = lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0)
    if warmup == 0:
        return after
    rising = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return lr_scheduler.SequentialLR(optimizer, [rising, after], milestones=[warmup])
