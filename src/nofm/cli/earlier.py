"""Options that need not be given again: `nofm study` in a folder with runs takes those that it does not get from the command of before.

They are read from run.json, which holds the command that made a run, so that runs which came back from another machine do as well. Only
what the rows are made of is taken (the recipe, its options, the seeds), not what a command asks for itself (which rows, for how long).
What is taken is printed, and runs that it does not fit are refused as ever. Needs no torch.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, TypeAlias

from ..engine.config import ConfigError
from .options import pairs_of, positive

__all__ = ["completed"]

_OF_ONE_COMMAND = ("out", "into", "rows", "without", "order", "lanes", "processes", "limit", "table")

_Options: TypeAlias = dict[str, list[str]]  # by key without its dashes: the texts that follow it


def completed(args: list[str]) -> list[str]:
    """The options of a command, and after them those that the newest run in its --out was started with and that are not given."""
    given = dict(pairs_of(args))
    if len(given.get("out", ())) != 1 or "config" in given:  # a file stands for all options
        return args
    found = _newest(Path(given["out"][0]) / "runs")
    if found is None:
        return args
    run, before = found
    if given.get("on", before["on"]) != before["on"]:
        return args
    known = {positive(key) for key in given}
    missing = {key: texts for key, texts in before.items() if positive(key) not in known and key not in _OF_ONE_COMMAND}
    added = [word for key, texts in missing.items() for word in _words(key, texts)]
    if added:
        print(f"as {run} was started: {shlex.join(added)}", flush=True)
    if chosen := [word for key in ("rows", "without") if key in before and key not in given for word in _words(key, before[key])]:
        print(f"its {shlex.join(chosen)} is not taken over: without that this command is about all rows", flush=True)
    return [*args, *added]


def _newest(runs: Path) -> tuple[Path, _Options] | None:
    """The run that was started last by `nofm study`, and the options of its command."""
    found = []
    for file in sorted(runs.glob("*/seed-*/run.json")):
        try:
            info: Any = json.loads(file.read_text())
            words, started = list(map(str, info["command"])), str(info["started"])
        except (ValueError, TypeError, KeyError, OSError):
            continue  # it is refused where its row is looked at
        if words[:2] == ["nofm", "study"] and (options := _options(words[2:])) is not None:
            found.append((started, file.parent, options))
    return None if not found else max(found, key=lambda row: row[0])[1:]


def _options(words: list[str]) -> _Options | None:
    """The options of a command; None where it is not one that could have made a run."""
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    try:
        options = dict(pairs_of(words[count:]))
    except ConfigError:
        return None
    return options if len(options.get("on", ())) == 1 else None


def _words(key: str, texts: list[str]) -> list[str]:
    """As it is typed; a text that looks like an option stays behind its key."""
    return [f"--{key}={texts[0]}"] if len(texts) == 1 and texts[0].startswith("--") else [f"--{key}", *texts]
