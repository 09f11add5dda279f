"""`train(config, ...)`: from a checked configuration to a finished run folder."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..analysis import cost
from ..errors import NofmError
from ..methods import attach
from ..overview import summary
from ..tasks.base import Task
from ..version import __version__
from . import chance, snapshot
from .average import Average
from .build import Lengths, image_shape, make_loader, make_method, make_optimizer, make_schedule, make_task, preflight, sparsified_
from .checkpoint import Store
from .config import ConfigError, RunConfig
from .files import Disk
from .folder import RunFolder, Sink
from .loop import Trainer
from .precision import Precision
from .resolve import differences, to_dict
from .signals import StopRequest, listening
from .sinks import make_sink
from .validate import check
from .world import World, joined_world

__all__ = ["train"]


def train(
    config: RunConfig,
    out: Path,
    *,
    recipe: str = "",
    command: Sequence[str] = (),
    resume: bool = False,
    allow_change: bool = False,
    sinks: Sequence[Sink] = (),
    stop: StopRequest | None = None,
    disk: Disk | None = None,
) -> dict[str, float]:
    """Train as `config` says, in the folder `out`; returns the last metrics.

    resume        go on from the newest checkpoint in `out`, or start there if there is none.
    allow_change  resume though the configuration is not the one that the run was started with.
    sinks         where events go besides the folder.
    stop          set by signals (see `signals.listening`); a run without one listens itself.
    """
    if stop is None:
        with listening() as request:
            options: dict[str, Any] = {"resume": resume, "allow_change": allow_change, "sinks": sinks, "stop": request, "disk": disk}
            return train(config, out, recipe=recipe, command=command, **options)
    check(config)
    with joined_world(config.device) as world:
        preflight(config, world)
        folder = RunFolder(out, resume=resume, disk=disk) if world.first else None
        try:
            if folder is not None:
                _compare_configs(folder, config, allow_change)
                folder.sinks += sinks
            return _run(config, world, folder, out, recipe, command, resume, allow_change, stop, disk)
        finally:
            if folder is not None:
                folder.close()


def _compare_configs(folder: RunFolder, config: RunConfig, allow_change: bool) -> None:
    earlier = folder.earlier_config()
    if earlier is None or allow_change:
        return
    changes = [(key, was, now) for key, was, now in differences(earlier, to_dict(config)) if key != "out"]
    if changes:
        lines = "\n".join(f"  {key} = {now}: this run was started with {was}" for key, was, now in changes)
        raise ConfigError(f"--resume: the configuration has changed:\n{lines}\nGive the old values, another --out, or --allow-change")


def _prepare(config: RunConfig, world: World, folder: RunFolder | None, out: Path, stop: StopRequest, disk: Disk | None) -> Trainer:
    """Build everything, in the order in which one part needs another."""
    e = config.engine
    _set_torch(config)
    loader = make_loader(config, world)
    lengths = Lengths(config, loader.order.steps_per_epoch)
    chance.seed_all(config.seed)  # the same starting weights on all processes
    task = make_task(config)
    sparsified_(task.model, config)
    task.to(world.device)
    if e.channels_last:
        task.to(memory_format=torch.channels_last)
    chance.seed_all(config.seed, world.rank, 1)  # and different dropout
    wrapped = world.spread(task, e.parallel)
    average = None if e.ema is None else Average(task, e.ema)
    optimizer = make_optimizer(config, task.model.parameters())
    schedule = make_schedule(config, optimizer, lengths)
    handle = attach(make_method(config), task.model, optimizer)
    return Trainer(
        world=world,
        task=task,
        wrapped=torch.compile(wrapped) if e.compile else wrapped,  # type: ignore[arg-type]
        loader=loader,
        optimizer=optimizer,
        schedule=schedule,
        precision=Precision(e.precision, world.device.type, e.clip),
        handle=handle,
        lengths=lengths,
        accumulate=e.accumulate,
        batch_size=e.batch_size,
        log_every=e.log_every,
        channels_last=e.channels_last,
        average=average,
        store=Store(out / "checkpoints", e.keep, disk=disk) if world.first else None,
        folder=folder,
        stop=stop,
    )


def _set_torch(config: RunConfig) -> None:
    e = config.engine
    if e.threads is not None:
        torch.set_num_threads(e.threads)
    torch.backends.cuda.matmul.fp32_precision = torch.backends.cudnn.conv.fp32_precision = "tf32" if e.tf32 else "ieee"  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(e.deterministic)
    torch.backends.cudnn.benchmark = not e.deterministic
    if e.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _run(
    config: RunConfig,
    world: World,
    folder: RunFolder | None,
    out: Path,
    recipe: str,
    command: Sequence[str],
    resume: bool,
    allow_change: bool,
    stop: StopRequest,
    disk: Disk | None,
) -> dict[str, float]:
    trainer = _prepare(config, world, folder, out, stop, disk)
    resumed_from: int | None = None
    fresh = folder is None or not (folder.path / "run.json").exists()
    if folder is not None:
        values = to_dict(dataclasses.replace(config, out=str(folder.path)))
        if fresh or allow_change:
            facts = _facts(config, trainer.task, trainer.world, recipe, command)
            folder.write("run.json", json.dumps({**facts, "config": values}, indent=1).encode())
        folder.sinks += [make_sink(name, folder.path, values, trainer.task.model) for name in config.engine.track]
    if resume:
        trainer.world.wait()
        store = trainer.store or Store(out / "checkpoints")
        state = store.load() if store.latest() is not None else None
        resumed_from = 0 if not fresh else None
        if state is not None:
            snapshot.restore(trainer, state)
            resumed_from = trainer.step
    try:
        return trainer.run(resumed_from)
    except NofmError as error:
        if folder is not None:
            folder.event("error", trainer.step, message=str(error))
        raise


def _facts(config: RunConfig, task: Task, world: World, recipe: str, command: Sequence[str]) -> dict[str, Any]:
    """All of run.json but the configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = None if config.engine.parallel == "fsdp" else cost(task.model, (1, *image_shape(config)))
    fields = ("params", "params_sparse", "weights", "weights_sparse", "macs", "macs_sparse")
    cuda = world.device.type == "cuda"
    return {
        "format": 1,
        "recipe": recipe,
        "command": list(command),
        "seed": config.seed,
        "versions": {"nofm": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "commit": _commit(),
        "hardware": {
            "device": str(world.device),
            "name": torch.cuda.get_device_name(world.device) if cuda else platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "world_size": world.size,
        },
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layers": [dataclasses.asdict(row) for row in summary(task.model).rows],
        "cost": None if counted is None else {name: getattr(counted, name) for name in fields},
    }


def _commit() -> str | None:
    """The commit of the working folder, with a + if it has changes; None outside of a repository."""
    try:
        git = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
