"""The runs of one or more studies: which there are, which are finished, and training the others.

A run's folder is OUT/runs/NAME/seed-N, and NAME follows from the configuration alone, so that rows of several studies that are the same
configuration are trained once.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.config import ConfigError, RunConfig
from ..engine.resolve import digest, telling_differences, to_dict
from ..engine.validate import check
from ..errors import NofmError
from ..recipes import find
from ..recipes.study import Row, Study, run_name
from ..report.begun_with import begun_with
from ..report.files import write_whole
from ..report.measured_on import measured_on
from ..report.study import finished, read_rows

if TYPE_CHECKING:
    from ..engine.signals import StopRequest

__all__ = ["check_runs", "check_tables", "facts_of", "limited", "note", "planned", "train_rows"]


def planned(studies: Mapping[str, Study], base: RunConfig, rows: str = "*", without: str = "") -> dict[str, Row]:
    """The rows to train by the name of their runs, in the order of the studies, each configuration once."""
    found: dict[str, Row] = {}
    for study in studies.values():
        for row in study.rows:
            if _matches(row.label, rows) and not _matches(row.label, without):
                same = found.setdefault(run_name(row.config, base), row)
                assert same.config == row.config, f"{same.label} and {row.label} differ, and their runs would have one name"
    labels = dict.fromkeys(row.label for study in studies.values() for row in study.rows)
    for option, globs in (("--rows", rows), ("--without", without)):
        for glob in globs.split("|") if globs else ():
            if not any(fnmatchcase(label, glob) for label in labels):
                raise ConfigError(f"{option} {globs}: {glob!r} matches none of {', '.join(map(repr, labels))}")
    if not found:
        raise ConfigError(f"--rows {rows} --without {without}: leaves no row")
    return found


def _matches(label: str, globs: str) -> bool:
    return any(fnmatchcase(label, glob) for glob in globs.split("|"))


def check_runs(out: Path, studies: Mapping[str, Study], base: RunConfig) -> None:
    """Raise where a run was made with other options than its row has now: a table must not mix them."""
    for study in studies.values():
        for row in study.rows:
            for run in sorted((out / "runs" / run_name(row.config, base)).glob("seed-*/run.json")):
                _check_same(run, row.config)


def _check_same(run: Path, config: RunConfig) -> None:
    try:
        info = json.loads(run.read_text())
        changes = list(telling_differences(info["config"], to_dict(config)))
        begun, seed = info.get("weights_from", {}).get("sha256"), info["config"]["seed"]
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        raise ConfigError(f"{run}: does not hold the configuration of a run; move its folder away, or give another --out") from None
    if changes:
        said = "; ".join(f"{key} = {was}, and now it is {now}" for key, was, now in changes[:5])
        more = f"; and {len(changes) - 5} more" if len(changes) > 5 else ""
        raise ConfigError(f"{run.parent} was made with {said}{more}. Give the old options, or another --out")
    if begun is not None:
        _check_weights(run, dataclasses.replace(config, seed=seed), begun)


def _check_weights(run: Path, config: RunConfig, begun: str) -> None:
    """Raise where another file lies now where the weights lay that the run began with; it may be gone, for nobody else wants it then."""
    from ..engine.begin import told
    from ..engine.complaints import weights_of

    try:
        now = told(config)
    except OSError:
        return
    if now["sha256"] != begun:
        raise ConfigError(
            f"{run.parent} began with other weights than those that lie at {weights_of(config)} now (SHA-256 {begun[:12]}..., and now "
            f"{now['sha256'][:12]}...). Bring the old ones back, or give another --out"
        )


class _LastWords:
    """One line on standard output when a run ends, well or not."""

    def __init__(self, run: str) -> None:
        self._run = run

    def log(self, event: dict[str, Any]) -> None:
        if event["event"] == "end":
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in event["metrics"].items())
            print(f"{self._run}: {numbers} ({event['seconds']:.0f} s)", flush=True)

    def failed(self, error: NofmError) -> None:
        """Not by its events: a run that cannot be begun has none."""
        first, _, _ = str(error).partition("\n")
        print(f"{self._run}: failed: {first}", flush=True)

    def close(self) -> None:
        pass


@contextmanager
def limited(stop: StopRequest, minutes: float | None) -> Iterator[threading.Event]:
    """While inside, runs are asked to stop when the time is up; the event tells that it was the clock that asked."""
    over = threading.Event()

    def end() -> None:
        over.set()
        stop(signal.SIGTERM, None)

    if minutes is None:
        yield over
        return
    clock = threading.Timer(60 * minutes, end)
    clock.daemon = True
    clock.start()
    try:
        yield over
    finally:
        clock.cancel()


def train_rows(
    out: Path,
    on: str,
    typed: Sequence[str],
    rows: Mapping[str, Row],
    seeds: range,
    *,
    by_row: bool,
    lanes: int,
    processes: int,
    stop: StopRequest,
    known: Container[tuple[str, int]] = (),
) -> str | None:
    """Train what is not finished and not among `known` (configuration and seed); returns what there is to say about runs that failed.
    Raises `Stopped` when asked to stop."""
    from ..engine.apart import train_apart
    from ..engine.train import Job, train_together

    pairs = [(name, seed) for name in rows for seed in seeds] if by_row else [(name, seed) for seed in seeds for name in rows]
    pairs = [(name, seed) for name, seed in pairs if (digest(to_dict(rows[name].config)), seed) not in known]
    left = [(name, seed) for name, seed in pairs if not finished(out / "runs" / name / f"seed-{seed}")]
    _check_rows([rows[name] for name in dict(left)])
    jobs = []
    for number, (name, seed) in enumerate(left, start=1):
        row, run = rows[name], out / "runs" / name / f"seed-{seed}"
        words = _LastWords(f"[{number}/{len(left)}] {row.label}, seed {seed}")
        jobs.append(Job(dataclasses.replace(row.config, seed=seed), run, on, typed, resume=True, sinks=[words], failed=words.failed))
    print(f"{len(rows) * len(seeds) - len(jobs)} runs are finished, {len(jobs)} to go", flush=True)
    if processes > 1:
        results = train_apart(jobs, processes=processes, lanes=lanes, stop=stop)
    else:
        results = train_together(jobs, lanes=lanes, stop=stop)
    failed: dict[str, list[Path]] = {}
    for job, result in zip(jobs, results, strict=True):
        if not isinstance(result, dict):
            failed.setdefault(str(result), []).append(job.out)
    return _trouble(failed, rows, len(jobs)) if failed else None


def _check_rows(rows: Sequence[Row]) -> None:
    """Raise for rows that cannot be run, with what is wrong with which; what is wrong with all is of the options that they share."""
    refused: dict[str, list[str]] = {}
    for row in rows:
        try:
            check(row.config)
        except ConfigError as error:
            refused.setdefault(str(error), []).append(repr(row.label))
    if refused:
        raise ConfigError(
            "\n".join(error if len(labels) == len(rows) else f"{', '.join(labels)}: {error}" for error, labels in refused.items())
        )


def _trouble(failed: Mapping[str, Sequence[Path]], rows: Mapping[str, Row], count: int) -> str:
    """Every error, which rows have it, and where to look; by what it says, the folders of the runs that it has ended."""
    said = [f"{sum(map(len, failed.values()))} of {count} runs failed:"]
    for error, runs in failed.items():
        labels = dict.fromkeys(repr(rows[run.parent.name].label) for run in runs)
        said.append(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} ({', '.join(labels)}), such as {runs[0]}: {error}")
    return "\n".join(said)


def facts_of(name: str, study: Study, base: RunConfig, on: str) -> dict[str, Any]:
    """What the rows are, as study.json has it for whoever reads the folder later; `on` is the recipe that `base` comes from."""
    rows = [
        {
            "label": row.label,
            "paper": row.paper,
            "runs": run_name(row.config, base),
            "config": digest(to_dict(row.config)),
            # A dense network has no masks; its SAD is of those that it would have by this pattern.
            "watched" if row.config.sparsity.method.kind == "dense" else "pattern": row.config.sparsity.pattern,
        }
        for row in study.rows
    ]
    claims = [dataclasses.asdict(claim) for claim in study.claims]
    facts = {"format": 2, "name": name, "title": study.title, "task": base.task.kind, "sad_every": base.engine.log_every}
    return facts | {
        "on": _trained_on(study, base, on),
        "rate": _rate(study),
        "paper_of": study.paper_of,
        "rows": rows,
        "claims": claims,
        "notes": [*study.notes, *_of_what(base)],
        **({"measured_on": measured_on(to_dict(base))} if base.data.held_out is not None else {}),
        **({"shapes_beyond": study.shapes_beyond} if study.shapes_beyond else {}),
    }


def check_tables(into: Path, studies: Mapping[str, dict[str, Any]]) -> None:
    """Raise where a study's folder in `into` has lines of runs that are not of its rows as they are now: before they are trained."""
    for name, facts in studies.items():
        if (into / name / "runs.csv").is_file():
            read_rows(into / name / "runs.csv", facts)


def note(folder: Path, facts: dict[str, Any]) -> None:
    """Write down what a study is."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "study.json", json.dumps(facts, indent=1).encode() + b"\n")


def _of_what(base: RunConfig) -> list[str]:
    """What is begun with, where that is not random, and measured on, where that is not the test data."""
    begun, held_out = begun_with(to_dict(base)), base.data.held_out is not None
    notes = [f"All rows begin with {begun}."] if begun else []
    return notes + ([f"Measured on {measured_on(to_dict(base))}, not on the test images."] if held_out else [])


def _trained_on(study: Study, base: RunConfig, on: str) -> str:
    """The recipe, which tells network and data, and those asked for in place of its own; of rows with several networks nothing."""
    if any(row.config.model.name != base.model.name for row in study.rows):
        return ""
    own = find(on)
    others = [base.model.name] * (base.model.name != own.model.name) + [base.data.name] * (base.data.name != own.data.name)
    return ", ".join([on, *others])


def _rate(study: Study) -> str:
    """The largest learning rate and how it moves, "0.1, cosine"; of rows that differ in that nothing."""
    rates = {f"{row.config.optim.lr:g}, {row.config.schedule.kind}" for row in study.rows}
    return rates.pop() if len(rates) == 1 else ""
