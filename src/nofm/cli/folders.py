"""Run folders as the commands are given them: is it one, which ones are inside, what was it started with. Needs no torch."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from ..engine.config import ConfigError, RunConfig
from ..engine.resolve import from_dict, leaves, near_path

__all__ = ["check_run", "layers_of", "runs_in", "started_with"]


def runs_in(folder: Path) -> list[Path]:
    """The folder itself, or the runs in it: what `--seeds` and `nofm study` leave."""
    if (folder / "run.json").is_file():
        return [folder]
    return sorted(file.parent for depth in ("*", "*/*", "runs/*/*") for file in folder.glob(f"{depth}/run.json")) or [folder]


def check_run(run: Path) -> None:
    """Raise unless `run` is a run folder."""
    if not (run / "run.json").is_file():
        siblings = [p.parent for p in run.parent.glob("*/run.json")] if run.parent.is_dir() else []
        raise ConfigError(f"{run}: no run folder (it has no run.json){near_path(run, siblings)}")


def layers_of(run: Path) -> list[tuple[str, bool, str]]:
    """The layers that run.json lists: name, whether the run made it sparse, and its note, which says why not."""
    try:
        return [(str(row["name"]), bool(row["pattern"]), str(row["note"])) for row in json.loads((run / "run.json").read_text())["layers"]]
    except (ValueError, TypeError, KeyError, OSError):
        raise ConfigError(f"{run / 'run.json'}: does not hold the layers of a run; check {run / 'model.safetensors'} instead") from None


def started_with(folder: Path) -> tuple[str, RunConfig]:
    """The recipe and the configuration that the run in `folder` was started with."""
    inside = runs_in(folder)
    if inside != [folder]:
        typed = list(map(str, _run_json(inside[0])["command"]))
        again = shlex.join([*typed, "--resume"] if typed[1:2] == ["train"] and "--resume" not in typed else typed)
        count = f"{len(inside)} run{'s' * (len(inside) > 1)}"
        raise ConfigError(f"{folder}: holds {count}; give one of them, such as {inside[0]}, or the command that made them: {again}")
    check_run(folder)
    info = _run_json(folder)
    return str(info.get("recipe", "")), from_dict(info["config"], {key: f"{folder / 'run.json'}: {key} =" for key in leaves()})


def _run_json(folder: Path) -> dict[str, Any]:
    try:
        info: dict[str, Any] = json.loads((folder / "run.json").read_text())
        if isinstance(info["config"], dict) and isinstance(info["command"], list):
            return info
    except (ValueError, TypeError, KeyError, OSError):
        pass
    raise ConfigError(f"{folder / 'run.json'}: does not hold the configuration of a run")
