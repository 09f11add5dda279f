"""Words that commands take and say: options of their own, from among those of a recipe before these are read. Needs no torch."""

from __future__ import annotations

import os
import sys

from ..columns import wrapped
from ..engine.config import ConfigError

__all__ = ["fit", "say", "taken"]


def fit(text: str) -> str:
    """A paragraph in lines that a terminal has room for; for a program, which may look for what belongs together, in one."""
    return "\n".join(wrapped(text, indent="  ")) if sys.stdout.isatty() else text


def say(text: str) -> None:
    """Print a line, at once; of several processes (torchrun) the first one does."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def taken(args: list[str], key: str, default: str | None = None, *, missing: str = "{key} is missing") -> tuple[str, list[str]]:
    """The value of `key`, and the other arguments; where it is not among them `default`, or else an error that says `missing`."""
    for i, arg in enumerate(args):
        if arg == key:
            if i + 1 == len(args):
                raise ConfigError(f"{key}: needs a value")
            return args[i + 1], args[:i] + args[i + 2 :]
        if arg.startswith(f"{key}="):
            return arg.partition("=")[2], args[:i] + args[i + 1 :]
    if default is None:
        raise ConfigError(missing.format(key=key))
    return default, args
