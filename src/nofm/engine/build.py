"""From a configuration to its parts: network, task, loader, optimizer, method. Also `preflight`, which tries them out on
a network without memory, before any data is opened."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import LayerError, NofmError
from ..methods import METHODS, Method
from ..sparsifying import sparsify_
from ..tasks.base import Task
from .begin import begin_with_
from .config import ConfigError, RunConfig
from .counting import METHOD_LENGTHS
from .mixed import Patterns, allocated
from .problems import problem_of
from .schedule import Lengths
from .world import World

__all__ = [
    "check_machine",
    "make_loader",
    "make_method",
    "make_optimizer",
    "make_task",
    "preflight",
    "sparsified_",
    "uses_graphs",
]

# ---- network and data ----


def make_loader(config: RunConfig, world: World) -> Any:
    """The loader of the configuration's data."""
    return problem_of(config).loader(config, world)


def make_task(config: RunConfig, loader: Any, *, goes_on: bool = False) -> Task:
    """The task with its network, dense as yet, and the weights that it begins with. `goes_on`: it gets those of a checkpoint later."""
    m, problem = config.model, problem_of(config)
    try:
        task = problem.task(config, loader, blank=goes_on or m.weights is not None)
    except NofmError:
        raise
    except Exception as error:  # of torch.hub, of huggingface_hub, of the network, each in its own words
        if not m.pretrained:
            raise
        said = (str(error).strip() or "no more is known").splitlines()[0]
        raise ConfigError(
            f"model.pretrained = true: the weights of {m.name} could not be fetched ({type(error).__name__}: {said}); fetch them where "
            "there is a network, and give the file as model.weights"
        ) from error
    if m.weights is not None and not goes_on:
        begin_with_(task.model, config, problem.companions(loader))
    return task


def sparsified_(model: nn.Module, config: RunConfig, patterns: Patterns | None = None) -> None:
    """Make the layers of `model` sparse as the configuration says; `patterns`: those that a budget has led to."""
    s = config.sparsity
    pairs = [rule.rpartition("=") for rule in s.rules]
    rules = patterns or {glob: None if pattern == "dense" else pattern for glob, _, pattern in pairs}
    try:
        sparsify_(model, rules or s.pattern or "", preset=s.preset, skip=s.skip, axis=s.axis)
    except LayerError as error:
        about_skip = any(str(error).startswith(repr(glob)) for glob in s.skip)
        key = "sparsity.skip" if about_skip else "sparsity.rules" if s.rules else "sparsity.pattern"
        value = ", ".join(s.skip if about_skip else s.rules) or s.pattern
        raise ConfigError(f"{key} = {value}: {error}") from None


def make_method(config: RunConfig, lengths: Lengths | None = None) -> Method:
    """The method by its name in `nofm.METHODS`, with the options that were given; lengths in steps, now that these are known (before
    that, as if an epoch had a thousand)."""
    given = {k: v for k, v in dataclasses.asdict(config.sparsity.method).items() if k != "kind" and v is not None}
    method = METHODS[config.sparsity.method.kind].method
    if any(field.name == "seed" for field in dataclasses.fields(method)):
        given.setdefault("seed", config.seed)
    unit = 1 if config.engine.epochs is None else 1000
    for name in METHOD_LENGTHS:
        if name in given:
            given[name] = int(given[name] * unit) if lengths is None else lengths.steps(given[name])
    try:
        return method(**given)
    except NofmError as error:
        raise ConfigError(f"sparsity.method = {config.sparsity.method.kind} {given}: {error}") from None


def preflight(config: RunConfig, world: World) -> None:
    """Raise for whatever only the built network, this machine or an installed package can tell."""
    check_machine(config, world)
    if config.optim.fused and world.device.type == "cpu":
        raise ConfigError("optim.fused = true: needs a CUDA device, and this run is on the CPU; leave it out")
    for name in config.engine.track:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"engine.track = {name}: is not installed; install it with pip install {name}, or leave it out")
    uses_graphs(config, world)
    make_method(config)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the real network will say it again
        draft = problem_of(config).draft(config)
        # Without memory there is no magnitude to go by; whether the budget can be met does not depend on it.
        sparsified_(draft, config, None if config.sparsity.budget is None else allocated(draft, config, by="uniform"))


def check_machine(config: RunConfig, world: World) -> None:
    """Raise for what this machine or an installed package cannot do, of all that measuring needs, too."""
    if config.engine.precision == "fp16" and world.device.type == "cpu":
        raise ConfigError("engine.precision = fp16: needs a CUDA device, and this run is on the CPU; allowed here: fp32, bf16")
    for package in problem_of(config).packages:
        if importlib.util.find_spec(package) is None:
            extra = problem_of(config).extra
            raise ConfigError(
                f"task.kind = {config.task.kind}: needs {package}, which is not installed: pip install 'nofm[{extra}]' "
                f"(in a clone '.[{extra}]')"
            )


def uses_graphs(config: RunConfig, world: World) -> bool:
    """Whether steps are captured in CUDA graphs; raises where that is asked for and cannot be."""
    e = config.engine
    against = (
        "needs a CUDA device" if world.device.type != "cuda" else
        "is for one process; this run has several" if world.size > 1 else
        not_captured if (not_captured := problem_of(config).not_captured) is not None else
        "cannot hold fp16's loss scale, which the host must see; use engine.precision bf16 or fp32" if e.precision == "fp16" else
        None
    )  # fmt: skip
    if e.graph == "on" and against:
        raise ConfigError(f"engine.graph = on: {against}")
    return not against and (e.graph == "on" or (e.graph == "auto" and config.data.loader == "resident"))


# ---- optimizer ----


def make_optimizer(config: RunConfig, parameters: Any, fused: bool = False) -> Optimizer:
    """SGD, Adam or AdamW. `fused`: one kernel for all weights, which can read its learning rate from the device (CUDA graphs)."""
    o = config.optim
    common: dict[str, Any] = {"lr": o.lr, "weight_decay": o.weight_decay, "fused": fused or None}
    if o.kind == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9 if o.momentum is None else o.momentum, nesterov=o.nesterov, **common)
    adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o.kind]
    return adam(parameters, betas=o.betas or (0.9, 0.999), eps=o.eps or 1e-8, capturable=fused, **common)
