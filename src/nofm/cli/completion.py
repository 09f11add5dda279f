"""Shell completion, made by tyro from the same types that the help is made from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import operator
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..engine.config import DataConfig, RunConfig
from ..recipes import RECIPES, describe, find
from . import commands
from .options import Options

__all__ = ["script"]


def script(shell: str) -> str:
    """A completion script for the whole command line: commands, recipes and all their options."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(_everything(), args=["--tyro-print-completion", shell], prog="nofm", use_underscores=True)
    return printed.getvalue()


def _everything() -> Any:
    def sub(name: str, kind: Any, **options: Any) -> Any:
        return Annotated[kind, tyro.conf.subcommand(name, prefix_name=False, **options)]

    recipes = [sub(name, Options, default=_options(name), description=describe(name)) for name in RECIPES]
    train: Any = functools.reduce(operator.or_, recipes)
    others = [sub(name, Annotated[Any, tyro.conf.arg(constructor=getattr(commands, name))]) for name in commands.__all__]
    own = {"train": _chosen(train), "resume": _resume, "evaluate": _evaluate}
    first = [sub(name, Annotated[Any, tyro.conf.arg(constructor=make)]) for name, make in own.items()]
    return functools.reduce(operator.or_, [*first, *others])


def _resume(run: tyro.conf.Positional[Path], allow_change: bool = False) -> None:
    """Go on with a run, as its folder says."""


def _evaluate(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    data: DataConfig,
    name: str,
    weights: str | None = None,
    device: str | None = None,
    again: bool = False,
) -> None:
    """Measure finished runs on other data."""


def _chosen(recipes: Any) -> Any:
    def train(recipe: Any) -> Any:
        return recipe

    train.__annotations__ = {"recipe": Annotated[recipes, tyro.conf.arg(name="")]}
    return train


def _options(recipe: str) -> Options:
    config = find(recipe)
    return Options(**{f.name: getattr(config, f.name) for f in dataclasses.fields(RunConfig)})
