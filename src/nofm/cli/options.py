"""`--group.key value` options of `nofm train`: read by tyro, which also prints the help, after every key and value has been looked at
here, so that complaints about them read as all others do. Needs no torch."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.config import ConfigError, RunConfig
from ..engine.counting import recount
from ..engine.resolve import Origins, choices, from_dict, leaves, merge, near, near_key, read_toml, says, to_dict
from ..engine.validate import METHOD_OPTIONS, OPTIMIZER_OPTIONS, SCHEDULE_OPTIONS
from ..recipes import RECIPES, describe, find
from .pages import fitted, fitting
from .words import fit, say

__all__ = ["Options", "check_value", "pairs_of", "parse", "positive", "without_a_pattern_of_before"]


@dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
    """A recipe, and what to change in it."""

    config: str | None = None
    """A TOML file with values that go before the recipe's; options go before both."""
    resume: bool = False
    """Go on from the newest checkpoint in --out, or start there if there is none."""
    allow_change: bool = False
    """Resume though the configuration is not the one that the run was started with."""
    seeds: int = 1
    """Train so many times, with seeds from --seed on, each in a folder of its own: DIR/seed-0, DIR/seed-1, ..."""
    debug: bool = False
    """Show tracebacks."""


def parse(recipe: str, base: RunConfig, args: list[str], *, begun: bool = False) -> tuple[RunConfig, Options, dict[str, str]]:
    """The configuration, the options beside it, and where each value came from. `begun`: the base is that of a run, and its lengths are
    those of what is behind it."""
    pairs = [] if {"-h", "--help"} & set(args) else pairs_of(args)
    origins: dict[str, str] = {}
    values = to_dict(base)
    for key, texts in pairs:
        if key == "config":
            if len(texts) != 1:
                raise ConfigError("--config: needs one TOML file")
            from_file, origins = read_toml(Path(texts[0]))
            values = merge(values, from_file)
    config = from_dict(values, origins)
    for key, texts in pairs:
        _look_at(key, texts)
    options = _read(recipe, config, [text for key, texts in pairs for text in _as_tyro(key, texts)] if pairs else args)
    origins |= {key: f"--{key}" for key, _ in pairs}
    changed = {f.name: getattr(options, f.name) for f in dataclasses.fields(RunConfig)}
    values = to_dict(RunConfig(**changed))
    _forget_what_belonged_to_another_kind(values, to_dict(base), origins)
    if not begun and (said := recount(values, to_dict(base), origins)):
        say(fit(said))
    return from_dict(values, origins), options, origins


def _forget_what_belonged_to_another_kind(values: dict[str, Any], base: dict[str, Any], origins: dict[str, str]) -> None:
    """Where another method, optimizer or schedule is asked for, what the recipe says about its own does not stay behind."""
    defaults = to_dict(RunConfig())
    for group, owned in (("sparsity.method", METHOD_OPTIONS), ("optim", OPTIMIZER_OPTIONS), ("schedule", SCHEDULE_OPTIONS)):
        now, before, usual = (functools.reduce(dict.__getitem__, group.split("."), held) for held in (values, base, defaults))
        if now["kind"] == before["kind"]:
            continue
        # An option of the same name means the same to another optimizer, but not to another method.
        shared = () if group == "sparsity.method" else owned.get(now["kind"], ())
        for name in dict.fromkeys(option for options in owned.values() for option in options):
            if name not in shared and f"{group}.{name}" not in origins:
                now[name] = usual[name]


def without_a_pattern_of_before(config: RunConfig, origins: Origins, *, begun: bool = False) -> tuple[RunConfig, str]:
    """Rules or a budget stand instead of a pattern: where they are given, and a pattern is not, that of the recipe (`begun`: of the run)
    goes, with a line that says so. Not in `parse`, since the rows of a study have patterns of their own, which may be the base's."""
    s = config.sparsity
    given = [
        key for key, value in (("sparsity.rules", s.rules or None), ("sparsity.budget", s.budget)) if key in origins and value is not None
    ]
    if s.pattern is None or not given or "sparsity.pattern" in origins:
        return config, ""
    left = "; layers that no rule matches stay dense" if s.rules and not any(rule.startswith("*=") for rule in s.rules) else ""
    said = f"{' and '.join(given)} instead of the {'run' if begun else 'recipe'}'s sparsity.pattern {s.pattern}{left}"
    return dataclasses.replace(config, sparsity=dataclasses.replace(s, pattern=None)), said


def _read(recipe: str, config: RunConfig, args: list[str]) -> Options:
    import tyro

    default = Options(**{f.name: getattr(config, f.name) for f in dataclasses.fields(RunConfig)})
    how: dict[str, Any] = {"args": args, "prog": f"nofm train {recipe}", "use_underscores": True}
    if {"-h", "--help"} & set(args):
        from .listed import as_listed, listed

        default = as_listed(listed(default, config.task.kind), default)
        with fitting():
            return tyro.cli(type(default), default=default, description=_about(recipe, config), **how)
    return tyro.cli(type(default), default=default, **how)


def _about(recipe: str, config: RunConfig) -> str:
    examples: dict[str, str] = {}
    for name in RECIPES:
        examples.setdefault(find(name).task.kind, name)
    others = [f"  {kind:14}  nofm train {name} --help" for kind, name in examples.items() if kind != config.task.kind]
    more = f"Options of {config.task.kind} and of all tasks; the value none unsets one. What other tasks have besides is listed by:"
    return fitted("\n".join([describe(recipe), "", more, "", *others]), indent=2)


def pairs_of(args: list[str]) -> list[tuple[str, list[str]]]:
    """[("optim.lr", ["0.1"]), ...] of ["--optim.lr", "0.1"] or ["--optim.lr=0.1"]; a hyphen in a key is an underscore."""
    found: list[tuple[str, list[str]]] = []
    for arg in args:
        if arg.startswith("--") and len(arg) > 2:
            key, equals, text = arg[2:].partition("=")
            found.append((key.replace("-", "_"), [text] if equals else []))
        elif not found:
            raise ConfigError(f"{arg!r}: options look like --optim.lr 0.1")
        else:
            found[-1][1].append(arg)
    named = [key for key, _ in found]
    for key in named:
        if named.count(key) > 1:
            raise ConfigError(f"--{key}: given {named.count(key)} times; give it once")
    return found


def _known() -> dict[str, Any]:
    return leaves(Options)


def positive(key: str) -> str:
    """ "engine.compile" of "engine.no_compile", which is how tyro spells false."""
    group, dot, name = key.rpartition(".")
    plain = group + dot + name.removeprefix("no_")
    return plain if key not in _known() and _known().get(plain) is bool else key


def _look_at(key: str, texts: list[str]) -> None:
    """Raise for a key that does not exist or texts that cannot be its value."""
    if key in ("help", "h"):
        return
    name = positive(key)
    if name not in _known():
        inside = [k for k in _known() if k.startswith(f"{name}.")]
        hint = f"; it is a group: --{inside[0]}, ..." if inside else re.sub(r"'([\w.]+)'", r"'--\1'", near_key(name, _known()))
        raise ConfigError(f"--{key}: no such option{hint or '; nofm train RECIPE --help lists those of its task'}")
    check_value(key, texts, _known()[name])


def check_value(key: str, texts: list[str], kind: Any) -> None:
    """Raise for texts behind the option `key` that cannot be a value of the type `kind`."""
    shown = " ".join(texts)
    if kind is bool:
        if texts and shown.lower() not in ("true", "false"):
            raise ConfigError(f"--{key} {shown}: must be true or false")
        return
    is_list = any(typing.get_origin(k) is tuple for k in _members(kind))
    if not texts and not is_list:
        raise ConfigError(f"--{key}: needs a value: {says(kind)}")
    if len(texts) > 1 and not is_list:
        raise ConfigError(f"--{key} {shown}: takes one value: {says(kind)}")
    for text in texts:
        if not _fits(text, kind):
            words = choices(kind)
            raise ConfigError(f"--{key} {text}: must be {says(kind)}{near(text, words) if words else _near_number(text, kind)}")


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _fits(text: str, kind: Any) -> bool:
    for member in _members(kind):
        if typing.get_origin(member) is tuple:
            member = typing.get_args(member)[0]
        if member in (str, Path) or (member is type(None) and text.lower() == "none"):
            return True
        if typing.get_origin(member) is typing.Literal and text in map(str, typing.get_args(member)):
            return True
        if member in (int, float):
            try:
                member(text)
            except ValueError:
                continue
            return True
    return False


def _near_number(text: str, kind: Any) -> str:
    """What was meant by a text that is almost a number of this type: 0,1; where it is to be whole, 1,000 and 1e3."""
    meant = re.sub(r",(?=\d{3}\b)", "", text) if int in _members(kind) else text
    meant = meant.replace(",", ".").replace("O", "0").replace("o", "0")
    try:
        value = float(meant)
    except ValueError:
        return ""
    if not _fits(meant, kind) and value.is_integer() and abs(value) < 1e15:
        meant = f"{value:.0f}"
    return f"; did you mean {meant!r}?" if _fits(meant, kind) else ""


def _as_tyro(key: str, texts: list[str]) -> list[str]:
    """As tyro reads it: a bool is a flag and its opposite."""
    name = positive(key)
    kind = _known().get(name)
    if kind is not bool:
        optional = type(None) in _members(kind)
        return [f"--{key}", *("None" if optional and text.lower() == "none" else text for text in texts)]
    value = (name == key) == (not texts or texts[0].lower() == "true")
    group, dot, last = name.rpartition(".")
    return [f"--{name}" if value else f"--{group}{dot}no_{last}"]
