"""`train(config, ...)`: from a checked configuration to a finished run folder."""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..errors import NofmError
from ..methods import attach
from ..overview import summary
from ..tasks.base import Task
from . import chance, snapshot
from .average import Average
from .begin import told
from .build import (
    make_loader,
    make_method,
    make_optimizer,
    make_task,
    preflight,
    sparsified_,
    uses_graphs,
)
from .checkpoint import Store
from .compiling import compiled
from .config import ConfigError, RunConfig
from .files import Disk
from .folder import RunFolder, Sink
from .graphs import Graphs
from .loop import Trainer
from .machine import conditions, set_torch
from .mixed import patterns_of
from .precision import Precision
from .problems import problem_of
from .resolve import completed, differences, to_dict
from .schedule import Lengths, make_schedule
from .signals import Stopped, StopRequest, listening
from .sinks import make_sink
from .validate import check
from .world import World, joined_world

__all__ = ["Job", "train", "train_taken", "train_together"]


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
    with nullcontext(stop) if stop is not None else listening() as request:
        steps = _training(Job(config, out, recipe, command, resume, allow_change, sinks, disk), request)
        return _exhausted(steps)


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that `train_together` is to make; fields as the arguments of `train`. `failed` is told at once of the error that ends it, which
    else is known when all runs have ended."""

    config: RunConfig
    out: Path
    recipe: str = ""
    command: Sequence[str] = ()
    resume: bool = False
    allow_change: bool = False
    sinks: Sequence[Sink] = ()
    disk: Disk | None = None
    failed: Callable[[NofmError], None] | None = None


def train_together(jobs: Sequence[Job], *, lanes: int = 4, stop: StopRequest | None = None) -> list[dict[str, float] | NofmError]:
    """Make several runs in one process, `lanes` at a time, each as if it were alone; the metrics of each, or the error that ended it.

    They take turns step by step. With CUDA graphs a step costs the host little, and small networks then fill a GPU together, where
    one at a time leaves most of it idle. Without graphs there is nothing to gain, and runs are made one after another. Raises
    `Stopped` after a signal, when every run has its checkpoint.
    """
    with nullcontext(stop) if stop is not None else listening() as request:
        results = train_taken(jobs, range(len(jobs)), lanes=lanes, stop=request)
    return [results[number] for number in range(len(jobs))]


def train_taken(jobs: Sequence[Job], numbers: Iterable[int], *, lanes: int, stop: StopRequest) -> dict[int, dict[str, float] | NofmError]:
    """`train_together` for those of `jobs` whose numbers it is given, by number. The next one is asked for when a lane is free."""
    lanes, coming = _lanes(jobs, lanes), iter(numbers)
    results: dict[int, dict[str, float] | NofmError] = {}
    running: deque[tuple[int, Generator[None, None, dict[str, float]]]] = deque()
    stopped: Stopped | None = None
    while True:
        while stopped is None and len(running) < lanes and (number := next(coming, None)) is not None:
            running.append((number, _training(jobs[number], stop)))
        if not running:
            break
        number, steps = running.popleft()
        try:
            next(steps)
            running.append((number, steps))
        except StopIteration as end:
            results[number] = end.value
        except Stopped as asked:
            stopped = asked
        except NofmError as error:
            results[number] = error
            if (tell := jobs[number].failed) is not None:
                tell(error)
    if stopped is not None:
        raise stopped
    return results


def _lanes(jobs: Sequence[Job], lanes: int) -> int:
    """How many of `jobs` can take turns: all or none, and only with the same settings of torch, which are the process's."""
    shared = {(job.config.device, job.config.engine.tf32, job.config.engine.deterministic, job.config.engine.threads) for job in jobs}
    if len(shared) > 1:
        raise ConfigError("runs in one process need the same device, engine.tf32, engine.deterministic and engine.threads")
    with joined_world(jobs[0].config.device if jobs else "cpu") as world:
        return lanes if all(uses_graphs(job.config, world) for job in jobs) else 1


def _exhausted(steps: Generator[None, None, dict[str, float]]) -> dict[str, float]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            metrics: dict[str, float] = end.value
            return metrics


def _training(job: Job, stop: StopRequest) -> Generator[None, None, dict[str, float]]:
    """A run, pausing after each step; returns its last metrics."""
    config = job.config
    check(config)
    with joined_world(config.device) as world:
        preflight(config, world)
        with world.first_may_refuse():
            folder = RunFolder(job.out, resume=job.resume, disk=job.disk) if world.first else None
        try:
            with world.first_may_refuse():
                if folder is not None:
                    _compare_configs(folder, config, job.allow_change)
                    folder.sinks += job.sinks
            trainer, resumed_from = _ready(job, world, folder, stop)
            yield from _told(trainer.steps(resumed_from), trainer)
            return trainer.metrics
        finally:
            if folder is not None:
                folder.close()


def _told(steps: Iterator[None], trainer: Trainer) -> Iterator[None]:
    """`steps`, with an error that ends them in the run's own events."""
    try:
        yield from steps
    except NofmError as error:
        if trainer.folder is not None:
            trainer.folder.event("error", trainer.step, message=str(error))
        raise


def _compare_configs(folder: RunFolder, config: RunConfig, allow_change: bool) -> None:
    earlier = folder.earlier_config()
    if earlier is None or allow_change:
        return
    changes = [(key, was, now) for key, was, now in differences(completed(earlier), to_dict(config)) if key != "out"]
    if changes:
        lines = "\n".join(f"  {key} = {now}: this run was started with {was}" for key, was, now in changes)
        raise ConfigError(f"--resume: the configuration has changed:\n{lines}\nGive the old values, another --out, or --allow_change")


def _refuse_to_rename(folder: RunFolder, config: RunConfig, step: int, total: int) -> None:
    """Raise where no step is left to train: what was trained would be told to be something else."""
    was = folder.earlier_config()
    if step >= total and was is not None and any(key != "out" for key, _, _ in differences(completed(was), to_dict(config))):
        raise ConfigError(
            f"--allow_change: {folder.path} has come to step {step}, and what is asked for ends at {total}: no step is left to train"
        )


def _compare_companions(folder: RunFolder, now: dict[str, bytes]) -> None:
    for name, data in now.items():
        path = folder.path / name
        if path.exists() and path.read_bytes() != data:
            raise ConfigError(f"--resume: {path} does not follow from these data; give those that the run was started with")


def _prepare(job: Job, world: World, folder: RunFolder | None, stop: StopRequest, state: dict[str, Any] | None) -> Trainer:
    """Build everything, in the order in which one part needs another. `state`: that it will go on from, if any."""
    config, out, disk = job.config, job.out, job.disk
    e = config.engine
    set_torch(config)
    loader = make_loader(config, world)
    lengths = Lengths(config, loader.order.steps_per_epoch)
    chance.seed_all(config.seed)  # the same starting weights on all processes
    task = make_task(config, loader, goes_on=state is not None)
    sparsified_(task.model, config, patterns_of(config, task, loader, world, folder))
    task.to(world.device)
    if e.channels_last:
        task.to(memory_format=torch.channels_last)
    chance.seed_all(config.seed, world.rank, 1)  # and different dropout
    average = None if e.ema is None else Average(task, e.ema)  # before the task is spread: shards cannot be copied
    if average is not None and e.parallel == "fsdp":
        world.spread(average.task, e.parallel)  # an average of its own shards on each process
    wrapped = world.spread(task, e.parallel)
    optimizer = make_optimizer(config, task.model.parameters(), fused=world.device.type == "cuda" and e.parallel == "ddp")
    schedule = make_schedule(config, optimizer, lengths)
    handle = attach(make_method(config, lengths), task.model, optimizer, fused=config.optim.fused)
    return Trainer(
        world=world,
        task=task,
        wrapped=compiled(wrapped) if e.compile else wrapped,
        loader=loader,
        optimizer=optimizer,
        schedule=schedule,
        precision=Precision(e.precision, world.device.type, e.clip),
        handle=handle,
        lengths=lengths,
        accumulate=e.accumulate,
        step_size=problem_of(config).step_size(config, loader),
        unit=problem_of(config).unit,
        items=problem_of(config).items,
        log_every=e.log_every,
        histogram_every=e.histogram_every,
        channels_last=e.channels_last,
        average=average,
        store=Store(out / "checkpoints", e.keep, disk=disk) if world.first else None,
        folder=folder,
        stop=stop,
        graphs=Graphs(optimizer, world.device) if uses_graphs(config, world) else None,
    )


def _ready(job: Job, world: World, folder: RunFolder | None, stop: StopRequest) -> tuple[Trainer, int | None]:
    """A trainer in its folder, and the step that it goes on from, where it does."""
    config = job.config
    resumed_from: int | None = None
    fresh = folder is None or not (folder.path / "run.json").exists()
    state: dict[str, Any] | None = None
    earlier: list[dict[str, Any]] = []
    if job.resume:
        world.wait()
        state = Store(job.out / "checkpoints", disk=job.disk).newest()
    trainer = _prepare(job, world, folder, stop, state)
    with world.first_may_refuse():
        if folder is not None and not fresh:
            if job.allow_change:
                step = 0 if state is None else state["progress"]["step"]
                _refuse_to_rename(folder, config, step, trainer.lengths.total)
                earlier = folder.earlier_commands(job.command, step)
            else:
                _compare_companions(folder, problem_of(config).companions(trainer.loader))
    facts: dict[str, Any] = {}
    if folder is not None and (fresh or job.allow_change):
        facts = _facts(config, trainer.task, trainer.world, job.recipe, job.command) | ({"earlier": earlier} if earlier else {})
        facts |= _weights_from(config, None if state is None else folder)
    if job.resume:
        resumed_from = 0 if not fresh else None
        if state is not None:
            snapshot.restore(trainer, state, allow_change=job.allow_change)
            resumed_from = trainer.step
    if folder is not None:  # only now: what the state does not fit is refused, and the folder stays as it was
        values = to_dict(dataclasses.replace(config, out=str(folder.path)))
        if facts:
            for name, data in problem_of(config).companions(trainer.loader).items():
                folder.write(name, data)
            folder.write("run.json", json.dumps({**facts, "config": values}, indent=1).encode())
        folder.sinks += [make_sink(name, folder.path, values) for name in config.engine.track]
    return trainer, resumed_from


def _weights_from(config: RunConfig, begun: RunFolder | None) -> dict[str, Any]:
    """Which weights the run began with; of one that has `begun` what it has said of that, whatever lies there now."""
    if begun is None:
        return {} if config.model.weights is None else {"weights_from": told(config)}
    earlier = json.loads((begun.path / "run.json").read_text()) if (begun.path / "run.json").exists() else {}
    return {"weights_from": earlier["weights_from"]} if "weights_from" in earlier else {}


def _facts(config: RunConfig, task: Task, world: World, recipe: str, command: Sequence[str]) -> dict[str, Any]:
    """All of run.json but the configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = None if config.engine.parallel == "fsdp" else problem_of(config).cost(config, task)
    fields = ("params", "params_sparse", "weights", "weights_sparse", "macs", "macs_sparse")
    macs = {} if counted is None else {layer.name: {"macs": layer.macs} for layer in counted.layers}
    return {
        "format": 1,
        "recipe": recipe,
        "command": list(command),
        "seed": config.seed,
        **conditions(task, world),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layers": [dataclasses.asdict(row) | macs.get(row.name, {}) for row in summary(task.model).rows],
        "cost": None if counted is None else {name: getattr(counted, name) for name in fields},
    }
