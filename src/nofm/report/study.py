"""A study's runs -> runs.csv and curves.csv (and shapes.csv, of one about kernel shapes), and from them the table, the figure and the
fate of the claims. Files in, files out, no torch.

Runs are folders with run.json and events.jsonl, or lines of these files from before, of this study or one beside it: a run whose folder is
not at hand is taken from there. No label ever has two configurations: each line carries a digest of its own, and one that is not the
row's is refused.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from .curves import train
from .errors import ReportError
from .files import write_whole
from .measures import MEASURES, Measure
from .numbers import cost_of, macs_kept, total_sad
from .read import FOUND, Run, load, settled
from .study_curves import HALVES, KnownCurves, curves_csv, curves_of, known_curves, sad_of_halves

__all__ = [
    "EARLY",
    "GROWTH",
    "Facts",
    "Measured",
    "Rows",
    "Unfinished",
    "as_csv",
    "finished",
    "known_runs",
    "measured",
    "method_of",
    "read_facts",
    "read_rows",
    "runs_csv",
    "watched_alone",
    "write_study",
]

Facts: TypeAlias = Mapping[str, Any]  # of study.json
EARLY, GROWTH = "sad_0:", "sad_growth"  # metrics of claims: SAD_{0:1} and SAD_{0:10}, and how much larger the second is


class Unfinished(ReportError):
    """There is nothing to write a table of."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One finished run in numbers. `sad` is the movement of masks over the whole run, in changes for each sparse weight."""

    label: str
    seed: int
    config: str  # digest of all that decides its numbers but the seed
    metric: str  # the name of the score: the task's headline metric, of averaged weights (ema_...) where the run has an average
    score: float
    sad: float
    kept: float  # share of the weights of sparse layers that is kept
    params: int  # of the whole network, pruned ones left out
    macs: float | None  # multiply-adds with the weights that are kept; None where older runs of unstructured methods do not tell them
    epochs: float
    seconds: float | None
    commit: str | None  # of nofm's sources, or "nofm 0.1.0" where an installed version ran
    torch: str
    hardware: str
    workdir_commit: str | None = None  # of the folder that it was started in, where that is another repository
    train_loss: float | None = None  # of the last log interval
    metrics: Mapping[str, float] = field(default_factory=dict)  # all of them
    evaluations: Mapping[str, float] = field(default_factory=dict)  # on other data, by NAME.metric, as `nofm evaluate` has named them
    found: Mapping[str, float] = field(default_factory=dict)  # what its method has settled by itself: lambda, by a search
    early: Mapping[str, float] = field(default_factory=dict)  # sad_0:1 and sad_0:10, the share of masks that are not as at the start
    halves: Mapping[str, float] = field(default_factory=dict)  # `sad` of both halves of the run, in studies that claim something of them

    def value(self, metric: str) -> float | None:
        """The number that a claim is about, or None where the run does not tell it."""
        if metric == GROWTH:
            return self.early[f"{EARLY}10"] - self.early[f"{EARLY}1"] if len(self.early) == 2 else None
        if metric.startswith(EARLY) or metric in HALVES:
            return {**self.early, **self.halves}.get(metric)
        found: float | None = getattr(self, metric)
        return found


Rows: TypeAlias = dict[str, list[Measured]]  # by label, seeds in order
_FIELDS = tuple(f.name for f in fields(Measured) if f.name not in ("metrics", "evaluations", "found", "early", "halves"))
_LATER = ("workdir_commit", "train_loss")  # lines from before they were recorded stay readable


# ---- a run folder ----


def measured(label: str, config: str, run: Run, measure: Measure) -> Measured:
    """The numbers of a finished run."""
    end = run.of("end")[-1].data
    metric = f"ema_{measure.name}" if f"ema_{measure.name}" in end["metrics"] else measure.name
    cost, params = cost_of(run), (run.info["cost"] or {}).get("params", 0)
    return Measured(
        label=label,
        seed=run.seed,
        config=config,
        metric=metric,
        score=float(end["metrics"][metric]),
        sad=(total_sad(run) or 0.0) / cost["sparse_weights"],
        kept=cost["sparse_weights_kept"] / cost["sparse_weights"],
        params=int(params - (cost["weights"] - cost["weights_kept"])),
        macs=macs_kept(run),
        epochs=float(run.of("train")[-1].data.get("epoch", math.nan)),
        seconds=max(event.data["seconds"] for event in run.of("end")),  # a finished run that is resumed ends again at once
        commit=run.info["commit"] or f"nofm {run.info['versions'].get('nofm')}",
        torch=str(run.info["versions"].get("torch")),
        hardware=str(run.info["hardware"].get("name")),
        workdir_commit=run.info["workdir_commit"],
        train_loss=next(reversed(train(run).values()), None),
        metrics={name: float(value) for name, value in end["metrics"].items() if value is not None},
        evaluations={f"{found.name}.{metric}": value for found in run.evaluations for metric, value in found.metrics.items()},
        found=run.found,
        early={f"{EARLY}{step}": changed for step, changed in _early(run).items()},
    )


def _early(run: Run) -> dict[int, float]:
    return {event.step: sum(event.data["changed"].values()) / event.data["weights"] for event in run.of("sad_from_start")}


def finished(run: Path) -> bool:
    """Whether the run in this folder has come to its end."""
    if not ((run / "events.jsonl").is_file() and (run / "run.json").is_file()):
        return False
    lines = (run / "events.jsonl").read_text().splitlines()
    return bool(lines) and '"event": "end"' in lines[-1] and json.loads(lines[-1])["event"] == "end"


def _runs(folder: Path) -> list[Run]:
    return sorted((load(run) for run in folder.glob("seed-*") if finished(run)), key=lambda run: run.seed)


# ---- study.json and runs.csv ----


def read_facts(path: Path) -> Facts:
    """What a study is, as `nofm study` has written it down."""
    try:
        facts: Facts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(path, f"cannot be read ({error}); `nofm study` writes it") from None
    return facts


def watched_alone(rows: Sequence[Facts]) -> set[str]:
    """The labels of dense rows that are watched by a pattern which none of the other rows has: their SAD compares with nothing. Where
    study.json is from before patterns were written down, none."""
    patterns = {row["pattern"] for row in rows if row.get("pattern")}
    return {row["label"] for row in rows if patterns and row.get("watched") and row["watched"] not in patterns}


def method_of(runs: str) -> str:
    """The method that the name of a row's runs begins with; a dash stands where its own name has an underscore."""
    return "ste_unstructured" if runs.startswith("ste-unstructured") else runs.partition("-")[0]


def runs_csv(rows: Rows) -> str:
    """One line a run: its numbers, then what its method has found and all its metrics by name, then those of its evaluations on other
    data, as NAME.metric."""
    found = [run for runs in rows.values() for run in runs]
    names, early = (dict.fromkeys(name for run in found for name in of(run)) for of in (attrgetter("metrics"), attrgetter("early")))
    others = sorted({name for run in found for name in run.evaluations})
    return as_csv(
        [
            {name: getattr(run, name) for name in _FIELDS}
            | {name: run.early.get(name) for name in early}
            | {name: run.halves.get(name) for name in HALVES if any(one.halves for one in found)}
            | {key: run.found.get(name) for name, key in settled(run.found for run in found).items()}
            | {f"metric:{name}": run.metrics.get(name) for name in names}
            | {name: run.evaluations.get(name) for name in others}
            for run in found
        ]
    )


def read_rows(path: Path, facts: Facts) -> Rows:
    """The lines of a runs.csv by label, in the study's order; raises for one that is not of this study as it is now."""
    by_label = {row["label"]: row for row in facts["rows"]}
    rows: Rows = {label: [] for label in by_label}
    for number, run in enumerate(_lines(path), start=2):
        if run.label not in by_label:
            raise ReportError(
                path, f"{facts['name']} has no row {run.label!r} any more; remove the line, or give the row's new name", number
            )
        if run.config != by_label[run.label]["config"]:
            raise ReportError(
                path,
                f"{run.label!r} was made by configuration {run.config}, and is {by_label[run.label]['config']} now; "
                "give the options it was made with, or another folder",
                number,
            )
        rows[run.label].append(run)
    return rows


def known_runs(into: Path) -> dict[tuple[str, int], Measured]:
    """By configuration and seed: the lines of the runs.csv of all studies in `into`."""
    files = [file.with_name("runs.csv") for file in sorted(into.glob("*/study.json"))]
    known: dict[tuple[str, int], Measured] = {}
    for run in (run for file in files if file.is_file() for run in _lines(file)):
        key = run.config, run.seed
        known[key] = _with_evaluations_of(known[key], run) if key in known else run
    return known


def _with_evaluations_of(line: Measured, run: Measured) -> Measured:
    """`run` with the evaluations that another line of it has besides; those of a run that was made anew do not count."""
    same = (line.score, line.seconds) == (run.score, run.seconds)
    return replace(run, evaluations={**line.evaluations, **run.evaluations}) if same else run


def _lines(path: Path) -> Iterator[Measured]:
    for number, line in enumerate(csv.DictReader(path.read_text().splitlines()), start=2):
        if missing := [name for name in _FIELDS if line.get(name) is None and name not in _LATER]:
            raise ReportError(path, f"has no {missing[0]!r}; `nofm study` writes it", number)
        try:
            yield _measured_of(line)
        except ValueError as error:
            raise ReportError(path, f"a number is expected: {error}", number) from None


def _measured_of(line: Mapping[str, str]) -> Measured:
    texts = ("label", "config", "metric", "torch", "hardware")
    values: dict[str, Any] = {name: line[name] for name in texts}
    values |= {name: int(float(line[name])) for name in ("seed", "params")}
    values |= {name: float(line[name]) for name in ("score", "sad", "kept", "epochs")}
    values |= {name: float(line[name]) if line.get(name) else None for name in ("macs", "seconds", "train_loss")}
    values |= {name: line.get(name) or None for name in ("commit", "workdir_commit")}
    metrics, found = (
        {name.removeprefix(kind): float(text) for name, text in line.items() if name.startswith(kind) and text}
        for kind in ("metric:", FOUND)
    )
    early = {name: float(text) for name, text in line.items() if name.startswith(EARLY) and text}
    halves = {name: float(line[name]) for name in HALVES if line.get(name)}
    others = {name: float(text) for name, text in line.items() if "." in name and not name.startswith("metric:") and text}
    return Measured(**values, metrics=metrics, evaluations=others, found=found, early=early, halves=halves)


def as_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """A CSV file's text."""
    text = io.StringIO()
    if lines:
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return text.getvalue()


# ---- all of it ----


def write_study(folder: Path, runs: Path) -> list[Path]:
    """Write all tables of a study, runs.csv and its likes, and pictures where matplotlib is installed; returns what was written.

    `folder` has a study.json. The runs are those of run folders under `runs` and what `folder` and its neighbours know of others.
    """
    from .study_tables import texts

    facts = read_facts(folder / "study.json")
    measure = MEASURES[facts["task"]]
    if (folder / "runs.csv").is_file():
        read_rows(folder / "runs.csv", facts)  # which refuses what is not of this study
    found = {row["label"]: _runs(runs / row["runs"]) for row in facts["rows"]}
    rows = _with_known(
        {row["label"]: [measured(row["label"], row["config"], run, measure) for run in found[row["label"]]] for row in facts["rows"]},
        facts,
        known_runs(folder.parent),
    )
    if not any(rows.values()):
        raise Unfinished(folder, f"no run of this study is finished yet; nofm study {facts['name']} --out DIR goes on with them")
    curves = _curves(rows, found, known_curves(folder.parent), measure)
    if any(claim["metric"] in HALVES for claim in facts["claims"]):
        rows = {label: [_with_halves(run, curves) for run in runs] for label, runs in rows.items()}
    files = {"runs.csv": runs_csv(rows), "curves.csv": curves_csv(curves), **_shapes(folder, facts, rows, found), **texts(facts, rows)}
    for name, text in files.items():
        write_whole(folder / name, text.encode())  # the first ones may be all that is left of some runs
    if curves and importlib.util.find_spec("matplotlib") is not None:
        from .study_pictures import draw_pictures

        files |= dict.fromkeys(draw_pictures(folder, facts, rows, curves), "")
    return [folder / name for name in files]


def _with_known(rows: Rows, facts: Facts, known: Mapping[tuple[str, int], Measured]) -> Rows:
    """`rows`, and of runs whose folders are not at hand what is known."""
    for (config, seed), run in known.items():
        for label in (row["label"] for row in facts["rows"] if row["config"] == config):
            here = [_with_evaluations_of(run, own) if own.seed == seed else own for own in rows[label]]
            missing = [] if any(own.seed == seed for own in here) else [replace(run, label=label)]
            rows[label] = sorted([*here, *missing], key=lambda run: run.seed)
    return rows


def _curves(rows: Rows, found: Mapping[str, Sequence[Run]], known: KnownCurves, measure: Measure) -> KnownCurves:
    """The curves of all these runs, in their order: of those at hand, or known ones, if any."""
    folders = {label: {run.seed: run for run in runs} for label, runs in found.items()}
    curves: KnownCurves = {}
    for label, measurements in rows.items():
        for one in measurements:
            key, run = (one.config, one.seed), folders[label].get(one.seed)
            if run is not None:
                curves[key] = curves_of(run, measure, averaged=one.metric.startswith("ema_"))
            elif key in known:
                curves[key] = known[key]
    return curves


def _with_halves(run: Measured, curves: KnownCurves) -> Measured:
    """As its line knows them, or else by its curve, which has fewer digits in a file."""
    known = curves.get((run.config, run.seed))
    return run if run.halves or known is None else replace(run, halves=sad_of_halves(known))


def _shapes(folder: Path, facts: Facts, rows: Rows, found: Mapping[str, Sequence[Run]]) -> dict[str, str]:
    """shapes.csv, of a study about kernel shapes: of runs whose last masks are at hand, or what it knew before."""
    from .study_shapes import known_shapes, layers_of, shapes_csv

    if not facts.get("shapes_beyond"):
        return {}
    known = known_shapes(folder / "shapes.csv")
    for label, runs in found.items():
        by_seed = {one.seed: (one.config, one.seed) for one in rows[label]}
        known |= {by_seed[run.seed]: layers for run in runs if (layers := layers_of(run, facts["shapes_beyond"]))}
    order = [(one.config, one.seed) for runs in rows.values() for one in runs]
    return {"shapes.csv": shapes_csv({key: known[key] for key in order if key in known})}
