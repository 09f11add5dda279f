"""From recipe, file and options to one checked `RunConfig`; every complaint names its key and where the value came from.

Values are merged as plain nested dicts and read by pydantic at the end, strictly: a text is no number, a key that does not exist
is an error. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from .config import ConfigError, RunConfig
from .synonyms import SYNONYMS

__all__ = [
    "Origins",
    "completed",
    "differences",
    "digest",
    "explain",
    "from_dict",
    "keys",
    "leaves",
    "merge",
    "near",
    "near_key",
    "near_path",
    "read_toml",
    "says",
    "takes_numbers",
    "telling",
    "telling_differences",
    "to_dict",
]

Values: TypeAlias = dict[str, Any]
Origins: TypeAlias = Mapping[str, str]  # by key: "--optim.lr", or "run.toml:12 optim.lr ="

_MAX_FILE = 1_000_000
_NEAR = 0.75  # of 1: two letters of eight may be others
_WHICH = {"kind", "name", "type"}
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "none"}


# ---- the keys ----


def leaves(cls: Any = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a configuration, with its type."""
    return _leaves(cls, prefix)


@functools.cache
def _leaves(cls: Any, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(cls).items():
        if typing.get_origin(kind) is typing.ClassVar:
            continue
        if dataclasses.is_dataclass(kind):
            found.update(leaves(kind, f"{prefix}{name}."))
        else:
            found[prefix + name] = kind
    return found


def keys() -> list[str]:
    """Every dotted key."""
    return list(leaves())


def says(kind: Any) -> str:
    """A type in words: what is allowed."""
    if typing.get_origin(kind) is typing.Literal:
        words = list(map(str, typing.get_args(kind)))
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(says(arg) for arg in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        first, *rest = typing.get_args(kind)
        return f"a list, each {says(first)}" if rest == [...] else f"a list of {len(rest) + 1}, each {says(first)}"
    return _WORDS.get(kind, "a group of keys")


def choices(kind: Any) -> list[str] | None:
    """The words that a type allows, or None where it is not a choice of words."""
    if typing.get_origin(kind) is typing.Literal:
        return [str(arg) for arg in typing.get_args(kind)]
    for arg in typing.get_args(kind):
        if (found := choices(arg)) is not None:
            return found
    return None


def takes_numbers(kind: Any) -> bool:
    """Whether a number is among what a type allows."""
    return kind in (int, float) or any(map(takes_numbers, typing.get_args(kind)))


def near(word: str, allowed: Iterable[str]) -> str:
    """ "; did you mean 'x'?" where something close to `word` is allowed, else nothing.

    Of names in groups (optim.lr, imagenet/resnet50) the last parts are compared: a long group in common makes no two of them alike, and
    somebody may have forgotten the group or taken another one. Within a group, words that ask the same are alike: optim.name, optim.kind.
    """
    options, (group, last) = list(allowed), _parted(word)
    parted = {option: _parted(option) for option in options}
    like = {option: _likeness(last, name, kin=group in ("", its)) for option, (its, name) in parted.items()}
    like |= {option: _NEAR for option, (its, name) in parted.items() if group == its != "" and last != name and {last, name} <= _WHICH}
    close = [option for option in options if option.startswith((f"{word}.", f"{word}/"))]  # a group is typed instead of a name in it
    close = close or [option for option in options if like[option] == 1]
    others = [option for option in options if _NEAR <= like[option] < 1]
    if others:
        best = max(others, key=lambda option: (parted[option][0] == group, like[option]))
        if not close or (parted[best][0] == group and group not in {parted[option][0] for option in close}):
            close.insert(0, best)
    return f"; did you mean {' or '.join(map(repr, close[:3]))}?" if close else ""


def near_key(key: str, allowed: Iterable[str]) -> str:
    """As `near`, for a key of a configuration: one that has another name here is told that name."""
    meant = SYNONYMS.get(_parted(key)[1].lower().replace("-", "_"))
    return near(key, allowed) if meant is None else f"; did you mean {meant!r}?"


def near_path(path: Path, siblings: Iterable[Path]) -> str:
    """As `near`, for a file or folder: the one beside it with a name like its own."""
    names = {sibling.name: sibling for sibling in siblings}
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=_NEAR)
    return f"; did you mean {str(names[close[0]])!r}?" if close else ""


def _parted(name: str) -> tuple[str, str]:
    group, _, last = name.rpartition("/" if "/" in name else ".")
    return group, last


def _likeness(typed: str, name: str, *, kin: bool) -> float:
    """1 for the same letters, else how much of both is the same. `kin`: a word in common (decay of weight_decay) is near enough."""
    typed, name = (text.lower().replace("-", "_") for text in (typed, name))
    if typed.replace("_", "") == name.replace("_", ""):
        return 1.0
    ours, theirs = set(typed.split("_")), set(name.split("_"))
    ratio = difflib.SequenceMatcher(None, typed, name).ratio()
    return max(ratio, _NEAR) if kin and (ours <= theirs or theirs <= ours) else ratio


def explain(origins: Origins, key: str, value: Any, problem: str) -> str:
    """One line about one key."""
    shown = "none" if value is None else json.dumps(value) if isinstance(value, bool | list | tuple) else str(value)
    where = origins.get(key, f"{key} =")
    return f"{where} {shown}: {problem}"


# ---- dicts ----


def to_dict(config: RunConfig) -> Values:
    """The configuration as nested dicts of plain values, tuples as lists: what run.json holds."""
    result: Values = json.loads(json.dumps(dataclasses.asdict(config)))
    return result


def merge(base: Values, over: Mapping[str, Any]) -> Values:
    """`base` with the values of `over` in it, group by group."""
    merged = dict(base)
    for name, value in over.items():
        both_groups = isinstance(merged.get(name), dict) and isinstance(value, Mapping)
        merged[name] = merge(merged[name], value) if both_groups else value
    return merged


def from_dict(values: Values, origins: Origins | None = None) -> RunConfig:
    """Read a configuration from nested dicts, or raise `ConfigError` with one line for each wrong value."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(RunConfig).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        lines = [_complaint(dict(problem), origins or {}) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _complaint(problem: dict[str, Any], origins: Origins) -> str:
    names = [str(part) for part in problem["loc"] if isinstance(part, str)]
    key = ".".join(names)
    unknown = problem["type"] in ("extra_forbidden", "unexpected_keyword_argument")
    while not unknown and key not in leaves() and not any(k.startswith(f"{key}.") for k in keys()) and len(names) > 1:
        key = ".".join(names := names[:-1])
    value = problem["input"]
    if unknown:
        return f"{origins.get(key, f'{key} =')} {value}: no such key{near_key(key, keys())}"
    kind = leaves().get(key)
    allowed = "a group of keys" if kind is None else says(kind)
    hint = ""
    if isinstance(value, str) and kind is not None:
        words = choices(kind)
        if words and not (_is_number(value) and takes_numbers(kind)):
            hint = near(value, words)
        elif _is_number(value):
            hint = f"; write it without quotes: {value}"
        elif value.lower() in ("yes", "no", "on", "off"):
            hint = f"; did you mean {str(value.lower() in ('yes', 'on')).lower()!r}?"
    return explain(origins, key, value, f"must be {allowed}{hint}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def differences(old: Values, new: Values, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys whose values differ, with both values."""
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{prefix}{name}.")
        elif was != now:
            yield f"{prefix}{name}", was, now


# ---- which configuration ----

# Where a run is made, by which code (compiled, as graphs, side by side: another rounding), what it leaves behind and how often it is
# tested; all else decides its numbers. (SAD is counted every log_every.)
_OF_THE_MACHINE = (
    "seed", "out", "device", "data.root", "data.cache",
    "engine.checkpoint_every", "engine.eval_every", "engine.histogram_every", "engine.keep", "engine.track", "engine.workers",
    "engine.compile", "engine.graph", "model.batch_parts",
)  # fmt: skip


def telling(values: Values) -> Values:
    """What of a configuration decides its numbers, by dotted key, without what is as it usually is.

    So a key that a later version adds does not change what an older run tells of itself.
    """
    return {key: now for key, _, now in telling_differences({}, values)}


def telling_differences(old: Values, new: Values) -> Iterator[tuple[str, Any, Any]]:
    """As `differences`, of what decides numbers; a key that one of the two does not have is as it usually is."""
    return (change for change in differences(completed(old), completed(new)) if change[0] not in _OF_THE_MACHINE)


def completed(values: Values) -> Values:
    """A configuration that an earlier version may have written: keys that it did not know are as they usually are, as they were then."""
    return merge(to_dict(RunConfig()), values)


def digest(values: Values) -> str:
    """Twelve digits that are the same for runs of one configuration, whatever their seeds and machines."""
    told = {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in telling(values).items()}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]


# ---- files ----


def read_toml(path: Path) -> tuple[Values, dict[str, str]]:
    """The values of a TOML file, and for each key the file and line it stands in. The text "none" is none, which TOML has no word for,
    wherever that is allowed: as on the command line."""
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        raise ConfigError(f"--config {path}: only TOML files are read; did you mean {path.with_suffix('.toml').name!r}?")
    try:
        if path.stat().st_size > _MAX_FILE:
            raise ConfigError(f"--config {path}: larger than {_MAX_FILE:,} bytes, so it is no configuration")
        text = path.read_bytes().decode()
        values = tomllib.loads(text)
    except FileNotFoundError:
        siblings = path.parent.glob("*.toml") if path.parent.is_dir() else ()
        raise ConfigError(f"--config {path}: no such file{near_path(path, siblings)}") from None
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); TOML files are UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {_teach(str(error), text)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a configuration: nested too deeply") from None
    return _with_nones(values), {key: f"{path.name}:{number} {key} =" for key, number in _lines(text)}


def _with_nones(values: Values, prefix: str = "") -> Values:
    kinds = leaves()
    return {
        name: _with_nones(value, f"{prefix}{name}.") if isinstance(value, dict)
        else None if value == "none" and type(None) in typing.get_args(kinds.get(prefix + name))
        else value
        for name, value in values.items()
    }  # fmt: skip


def _teach(message: str, text: str) -> str:
    if text.startswith("\ufeff"):
        return "it starts with a byte-order mark; save it as UTF-8 without one"
    if "Cannot overwrite a value" in message:
        return f"{message}: a key stands there twice; keep one of them"
    if re.search(r"^\s*\w+:\s", text, re.MULTILINE):
        return f'{message}; TOML writes key = value, with texts in quotes: pattern = "2:4"'
    return message


def _lines(text: str) -> Iterator[tuple[str, int]]:
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.\s-]+)\]", line):
            table = header[1].replace(" ", "") + "."
            yield table[:-1], number
        elif pair := re.match(r"\s*([\w.-]+)\s*=", line):
            yield table + pair[1], number
