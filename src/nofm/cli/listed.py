"""The options of one task as tyro prints them for --help: settings that only other tasks have are left out, and each text is one
paragraph. (Left to itself, tyro keeps the line breaks of indented docstrings, wherever they fall on a terminal.)"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from ..engine.problems import PROBLEMS

__all__ = ["as_listed", "listed"]


def listed(options: type[Any], task: str) -> type[Any]:
    """`options`, for the help of `task`. The class has the same fields, and groups of its own, which `as_listed` fills."""
    hidden = {key for problem in PROBLEMS.values() for key in problem.fields} - set(PROBLEMS[task].fields)
    return _listed(options, hidden, "")


def _listed(group: type[Any], hidden: set[str], prefix: str) -> type[Any]:
    from tyro.conf import Suppress, arg

    texts, hints = _texts(group), typing.get_type_hints(group, include_extras=True)
    kinds: dict[str, Any] = {}
    own: dict[str, Any] = {"__doc__": group.__doc__, "__annotations__": kinds}
    for field in dataclasses.fields(group):
        name, kind = field.name, hints[field.name]
        if dataclasses.is_dataclass(kind):
            kinds[name] = _listed(typing.cast(type[Any], kind), hidden, f"{prefix}{name}.")
            own[name] = dataclasses.field(default_factory=kinds[name])
        else:
            kinds[name] = Annotated[kind, Suppress if f"{prefix}{name}" in hidden else arg(help=texts[name])]
            own[name] = field.default
    return dataclass(frozen=True, kw_only=True)(type(group.__name__, (group,), own))


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
