"""Run folders as the commands are given them: is it one, which ones are inside, what were they started with. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from ..engine.config import ConfigError, RunConfig
from ..engine.resolve import from_dict, leaves, near_path
from .words import taken

__all__ = ["Begun", "begun", "check_run", "layers_of", "runs_in", "started_with"]


@dataclasses.dataclass(frozen=True)
class Begun:
    """A run to go on with, and the command that it began with."""

    folder: Path
    recipe: str
    config: RunConfig
    command: list[str]


def runs_in(folder: Path) -> list[Path]:
    """The folder itself, or the runs in it: what `--seeds` and `nofm study` leave."""
    if (folder / "run.json").is_file():
        return [folder]
    return sorted(file.parent for depth in ("*", "*/*", "runs/*/*") for file in folder.glob(f"{depth}/run.json")) or [folder]


def check_run(run: Path) -> None:
    """Raise unless `run` is a run folder."""
    if not (run / "run.json").is_file():
        siblings = [p.parent for p in run.parent.glob("*/run.json")] if run.parent.is_dir() else []
        inside = next((found for found in runs_in(run) if found != run), None)
        hint = f"; give a run that is in it, such as {inside}" if inside else near_path(run, siblings)
        raise ConfigError(f"{run}: no run folder (it has no run.json){hint}")


def layers_of(run: Path) -> list[tuple[str, bool, str]]:
    """The layers that run.json lists: name, whether the run made it sparse, and its note, which says why not."""
    try:
        return [(str(row["name"]), bool(row["pattern"]), str(row["note"])) for row in json.loads((run / "run.json").read_text())["layers"]]
    except (ValueError, TypeError, KeyError, OSError):
        raise ConfigError(f"{run / 'run.json'}: does not hold the layers of a run; check {run / 'model.safetensors'} instead") from None


def started_with(folder: Path) -> tuple[str, RunConfig]:
    """The recipe and the configuration that the run in `folder` was started with."""
    check_run(folder)
    info = _run_json(folder)
    return str(info.get("recipe", "")), from_dict(info["config"], {key: f"{folder / 'run.json'}: {key} =" for key in leaves()})


def begun(folder: Path) -> list[Begun]:
    """The run in `folder`, or all that it holds, and those of `--seeds` that the command did not come to. Not those of a study, which
    goes on by its own command."""
    runs = []
    for run in runs_in(folder):
        recipe, config = started_with(run)
        runs.append(Begun(run, recipe, config, _first_command(_run_json(run))))
        if runs[-1].command[1:2] == ["study"] and run != folder:
            raise ConfigError(f"{folder}: holds runs of a study, which goes on by {_study(runs[-1])}; or give one run, such as {run}")
    runs.sort(key=lambda run: (run.folder.parent, run.config.seed))
    if any(run.folder != folder / f"seed-{run.config.seed}" for run in runs):
        return runs
    known = {run.config.seed: run for run in runs}
    for model in runs:
        for seed in _seeds(model, runs[0].config.seed):
            config = dataclasses.replace(model.config, seed=seed)
            known.setdefault(seed, dataclasses.replace(model, folder=folder / f"seed-{seed}", config=config))
    return [known[seed] for seed in sorted(known)]


def _seeds(run: Begun, lowest: int) -> range:
    """Those that its command has asked for, from the `lowest` on where it does not say."""
    first, _ = taken(run.command, "--seed", str(lowest))
    count, _ = taken(run.command, "--seeds", "1")
    return range(int(first), int(first) + int(count)) if first.isdecimal() and count.isdecimal() else range(0)


def _first_command(info: dict[str, Any]) -> list[str]:
    try:
        return list(map(str, [*(row["command"] for row in info.get("earlier", [])), info["command"]][0]))
    except (TypeError, KeyError):
        return []  # a run can go on without it


def _study(run: Begun) -> str:
    """The command that goes on with the study of a run in OUT/runs/NAME/seed-N; its options are found there."""
    names = run.command[2 : next((i for i, word in enumerate(run.command) if word.startswith("-")), len(run.command))]
    return shlex.join(["nofm", "study", *names, "--out", str(run.folder.absolute().parents[2])])


def _run_json(folder: Path) -> dict[str, Any]:
    try:
        info: dict[str, Any] = json.loads((folder / "run.json").read_text())
        if isinstance(info["config"], dict) and isinstance(info["command"], list):
            return info
    except (ValueError, TypeError, KeyError, OSError):
        pass
    raise ConfigError(f"{folder / 'run.json'}: does not hold the configuration of a run")
