"""`nofm train RECIPE [--dotted.options]`, and `nofm resume DIR`, which goes on with a run as its folder says."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.config import ConfigError, RunConfig
from ..engine.counting import other_unit
from ..recipes import RECIPES, describe, find
from ..report.study import finished
from .folders import Begun, begun
from .pages import fitted
from .words import fit, say

if TYPE_CHECKING:
    from .options import Options
    from .progress import Turn

__all__ = ["command", "resume"]

_HELP = """usage: nofm train RECIPE [--group.key VALUE ...] [--config FILE] [--out DIR] [--seed N] [--seeds COUNT] [--device D] [--resume]

Trains a network. A recipe sets everything; a TOML file and options change what they name. A run that was interrupted goes on with
nofm resume DIR.

positional arguments:
  RECIPE             One of the recipes below. (required)
options:
  -h, --help         show this help message and exit; nofm train RECIPE --help lists all options, with the recipe's values
  --group.key VALUE  What to change in the recipe: --optim.lr 0.1. Groups are task, model, data, sparsity, optim, schedule, engine.
  --config FILE      A TOML file with values that go before the recipe's; options go before both.
  --out DIR          Folder of the run; runs/RECIPE-TIME where nothing is said.
  --seed N           Decides starting weights, the order of images and all other chance. (default: 0)
  --seeds COUNT      Train so many times, with seeds from --seed on, each in a folder of its own: DIR/seed-0, DIR/seed-1, ... Each then
                     shows one line when it has ended. (default: 1)
  --device D         auto (cuda where there is one), cpu, cuda or cuda:N.
  --resume           Go on from the newest checkpoint in --out, or start there if there is none.
recipes:
{recipes}
"""
_RESUME_HELP = """usage: nofm resume DIR [--allow_change --group.key VALUE ...]

Goes on with the run in DIR from its newest checkpoint, with the options that it was started with, which DIR/run.json holds. To the
bit, it then ends as if it had not been interrupted.

positional arguments:
  DIR                The run's folder. Where it holds the runs of nofm train --seeds, those that are not finished are gone on with, one
                     after another. (required)
options:
  -h, --help         show this help message and exit
  --allow_change     Let options that follow change what they name: a longer run, another folder of the data, another number of processes,
                     another lambda. Another network, method or pattern is refused, and so is a start (begin_at, ramp_at) in a run that
                     has come to its pattern.
  --group.key VALUE  What to change, as for nofm train.
"""


def command(args: list[str]) -> int:
    """Run `nofm train`; returns its exit code."""
    if not args or args[0] in ("-h", "--help"):
        print(fitted(_HELP.format(recipes="\n".join(f"  {name:22}  {describe(name)}" for name in RECIPES))))
        return 0 if args else 2
    recipe, rest = args[0], args[1:]
    if recipe.startswith("-"):
        hint = "to go on with a run: nofm resume DIR; " if recipe.startswith("--resume") else ""
        raise ConfigError(f"{recipe!r} stands where a recipe belongs: {hint}nofm train RECIPE {recipe} ...; there are {', '.join(RECIPES)}")
    return _train(recipe, find(recipe), rest, ["nofm", "train", *args])


def resume(args: list[str]) -> int:
    """Run `nofm resume`; returns its exit code."""
    if not args or {"-h", "--help"} & set(args):
        print(fitted(_RESUME_HELP))
        return 0 if args else 2
    folder, rest = Path(args[0]), args[1:]
    if args[0].startswith("-"):
        raise ConfigError(f"{args[0]!r} stands where a run folder belongs: nofm resume DIR {args[0]} ...")
    for arg in rest:
        if arg.partition("=")[0] in ("--out", "--seeds"):
            raise ConfigError(f"{arg.partition('=')[0]}: has no effect on nofm resume, which goes on with one run, in its folder")
    rest = [arg for arg in rest if arg != "--resume"]
    runs = begun(folder)
    for run in runs:
        _check_unit(run.config, rest)
    left = [run for run in runs if rest or not finished(run.folder)]
    for run in runs:
        if run not in left:
            say(f"{run.folder}: is finished")
    turns = _turns([run.folder for run in left]) if _differ_in_the_seed_alone(left) else [None] * len(left)
    for run, turn in zip(left, turns, strict=True):
        typed = ["nofm", "resume", *args] if rest or (run.folder / "run.json").exists() else run.command
        _train(run.recipe, dataclasses.replace(run.config, out=str(run.folder)), [*rest, "--resume"], typed, home=folder, turn=turn)
    if any(turns):
        from .progress import looking

        say(looking(folder, several=True))
    return 0


def _differ_in_the_seed_alone(runs: Sequence[Begun]) -> bool:
    configs = [dataclasses.replace(run.config, seed=0, out=None) for run in runs]
    return all(config == configs[0] for config in configs)


def _turns(folders: Sequence[Path]) -> Sequence[Turn | None]:
    """Which is which of runs that go one after another; a single one needs no such words."""
    from .progress import Turn

    count = len(folders)
    return [Turn(number, count, folder.name) if count > 1 else None for number, folder in enumerate(folders, start=1)]


def _check_unit(config: RunConfig, rest: list[str]) -> None:
    """Raise where a run that counts in one unit is to go on in the other: what is behind it would have had other lengths."""
    unit = "steps" if config.engine.epochs is None else "epochs"
    if (other := f"--engine.{other_unit(unit)}") in {arg.partition("=")[0] for arg in rest}:
        raise ConfigError(f"{other}: this run counts in {unit} and has {getattr(config.engine, unit):g}; give --engine.{unit}")


def _train(recipe: str, base: RunConfig, rest: list[str], typed: list[str], home: Path | None = None, turn: Turn | None = None) -> int:
    """Train, with all that was asked for; `home` is what to give to nofm resume to go on with it, `turn` which of the runs there it is."""
    from ..engine.signals import listening
    from ..engine.validate import check
    from .options import parse, without_a_pattern_of_before

    with listening() as stop:  # from here on: importing torch takes seconds, and a signal in them must not be lost
        config, options, origins = parse(recipe, base, rest, begun=home is not None)
        config, said = without_a_pattern_of_before(config, origins, begun=home is not None)
        check(config, origins)
        if said:
            say(fit(said))
        if options.resume and config.out is None:
            raise ConfigError("--resume: say which run to go on with: --out DIR")
        if options.seeds < 1:
            raise ConfigError(f"--seeds {options.seeds}: must be seeds >= 1, and finite")
        out = Path(config.out or f"runs/{recipe.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}")
        seeds = range(config.seed, config.seed + options.seeds)
        folders = [out] if options.seeds == 1 else [out / f"seed-{seed}" for seed in seeds]
        for seed, folder, its in zip(seeds, folders, _turns(folders), strict=True):
            _one(dataclasses.replace(config, seed=seed), folder, recipe, typed, options, stop, home or out, turn or its)
        if options.seeds > 1:
            from .progress import looking

            say(looking(out, several=True))
    return 0


def _one(
    config: RunConfig, folder: Path, recipe: str, typed: list[str], options: Options, stop: Any, home: Path, turn: Turn | None
) -> None:
    from ..engine.signals import Stopped
    from ..engine.train import train
    from .progress import make_progress

    try:
        train(
            config,
            folder,
            recipe=recipe,
            command=typed,
            resume=options.resume,
            allow_change=options.allow_change,
            sinks=[make_progress(folder, sys.stdout, turn)],
            stop=stop,
        )
    except Stopped as stopped:
        stopped.go_on = f"nofm resume {shlex.quote(str(home))}"
        raise
