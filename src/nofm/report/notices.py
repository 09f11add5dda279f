"""What a reader must know before comparing: runs that broke off, seeds that repeat, conditions that differ."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import curves
from .begun_with import begun_with
from .compare import Group
from .measured_on import are_held_out, data_of_all, measured_alike
from .read import Run

__all__ = ["about_comparing", "notices", "short_names"]


def notices(groups: Sequence[Group], names: Mapping[Path, str]) -> list[str]:
    """One sentence each."""
    runs = [run for group in groups for run in group.runs]
    said = [f"{names[run.folder]}: {notice}." for run in runs for notice in run.notices]
    said += [_broken_off(run, names[run.folder]) for run in runs if run.status != "finished"]
    said += [sentence for run in runs for sentence in _other_processes(run, names[run.folder])]
    said += [f"{names[run.folder]}: {left}, which the run did not come to." for run in runs if (left := run.unfinished)]
    said += [
        f"{names[run.folder]} went on at step {begin:,} with other options: {shlex.join(words)}."
        for run in runs
        for words, begin in run.commands[1:]
    ]
    said += [sentence for run in runs for sentence in _young_average(run, names[run.folder])]
    said += [sentence for group in groups for sentence in _logged_apart(group)]
    return [*said, *about_comparing(groups), *_conditions(runs)]


def about_comparing(groups: Sequence[Group]) -> Iterator[str]:
    """What is wrong with comparing these groups, or with the spread of one, and which images are not those of the test."""
    if not measured_alike(groups):
        yield f"Measured on different data, so none of them is called the best: {data_of_all(groups)}."
    elif are_held_out(groups):
        yield f"Measured on {data_of_all(groups)}, not on test data."
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            which = ", ".join(map(str, repeated))
            yield f"{group.label} has more than one run of seed {which}: they are not independent, so its spread is too small."
    yield from _begun(groups)
    lengths = {run.last_step for group in groups for run in group.finished}
    if len(lengths) > 1:
        yield f"The runs differ in length: {', '.join(f'{steps:,}' for steps in sorted(lengths))} steps."


def _begun(groups: Sequence[Group]) -> Iterator[str]:
    """Where training has begun with trained weights, the steps that are told are not all there were."""
    begun = {group.label: begun_with(group.runs[0].info["config"]) for group in groups}
    trained = [label for label, what in begun.items() if what]
    if len(found := list(dict.fromkeys(begun.values()))) == 1:
        yield from (f"All runs began with {what}." for what in found if what)
    elif len(trained) == len(begun):
        yield f"The runs began with different trained weights: {'; '.join(found)}."
    else:
        yield f"Begun with trained weights: {'; '.join(trained)}. The others began with random ones, so that their lengths do not compare."


def _broken_off(run: Run, name: str) -> str:
    why = f": {run.of('error')[-1].data['message']}" if run.status == "failed" else ""
    return f"{name} {run.status} at step {run.last_step:,}{why}. Its curves are drawn; means and spreads of final numbers leave it out."


def _other_processes(run: Run, name: str) -> Iterator[str]:
    for start in run.of("start"):
        if (before := start.data.get("processes_before")) is not None:
            now = start.data.get("processes")
            yield f"{name} went on at step {start.step:,} with {now} processes instead of {before}: not the bits of a run without a change."


def _young_average(run: Run, name: str) -> Iterator[str]:
    """An average over more steps than there were still holds much of the first weights."""
    decay = run.info["config"].get("engine", {}).get("ema")
    if isinstance(decay, float) and curves.averages(run) and (first := decay**run.last_step) > 0.05:
        yield f"{name}: after {run.last_step:,} steps with a decay of {decay:g} the average of weights is still {first:.0%} the first ones."


def _logged_apart(group: Group) -> Iterator[str]:
    trained = [set(curves.train(run)) for run in group.runs]
    if any(steps != trained[0] for steps in trained):
        yield f"Runs of {group.label} were logged at different steps; its curves show the steps that all of them have."


def _conditions(runs: Sequence[Run]) -> Iterator[str]:
    """Numbers are comparable only under the same conditions (nothing is left out for it, but it is said)."""
    looked_at = {
        "the version of nofm": [run.info["versions"].get("nofm") for run in runs],
        "the version of torch": [run.info["versions"].get("torch") for run in runs],
        "the commit of nofm": [run.info["commit"] for run in runs],
        "the commit of the working folder": [run.info["workdir_commit"] for run in runs],
        "hardware": [run.info["hardware"].get("name") for run in runs],
        "the number of processes": [run.info["hardware"].get("world_size") for run in runs],
    }
    for what, values in looked_at.items():
        if len(found := list(dict.fromkeys(map(str, values)))) > 1:
            yield f"The runs differ in {what}: {', '.join(found)}."


def short_names(folders: Sequence[Path]) -> dict[Path, str]:
    """The last part of each path, with as many parts before it as it takes to tell them apart."""
    parts = {folder: folder.resolve().parts for folder in folders}
    for length in range(1, max(map(len, parts.values())) + 1):
        names = {folder: "/".join(part[-length:]) for folder, part in parts.items()}
        if len(set(names.values())) == len(folders):
            return names
    raise AssertionError("different folders have different paths")
