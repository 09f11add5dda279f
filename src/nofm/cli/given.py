"""What is given to a command that is a function (`commands.py`), looked at before tyro reads it: what is wrong is told in a line that
says what to do, as by all other commands. Needs no torch."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from tyro.conf import Positional

from ..engine.config import ConfigError
from ..engine.resolve import choices, near, says
from .options import check_value

__all__ = ["check_options", "check_positionals"]

_MARK = typing.get_args(Positional[str])[-1]  # what tyro puts into the type of a positional argument


def check_options(name: str, function: Callable[..., int], args: Sequence[str]) -> list[str]:
    """Raise for an option that the command does not have, or a value that it cannot have; returns the texts that are no option's."""
    _, options = _parameters(function)
    given: dict[str, list[str]] = {}
    texts: list[str] = []
    room, values = 0, texts  # of the last option: for how many texts, and where they go
    for arg in args:
        if re.match(r"-[-a-zA-Z]", arg):
            typed, equals, text = arg.partition("=")
            key = typed.lstrip("-").replace("-", "_")
            option = key if key in options else key.removeprefix("no_")
            kind = options.get(option)
            if kind is None or not arg.startswith("--") or (option != key and kind is not bool):
                hint = re.sub(r"'(\w+)'", r"'--\1'", near(key, options))
                raise ConfigError(f"{typed}: no such option of nofm {name}{hint or f'; nofm {name} --help lists them'}")
            if option in given:
                raise ConfigError(f"--{option}: given 2 times; give it once")
            values = given[option] = [text] if equals else []
            room = 0 if equals or kind is bool else _room(kind)
        elif room:
            values.append(arg)
            room -= 1
        else:
            texts.append(arg)
    for option, its in given.items():
        check_value(option, its, options[option])
    return texts


def check_positionals(name: str, function: Callable[..., int], texts: Sequence[str]) -> None:
    """Raise where one is missing, is one too many, or none that there can be."""
    positional, _ = _parameters(function)
    ((argument, kind),) = positional.items()  # every command has one
    usage = f"nofm {name} {_metavar(function, argument)}"
    if len(texts) > _room(kind):
        raise ConfigError(f"{texts[_room(kind)]}: is one too many: {usage}; options look like --name value, see nofm {name} --help")
    if not texts and inspect.signature(function).parameters[argument].default is inspect.Parameter.empty and _room(kind) == 1:
        raise ConfigError(f"{name}: {_metavar(function, argument)} is missing: {usage}; nofm {name} --help says what it is")
    allowed = choices(kind)
    for text in texts:
        if allowed is not None and text not in allowed:
            raise ConfigError(f"{text}: must be {says(kind)}{near(text, allowed)}")


def _parameters(function: Callable[..., int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types of its positional arguments, and of its options."""
    positional: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for argument, kind in typing.get_type_hints(function, include_extras=True).items():
        marks: tuple[Any, ...] = getattr(kind, "__metadata__", ())
        if argument != "return":
            (positional if _MARK in marks else options)[argument] = kind.__origin__ if marks else kind
    return positional, options


def _room(kind: Any) -> int:
    """How many texts can be a value of this type."""
    kinds = (kind, *typing.get_args(kind))
    return 1_000_000 if any(typing.get_origin(each) is tuple for each in kinds) else 1


def _metavar(function: Callable[..., int], argument: str) -> str:
    hint = typing.get_type_hints(function, include_extras=True)[argument]
    return next((mark.metavar for mark in hint.__metadata__ if getattr(mark, "metavar", None)), argument.upper())
