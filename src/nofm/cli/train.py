"""`nofm train RECIPE [--dotted.options]`."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from ..engine.config import ConfigError
from ..recipes import RECIPES, describe, find

__all__ = ["command"]

_HELP = """usage: nofm train RECIPE [--group.key VALUE ...] [--config FILE] [--out DIR] [--resume] [--seed N] [--seeds COUNT] [--device D]

Trains a network. A recipe sets everything; a TOML file and options change what they name. Groups of options: task, model,
data, sparsity, optim, schedule, engine. nofm train RECIPE --help lists all of them with the recipe's values.

recipes:
{recipes}
"""


def command(args: list[str]) -> int:
    """Run the command; returns its exit code."""
    if not args or args[0] in ("-h", "--help"):
        print(_HELP.format(recipes="\n".join(f"  {name:24} {describe(name)}" for name in RECIPES)))
        return 0 if args else 2
    recipe, rest = args[0], args[1:]
    if recipe.startswith("-"):
        raise ConfigError(f"{recipe!r} stands where a recipe belongs: nofm train RECIPE {recipe} ...; there are {', '.join(RECIPES)}")
    base = find(recipe)

    from ..engine.signals import listening
    from ..engine.validate import check
    from .options import parse

    with listening() as stop:  # from here on: importing torch takes seconds, and a signal in them must not be lost
        config, options, origins = parse(recipe, base, rest)
        check(config, origins)
        if options.resume and config.out is None:
            raise ConfigError("--resume: say which run to go on with: --out DIR")
        if options.seeds < 1:
            raise ConfigError(f"--seeds {options.seeds}: must be seeds >= 1, and finite")
        out = Path(config.out or f"runs/{recipe.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}")

        from ..engine.train import train
        from .progress import make_progress

        for seed in range(config.seed, config.seed + options.seeds):
            folder = out if options.seeds == 1 else out / f"seed-{seed}"
            train(
                dataclasses.replace(config, seed=seed),
                folder,
                recipe=recipe,
                command=["nofm", "train", *args],
                resume=options.resume,
                allow_change=options.allow_change,
                sinks=[make_progress(folder, sys.stdout)],
                stop=stop,
            )
    return 0
