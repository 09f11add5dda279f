"""`evaluate`: a finished run's exported weights, measured on data of one's own choice, by the code that measures runs.

RUN/evaluations/NAME.json    metrics, and all that they must be read with: weights, data, precision, versions, hardware
RUN/evaluations/NAME/        something to look at, as in RUN/samples

A run that averages its weights has two sets of them, and both are measured: metrics then have the names that the run's end gives them,
those of the average beginning with ema_. The samples are of the last set. NAME.json is written last, in one piece: where there is one, the
evaluation is complete.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.loader import Batch, Tests
from ..tasks.base import Task
from ..tasks.weights import listed, misfits, read_weights
from .build import check_machine
from .complaints import value_of
from .config import ConfigError, RunConfig
from .files import Disk, make_folder, remove, sha256_of, write_file
from .machine import conditions, set_torch
from .measure import laid_out, metrics_of, on_device, summed
from .precision import Precision
from .problems import problem_of
from .resolve import Origins, explain, to_dict
from .signals import Stopped, StopRequest
from .world import World, joined_world

__all__ = ["AVERAGE", "MACHINE_FIELDS", "PLAIN", "Evaluation", "Interrupted", "allowed_fields", "evaluate", "load_weights_", "planned"]

PLAIN, AVERAGE = "model.safetensors", "model-ema.safetensors"
# What may be changed beside a problem's `test_fields`: where and how it is computed.
MACHINE_FIELDS = ("device", "engine.precision", "engine.workers", "engine.threads")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Interrupted(Stopped):
    """An evaluation was asked to stop; nothing of it is kept."""

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}; what was measured before stays, go on with the same command"


@dataclass(frozen=True)
class Evaluation:
    """What is to be measured: the network of the run in folder `run`, which was trained by `own`, on the data of `config`."""

    name: str
    run: Path
    own: RunConfig
    config: RunConfig
    weights: Mapping[str, Path]  # by the beginning of their metrics' names: "" or "ema_"

    @property
    def file(self) -> Path:
        return self.run / "evaluations" / f"{self.name}.json"

    @property
    def folder(self) -> Path:
        return self.run / "evaluations" / self.name

    def asked(self) -> dict[str, Any]:
        """All that decides its numbers: what another evaluation of this name must agree in."""
        fields = dict.fromkeys(("data.name", *allowed_fields(self.config)))
        settings = {key: value_of(self.config, key) for key in fields if key not in MACHINE_FIELDS}
        files = {prefix: {"file": path.name, "sha256": sha256_of(path)} for prefix, path in self.weights.items()}
        return {"settings": settings, "precision": self.config.engine.precision, "weights": files}

    def earlier(self) -> dict[str, Any] | None:
        """What an evaluation of this name and these settings has found before; None where there is none. Raises where it was another."""
        if not self.file.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(self.file.read_text())
            before = {key: found[key] for key in ("settings", "precision", "weights")}
            _ = found["metrics"][found["headline"]]
        except (ValueError, TypeError, KeyError, OSError):
            raise ConfigError(f"{self.file}: does not hold an evaluation; measure it again with --again, or remove it") from None
        now = json.loads(json.dumps(self.asked()))
        if changed := [key for key in _flat(now) | _flat(before) if not _same(key, _flat(before).get(key), _flat(now).get(key))]:
            said = "; ".join(f"{key} was {_flat(before).get(key)} and is {_flat(now).get(key)}" for key in changed[:3])
            raise ConfigError(f"{self.file}: is another evaluation, {said}. Give another --name, or --again to replace it")
        return found


def _same(key: str, was: Any, now: Any) -> bool:
    """Whether two settings are one: `data` and `./data/` are the same folder."""
    if was == now or key != "settings data.root" or not (isinstance(was, str) and isinstance(now, str)):
        return bool(was == now)
    return os.path.exists(was) and os.path.exists(now) and os.path.samefile(was, now)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key or 'plain'} ") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def allowed_fields(config: RunConfig) -> tuple[str, ...]:
    """The settings that an evaluation may have of its own."""
    return (*problem_of(config).test_fields, *MACHINE_FIELDS)


def planned(
    run: Path, own: RunConfig, config: RunConfig, name: str, weights: str | None = None, origins: Origins | None = None
) -> Evaluation:
    """The evaluation of the finished run in `run`, which was trained by `own`, on the data of `config`; raises what is wrong with it.

    weights   a file's name in the run's folder, or any file; all that the run has exported where nothing is said.
    origins   where the settings come from, for messages.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: must be letters, digits, '.', '_' and '-', and begin with a letter, a digit or '_'")
    problem = problem_of(own)
    config = problem.for_tests(own, replace(config, out=None))
    complaints = [*problem.check_tests(config)]
    if config.engine.workers and config.data.loader == "resident" and config.engine.workers != own.engine.workers:
        complaints.append(("engine.workers", "has no effect on data that are kept on the device"))
    if complaints:
        raise ConfigError("\n".join(explain(origins or {}, key, value_of(config, key), said) for key, said in complaints))
    return Evaluation(name, run, own, config, _weights(run, own, weights))


def _weights(run: Path, own: RunConfig, given: str | None) -> dict[str, Path]:
    averaged = own.engine.ema is not None
    files = {"": run / PLAIN, **({"ema_": run / AVERAGE} if averaged else {})}
    if given is not None:
        path = run / given if (run / given).is_file() else Path(given)
        files = {"ema_" if path.resolve() == (run / AVERAGE).resolve() else "": path}
    for path in files.values():
        if not path.is_file():
            hint = f"; it has {', '.join(found)}" if (found := sorted(p.name for p in run.glob("*.safetensors"))) else ""
            raise ConfigError(f"{path}: there are no such weights of {run}{hint}" + (f" (--weights {given})" if given else ""))
    return files


def evaluate(
    evaluation: Evaluation,
    *,
    command: Sequence[str] = (),
    stop: StopRequest | None = None,
    told: Callable[[int], None] = lambda batches: None,
) -> dict[str, Any]:
    """Measure, write it down, and return what was written. Raises `Interrupted` when asked to stop.

    told   is called with the number of batches measured so far.
    """
    config, problem = evaluation.config, problem_of(evaluation.config)
    began, started = time.perf_counter(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    asked = evaluation.asked()
    with joined_world(config.device) as world:
        if world.size > 1:
            raise ConfigError("nofm evaluate: is for one process; start it without torchrun")
        check_machine(config, world)
        set_torch(config)
        tests = problem.tests(evaluation.own, config, world, evaluation.run)
        try:
            task = problem.task(config, tests, blank=True).to(world.device)
            if config.engine.channels_last:
                task.to(memory_format=torch.channels_last)
            metrics = _measured(evaluation, task, tests, world, stop or StopRequest(), told)
        finally:
            tests.close()
        facts = {
            "format": 1,
            "name": evaluation.name,
            "step": _last_step(evaluation.run),
            "headline": f"{list(evaluation.weights)[-1]}{task.headline}",
            "metrics": metrics,
            **asked,
            "data": to_dict(config)["data"],
            "seconds": time.perf_counter() - began,
            **conditions(task, world),
            "started": started,
            "command": list(command),
        }
    _write(evaluation, facts, task.sample_files())
    return facts


def _measured(
    evaluation: Evaluation, task: Task, tests: Tests, world: World, stop: StopRequest, told: Callable[[int], None]
) -> dict[str, float]:
    """The metrics of all weights, by the names that the end of a run gives them."""
    e = evaluation.config.engine
    precision, batches = Precision(e.precision, world.device.type), 0

    def measure(batch: Batch) -> dict[str, torch.Tensor]:
        with precision.autocast():
            return task.measure(laid_out(on_device(batch, world.device), e.channels_last))

    def look() -> bool:
        nonlocal batches
        batches += 1
        told(batches)
        if stop.number:
            raise Interrupted(stop.number, 0)
        return False

    metrics: dict[str, float] = {}
    skipped = 0
    for prefix, path in evaluation.weights.items():
        load_weights_(task.model, path)
        found = metrics_of(task, summed(task, tests.test(), measure, look), world)
        metrics |= {f"{prefix}{name}": value for name, value in found.items()}
        skipped = skipped or tests.skipped  # which goes on counting, and other weights meet the same ones again
    if skipped:
        metrics[f"skipped_{problem_of(evaluation.config).items}"] = float(skipped)
    return metrics


def load_weights_(model: nn.Module, path: Path) -> None:
    """Put the weights of `path` into a run's network; raises unless they are all its weights and no others."""
    given = read_weights(path)
    if found := misfits(model.state_dict(), given):
        raise ConfigError(f"{path}: these are not the weights of the network that the run describes ({listed(found)})")
    model.load_state_dict(given)


def _last_step(run: Path) -> int:
    """Where the run has ended. One that goes on afterwards has other weights, and its evaluations are of the past."""
    try:
        return int(json.loads((run / "events.jsonl").read_text().splitlines()[-1])["step"])
    except (ValueError, TypeError, KeyError, IndexError, OSError):
        raise ConfigError(f"{run / 'events.jsonl'}: does not tell where the run has ended; is its copy incomplete?") from None


def _write(evaluation: Evaluation, facts: Mapping[str, Any], samples: Mapping[str, bytes]) -> None:
    """Samples first, facts last; what was there before goes first of all, so that the two never belong to different evaluations."""
    disk, temporary = Disk(), evaluation.file.with_name(f".tmp-{evaluation.file.name}")
    make_folder(disk, evaluation.file.parent)
    for path in (evaluation.file, evaluation.folder, temporary):
        if path.exists():
            remove(disk, path)
    if samples:
        make_folder(disk, evaluation.folder)
        for name, data in samples.items():
            write_file(disk, evaluation.folder / name, [data])
        disk.sync_dir(evaluation.folder)
    write_file(disk, temporary, [json.dumps({**facts, "samples": sorted(samples)}, indent=1).encode() + b"\n"])
    disk.rename(temporary, evaluation.file)
    disk.sync_dir(evaluation.file.parent)
