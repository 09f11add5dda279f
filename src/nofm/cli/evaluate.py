"""`nofm evaluate RUN... --name NAME`: finished runs' weights, measured on other data. All runs are looked at before the first is measured;
what is there already is passed by, so that the same command goes on after an interruption."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.config import ConfigError
from ..report.study import finished
from .folders import check_run, runs_in, started_with
from .pages import fitted
from .words import fit, taken

if TYPE_CHECKING:
    from ..engine.evaluate import Evaluation

__all__ = ["command"]

_HELP = """usage: nofm evaluate RUN [RUN ...] --name NAME [--weights FILE] [--again] [--device D] [--data.name LAYOUT] [--data.root DIR]
                     [--data.test SPLIT] [--group.key VALUE ...]

Measures the exported weights of finished runs, by the metrics of their task, on the data that the options name; what they do not name is as
the run had it. Writes RUN/evaluations/NAME.json and samples beside it, which nofm report and nofm study --table then show. Give the same
command again to go on after an interruption: what is measured is passed by.

positional arguments:
  RUN [RUN ...]      Run folders, or folders of runs, such as a study's. (one or more)
options:
  -h, --help         show this help message and exit
  --name NAME        What the evaluation is called: letters, digits, . _ - (required)
  --weights FILE     A file in the run's folder, or any other. Where nothing is said, all that a run has exported: model.safetensors, and
                     model-ema.safetensors of a run that averages (its metrics are called ema_...).
  --again            Measure again what is there already, and replace it.
  --device D         Where; also --engine.precision, --engine.workers, --engine.threads. (default: as the run)
options of each task:
{options}

A classifier has the classes that it was trained on: one of digits or fashion can be measured on that, one of cifar10 also on a folder of
its ten classes, one of a folder on any folder with the same classes.

  nofm evaluate runs/study --name flickr17 --data.test test_2017_flickr
  nofm evaluate runs/raft --name sintel --data.name sintel --data.root DIR
"""


def command(args: list[str]) -> int:
    """Run the command; returns its exit code."""
    from ..engine.problems import PROBLEMS

    if not args or {"-h", "--help"} & set(args):
        listed = "\n".join(
            f"  {kind:17}  {' '.join(f'--{key}' for key in dict.fromkeys(problem.test_fields))}" for kind, problem in PROBLEMS.items()
        )
        print(fitted(_HELP.format(options=listed)))
        return 0 if args else 2
    count = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    runs = _finished([Path(arg) for arg in args[:count]])
    usage = "evaluate: {key} is missing: nofm evaluate RUN [RUN ...] --name NAME"
    name, rest = taken(args[count:], "--name", missing=usage)
    weights, rest = taken(rest, "--weights", "")
    options = [arg for arg in rest if arg != "--again"]

    from ..engine.evaluate import evaluate
    from ..engine.signals import listening

    with listening() as stop:
        plans = [_planned(run, options, name, weights or None) for run in runs]
        known = [None if len(options) < len(rest) else plan.earlier() for plan in plans]
        for number, (plan, found) in enumerate(zip(plans, known, strict=True), start=1):
            with _shown(plan, number, len(plans)) as told:
                facts = found or evaluate(plan, command=["nofm", "evaluate", *args], stop=stop, told=told)
            end = "measured before, --again measures again" if found else f"{facts['seconds']:.1f} s"
            print(fit(f"[{number}/{len(plans)}] {plan.run}: {_numbers(facts)} ({', '.join(_files(facts))}; {end})"), flush=True)
    where = "each run" if len(plans) > 1 else plans[0].run
    print(fit(f"written to evaluations/{name}.json of {where}; nofm report and nofm study --table show it"))
    return 0


def _finished(given: list[Path]) -> list[Path]:
    """The finished runs of what was given; those that are not are named."""
    if not given:
        raise ConfigError("evaluate: give at least one run folder: nofm evaluate RUN [RUN ...] --name NAME")
    runs = list(dict.fromkeys(inner for folder in given for inner in runs_in(folder)))
    for run in runs:
        check_run(run)
    done = [run for run in runs if finished(run)]
    if not done:
        raise ConfigError(f"{runs[0]}: is not finished{f', nor any other of {len(runs)} runs' * (len(runs) > 1)}; nofm resume {runs[0]}")
    for run in runs:
        if run not in done:
            print(f"{run}: is not finished and is left out; nofm resume {run} goes on with it", flush=True)
    return done


def _planned(run: Path, options: list[str], name: str, weights: str | None) -> Evaluation:
    from ..engine.evaluate import allowed_fields, planned
    from .options import parse

    recipe, own = started_with(run)
    config, _, origins = parse(recipe, own, options, begun=True) if options else (own, None, {})
    allowed = allowed_fields(own)
    for key in (key for key, origin in origins.items() if origin.startswith("--") and key not in allowed):
        owned = ", ".join(f"--{field}" for field in allowed)
        raise ConfigError(f"--{key}: cannot be changed for an evaluation of {own.task.kind}, of {run}; what can: {owned}")
    return planned(run, own, config, name, weights, origins)


def _numbers(facts: dict[str, Any]) -> str:
    """The headline first, then the others."""
    metrics = {facts["headline"]: facts["metrics"][facts["headline"]], **facts["metrics"]}
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if value is not None)


def _files(facts: dict[str, Any]) -> list[str]:
    return [row["file"] for row in facts["weights"].values()]


@contextmanager
def _shown(plan: Evaluation, number: int, count: int) -> Iterator[Any]:
    """On a terminal, a line that tells how far it is."""
    if not sys.stdout.isatty():
        yield lambda batches: None
        return
    from rich.console import Console
    from rich.text import Text  # which reads no markup in the names of folders

    line = f"[{number}/{count}] {plan.run}"
    with Console().status(Text(line)) as status:
        yield lambda batches: status.update(Text(f"{line}: {plan.name}, batch {batches}"))
