"""The options of one task as tyro prints them for --help: settings that only other tasks have are left out, each text is one paragraph
(left to itself, tyro keeps the line breaks of indented docstrings, wherever they fall on a terminal), and of options that are not set
nothing is said: "(default: None)" and "{None}|" hide the rest."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from ..engine.problems import PROBLEMS

__all__ = ["as_listed", "listed"]


def listed(options: Any, task: str) -> type[Any]:
    """The class of `options`, for the help of `task`. It has the same fields, and groups of its own, which `as_listed` fills."""
    hidden = {key for problem in PROBLEMS.values() for key in problem.fields} - set(PROBLEMS[task].fields)
    return _listed(options, hidden, "")


def _listed(values: Any, hidden: set[str], prefix: str) -> type[Any]:
    from tyro.conf import Suppress

    group = type(values)
    texts, hints = _texts(group), typing.get_type_hints(group)
    kinds: dict[str, Any] = {}
    own: dict[str, Any] = {"__doc__": group.__doc__, "__annotations__": kinds}
    for field in dataclasses.fields(group):
        name, kind, value = field.name, hints[field.name], getattr(values, field.name)
        if dataclasses.is_dataclass(kind):
            kinds[name] = _listed(value, hidden, f"{prefix}{name}.")
            own[name] = dataclasses.field(default_factory=kinds[name])
        else:
            kinds[name] = Annotated[kind, Suppress if f"{prefix}{name}" in hidden else _shown(kind, value, texts[name])]
            own[name] = field.default
    return dataclass(frozen=True, kw_only=True)(type(group.__name__, (group,), own))


def _shown(kind: Any, value: Any, text: str) -> Any:
    """How tyro is to show an option."""
    from tyro.conf import arg

    return arg(help=text, metavar=None if kind is bool else _metavar(kind), help_behavior_hint="" if value in (None, ()) else None)


def _metavar(kind: Any) -> str:
    """A type as what is typed: FLOAT, {sgd,adam}, STR [STR ...]. That none may be, too, is said once for all."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return inner[0] if len(inner) == 1 else f"{{{','.join(map(str, inner))}}}"
    if typing.get_origin(kind) is tuple:
        one = _metavar(inner[0])
        return f"{one} [{one} ...]" if inner[1:] == (...,) else " ".join(map(_metavar, inner))
    return "|".join(_metavar(each) for each in inner if each is not type(None)) if inner else kind.__name__.upper()


def _texts(group: type[Any]) -> dict[str, str]:
    """The docstrings below a class's fields, and below those of the classes that it is made from."""
    texts: dict[str, str] = {}
    for base in reversed(group.__mro__[:-1]):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts


def as_listed(kind: Any, value: Any) -> Any:
    """`value`, an object of the class that `kind` was made from, as one of `kind`."""
    if not dataclasses.is_dataclass(value) or isinstance(value, kind):
        return value
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: as_listed(hints[field.name], getattr(value, field.name)) for field in dataclasses.fields(value)})
