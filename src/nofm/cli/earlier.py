"""Options that need not be given again: `nofm study` in a folder with runs takes those that it does not get from the command of before.

They are read from run.json, which holds the command that made a run, so that runs which came back from another machine do as well. What
the rows are made of is taken (the recipe, its options, the seeds) and, where it is the same studies that are gone on with, which rows were
asked for; not what a command asks for itself (in which order, for how long). What is taken is printed, and runs that it does not fit are
refused as ever. Needs no torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ..engine.config import ConfigError
from .options import pairs_of, positive

__all__ = ["completed"]

_WHICH_ROWS = ("rows", "without")
_OF_ONE_COMMAND = (*_WHICH_ROWS, "out", "into", "order", "lanes", "processes", "limit", "table")

_Options: TypeAlias = dict[str, list[str]]  # by key without its dashes: the texts that follow it
_Started: TypeAlias = tuple[Path, list[str], _Options]  # a run, and of its command the studies and the options


def completed(names: Sequence[str], args: list[str]) -> list[str]:
    """The options of a command about these studies, and after them those that the newest run in its --out was started with and that are not
    given."""
    given = dict(pairs_of(args))
    if len(given.get("out", ())) != 1 or "config" in given:  # a file stands for all options
        return args
    found = _started(Path(given["out"][0]) / "runs")
    if not found:
        return args
    run, _, before = found[0]
    if given.get("on", before["on"]) != before["on"]:
        return args
    known = {positive(key) for key in given}
    missing = {key: texts for key, texts in before.items() if positive(key) not in known and key not in _OF_ONE_COMMAND}
    if added := _typed(missing):
        print(f"as {run} was started: {shlex.join(added)}", flush=True)
    if known.isdisjoint((*_WHICH_ROWS, "table")) and (rows := _typed(_rows_of_before(names, found))):
        print(f"only the rows of before: {shlex.join(rows)} (all of them: --rows '*')", flush=True)
        added += rows
    return [*args, *added]


def _rows_of_before(names: Sequence[str], found: Sequence[_Started]) -> _Options:
    """Which rows the newest command about these studies has asked for: without that, to go on would train many more."""
    options = next((options for _, others, options in found if set(others) == set(names)), {})
    return {key: options[key] for key in _WHICH_ROWS if options.get(key, ["*"]) != ["*"]}


def _started(runs: Path) -> list[_Started]:
    """The runs that were started by `nofm study`, the newest first."""
    found = []
    for file in sorted(runs.glob("*/seed-*/run.json")):
        try:
            info: Any = json.loads(file.read_text())
            # Small runs start several in a second, which `started` does not tell apart; the file, written when a run starts, does.
            words, started = list(map(str, info["command"])), (str(info["started"]), file.stat().st_mtime_ns)
        except (ValueError, TypeError, KeyError, OSError):
            continue  # it is refused where its row is looked at
        if words[:2] == ["nofm", "study"]:
            count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
            if (options := _options(words[count:])) is not None:
                found.append((started, (file.parent, words[2:count], options)))
    return [row for _, row in sorted(found, key=lambda row: row[0], reverse=True)]


def _options(words: list[str]) -> _Options | None:
    """The options of a command; None where it is not one that could have made a run."""
    try:
        options = dict(pairs_of(words))
    except ConfigError:
        return None
    return options if len(options.get("on", ())) == 1 else None


def _typed(options: _Options) -> list[str]:
    return [word for key, texts in options.items() for word in _words(key, texts)]


def _words(key: str, texts: list[str]) -> list[str]:
    """As it is typed; a text that looks like an option stays behind its key."""
    return [f"--{key}={texts[0]}"] if len(texts) == 1 and texts[0].startswith("--") else [f"--{key}", *texts]
