"""Where the state of a handle comes from, and whether the attached method can go on from it. All is decided before anything is loaded.

Options are in a state by the fields of the method's dataclass. A method of somebody's own that keeps them elsewhere would go on from a
state of other options without a word, so it is refused when it is attached.

Another method, other patterns and options that the state was made by are refused. Any other option may have been changed on purpose
(a smaller lambda, a start that is still to end put off): then the attached one holds, as with `nofm resume --allow_change`, and a
warning says so. States from before options and patterns were saved have neither, and nothing is said of them.

A start that would begin again is refused, too: `begin_at` counts the steps of the whole run, so that one given to a run that has come to
its pattern makes the network dense until then, and what it has learned with its pattern is lost. Not a warning: hardly anybody means
that, and `--allow_change` shows none. Who does mean it leaves the state out, and `begin_at` counts from there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..errors import OptimizerError
from ..plain import plain_number
from ..site import Site
from .base import Memory, Method

__all__ = ["changes", "check", "check_options", "check_remembered", "origin", "told"]

_PARTS = ("method", "steps", "masks")
_AS_IT_WAS = "or leave this state out to begin anew"


# ---- when a method is attached ----


def check_options(method: Method) -> None:
    """Raise where a state could not hold the options of `method`, or `begun_with` names something else."""
    name, options = type(method).__name__, [field.name for field in fields(method)]
    if lost := _no_fields(method):
        raise OptimizerError(
            f"{name} keeps {', '.join(lost)} outside of its dataclass fields, so that its states would not hold what is given there; put "
            f"@dataclass(frozen=True) above the class, write each option as a field such as {lost[0]}: int = 1, and leave out __init__ "
            "(__post_init__ may check them)"
        )
    if unknown := [option for option in method.begun_with() if option not in options]:
        raise OptimizerError(
            f"{name}.begun_with() names {unknown[0]!r}, and {name} has no such option ({', '.join(options) or 'it has none'}); return a "
            "tuple of names of its fields"
        )
    for option in method.begun_with():
        if not _is_plain(value := getattr(method, option)):
            raise OptimizerError(
                f"{name}.begun_with() names {option!r}, which is a {type(value).__name__} here. States hold numbers, strings, booleans, "
                f"None and tuples of these, so that a state of another {option} could not be told from one of this; give it as such (a "
                'pattern as "2:4", an object as the numbers that it is made of), or do not name it'
            )


def _no_fields(method: Method) -> list[str]:
    """What looks like an option of `method` but is no field: written in a class without @dataclass or without a type, which leaves a
    field its old default, or set by an __init__ by hand."""
    names, kinds = {field.name for field in fields(method)}, type(method).__mro__
    lost: list[str] = []
    declared: set[str] = set()
    for kind in kinds:
        own = {name for name, annotation in inspect.get_annotations(kind).items() if "ClassVar" not in str(annotation)}
        given = {name for name in names & set(vars(kind)) if not inspect.ismemberdescriptor(vars(kind)[name])}  # no place in __slots__
        if _is_decorated(kind):
            lost += sorted(given - own - declared)
            declared |= own
        elif issubclass(kind, Method):
            lost += sorted((own | given) - declared)
    maker = next(kind for kind in kinds if "__init__" in vars(kind))
    # What a dataclass sets beside its fields follows from them (a table made in __post_init__), unless it was given by that name.
    taken = set(inspect.signature(vars(maker)["__init__"]).parameters) if _is_decorated(maker) else set(vars(method))
    return list(dict.fromkeys([*lost, *(name for name in vars(method) if name in taken and name not in names)]))


def _is_decorated(kind: type) -> bool:
    return "__dataclass_params__" in vars(kind)  # its own: a subclass inherits it as an attribute


def check_remembered(method: Method, memory: Memory) -> None:
    """Raise where `method`, which has started, has not put into `memory` what it says that it goes on from."""
    if missing := [what for what in method.remembers() if what not in memory]:
        name = type(method).__name__
        raise OptimizerError(
            f"{name}.remembers() names {missing[0]!r}, which {name}.start has not put into the memory, so that none of its states could be "
            f"loaded; set memory.tensors[{missing[0]!r}] in start(sites, memory), or do not name it"
        )


# ---- saved and loaded ----


def origin(method: Method, sites: Sequence[Site]) -> dict[str, Any]:
    """What a state says of the method and the layers that it is of: plain values only, so that any file can hold it."""
    return {"method": type(method).__name__, "options": _options(method), "patterns": _patterns(sites)}


def _options(method: Method) -> dict[str, Any]:
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    return {name: _plain(value) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(plain_number(value), bool | int | float | str)


def _plain(value: Any) -> Any:
    """Of Python's own kinds, which every file holds: numpy's float64 is a float as well, and an Enum may be a string, but torch.load
    refuses both. Without lists: the method's own could be changed later, and some files (JSON) know no tuples."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    value = plain_number(value)
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
    return kind(value) if kind else str.__str__(value) if isinstance(value, str) else value


def _are_same(one: object, other: object) -> bool:
    """Whether two values of an option are the same: a NaN is the same as a NaN."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return one == other or all(isinstance(each, float) and math.isnan(each) for each in (one, other))


def _patterns(sites: Sequence[Site]) -> dict[str, str]:
    return {site.key: f"{site.grouping.pattern}{' flat' * (site.grouping.axis == 'flat')}" for site in sites}


def changes(state: Mapping[str, Any], method: Method) -> list[tuple[str, Any, Any]]:
    """Name, saved and attached value of each option that is not what it was."""
    was, now = {name: _plain(value) for name, value in state.get("options", {}).items()}, _options(method)
    meant = [(name, *(method.meant(name, each[name]) for each in (was, now))) for name in now if name in was]
    return [(name, was[name], now[name]) for name, before, after in meant if not _are_same(before, after)]


def told(changed: Sequence[tuple[str, Any, Any]]) -> tuple[str, str]:
    """The saved and the attached values of `changes`, as they are written in a call."""
    was, now = (", ".join(f"{change[0]}={change[i]!r}" for change in changed) for i in (1, 2))
    return was, now


def check(state: Mapping[str, Any], method: Method, owned: Sequence[Sequence[Site]], sites: Sequence[Site], memory: Memory) -> None:
    """Raise where `method`, attached to `sites`, cannot go on from `state`; `owned`: those of each optimizer."""
    name, optimizers = type(method).__name__, len(owned)
    if not isinstance(state, Mapping) or any(part not in state for part in _PARTS):
        raise OptimizerError(
            f"this is no state of a handle, which has {', '.join(_PARTS)}; load what handle.state_dict() has given, not that of the "
            "model, of the optimizer, or of all together"
        )
    if state["method"] != name:
        raise OptimizerError(f"this state is of method {state['method']}, the attached one is {name}; attach the same method, {_AS_IT_WAS}")
    if len(state["steps"]) != optimizers:
        raise OptimizerError(f"this state is of {len(state['steps'])} optimizers, {optimizers} are attached")
    _check_patterns(state, sites)
    for option, was, now in changes(state, method):
        if option in method.begun_with():
            raise OptimizerError(
                f"this state is of {name}({option}={was!r}), the attached one has {option}={now!r}, and what the state holds was made by "
                f"the former; attach the method as it was, {_AS_IT_WAS}"
            )
    _check_not_taken_back(state, method, owned)
    if missing := [what for what in method.remembers() if not any(what in held for held in state["memory"].values())]:
        raise OptimizerError(
            f"this state of {name} has no {missing[0]}, which the attached one goes on from: it is of other options, or of a {name} "
            f"that did not remember that; attach the method as it was, {_AS_IT_WAS}"
        )
    _check_masks(state, sites)
    memory.check(state["memory"])


def _check_not_taken_back(state: Mapping[str, Any], method: Method, owned: Sequence[Sequence[Site]]) -> None:
    if not (changed := changes(state, method)):
        return
    for number, sites in zip(state["steps"], owned, strict=True):
        if undone := method.takes_back(state["options"], sites, int(number)):
            was, now = told(changed)
            raise OptimizerError(
                f"this state is of {type(method).__name__}({was}), the attached one has {now}, by which {undone}; attach the method as it "
                f"was, {_AS_IT_WAS}"
            )


def _check_patterns(state: Mapping[str, Any], sites: Sequence[Site]) -> None:
    now = _patterns(sites)
    was: dict[str, str] = state.get("patterns", now)
    if unlike := [key for key in dict.fromkeys([*was, *now]) if was.get(key) != now.get(key)]:
        key, others = unlike[0], f" (and {len(unlike) - 1} more)" * (len(unlike) > 1)
        raise OptimizerError(
            f"{key}: {was.get(key, 'not sparse')} in this state, {now.get(key, 'not sparse')} in this model{others}; sparsify_ it as it "
            f"was, {_AS_IT_WAS}"
        )


def _check_masks(state: Mapping[str, Any], sites: Sequence[Site]) -> None:
    by_key = {site.key: site for site in sites}
    if unknown := sorted(set(state["masks"]) - set(by_key)):
        raise OptimizerError(f"this state has masks for {', '.join(unknown)}, which are not sparse weights of this model")
    for key, packed in state["masks"].items():
        weights = by_key[key].weight.numel()
        if packed.numel() != -(-weights // 8):  # eight in a byte
            raise OptimizerError(f"{key}: the mask in this state is not of its {weights:,} weights; load the state into the same network")
