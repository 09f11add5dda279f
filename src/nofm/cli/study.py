"""`nofm study NAME`: train all rows of a table or figure of the paper, with several seeds, and write the table.

Finished runs are skipped and interrupted ones go on, so the command can be given again after anything. What is in DIR:
DIR/ROW/seed-N (run folders), DIR/study.json (rows, claims), and what `report.study` makes of them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.config import ConfigError, RunConfig
from ..recipes import RECIPES, find
from ..recipes.studies import STUDIES, find_study
from ..recipes.study import Row, Study

if TYPE_CHECKING:
    from ..engine.signals import StopRequest

__all__ = ["command", "folder_of"]

_HELP = """usage: nofm study NAME --on RECIPE --out DIR [--seeds COUNT] [--lanes COUNT] [--rows GLOB] [--table] [--group.key VALUE ...]

Trains every row of a table or figure of the paper and writes the table (mean, spread, number of seeds), the figure and what
became of the paper's claims. Give the same command again to go on after an interruption: what is finished is skipped.

  --on RECIPE     what to train on; all options of nofm train RECIPE may follow
  --seeds COUNT   runs of each row, with seeds from --seed on
  --lanes COUNT   runs that share a GPU (default 4; on a CPU runs come one after another)
  --rows GLOB     only the rows whose label matches, such as "SR-STE*"
  --table         train nothing; write the table from the runs that are there

studies:
{studies}

recipes to train on: {recipes}
"""


def command(args: list[str]) -> int:
    """Run the command; returns its exit code."""
    if not args or args[0] in ("-h", "--help"):
        studies = "\n".join(f"  {name:10} {(make.__doc__ or '').strip()}" for name, make in STUDIES.items())
        print(_HELP.format(studies=studies, recipes=", ".join(_bases())))
        return 0 if args else 2
    name, rest = args[0], args[1:]
    make = find_study(name)
    on, rest = _taken(rest, "--on")
    lanes, rest = _taken(rest, "--lanes", "4")
    rows, rest = _taken(rest, "--rows", "*")
    only_table = "--table" in rest
    rest = [arg for arg in rest if arg != "--table"]
    if not lanes.isdigit() or int(lanes) < 1:
        raise ConfigError(f"--lanes {lanes}: must be a whole number above 0")

    from ..engine.signals import listening
    from .options import parse

    with listening() as stop:
        base, options, _ = parse(on, find(on), rest)
        if base.task.kind != "classification":
            raise ConfigError(f"--on {on}: its task is {base.task.kind}, and studies compare accuracies; there are {', '.join(_bases())}")
        if base.out is None:
            raise ConfigError("study: say where its runs go: --out DIR")
        out = Path(base.out)
        study = make(dataclasses.replace(base, out=None))
        chosen = [row for row in study.rows if fnmatchcase(row.label, rows)]
        if not chosen:
            raise ConfigError(f"--rows {rows}: matches none of {', '.join(row.label for row in study.rows)}")
        seeds = range(base.seed, base.seed + options.seeds)
        if not only_table:
            _train(out, on, ["nofm", "study", *args], chosen, seeds, int(lanes), stop)

    from ..report.study import write_study

    _note(out, name, study)
    for file in write_study(out):
        print(file)
    print((out / "table.md").read_text())
    return 0


def _bases() -> list[str]:
    return [name for name in RECIPES if find(name).task.kind == "classification"]


def _taken(args: list[str], key: str, default: str | None = None) -> tuple[str, list[str]]:
    """The value of `key`, and the other arguments."""
    for i, arg in enumerate(args):
        if arg == key and i + 1 < len(args):
            return args[i + 1], args[:i] + args[i + 2 :]
        if arg.startswith(f"{key}="):
            return arg.partition("=")[2], args[:i] + args[i + 1 :]
    if default is None:
        raise ConfigError(f"study: {key} is missing: nofm study NAME --on RECIPE --out DIR; recipes are {', '.join(RECIPES)}")
    return default, args


class _LastWords:
    """One line on standard output when a run ends."""

    def __init__(self, run: str) -> None:
        self._run = run

    def log(self, event: dict[str, Any]) -> None:
        if event["event"] == "end":
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in event["metrics"].items())
            print(f"{self._run}: {numbers} ({event['seconds']:.0f} s)", flush=True)
        elif event["event"] == "error":
            print(f"{self._run}: {event['message']}", flush=True)

    def close(self) -> None:
        pass


def folder_of(out: Path, row: Row, seed: int) -> Path:
    """The run folder of one row and seed."""
    return out / re.sub(r"[^A-Za-z0-9.:+-]+", "-", row.label).strip("-") / f"seed-{seed}"


def _finished(run: Path) -> bool:
    """Whether the run has come to its end."""
    events = run / "events.jsonl"
    if not events.is_file():
        return False
    lines = events.read_text().splitlines()
    return bool(lines) and '"event": "end"' in lines[-1] and json.loads(lines[-1])["event"] == "end"


def _check_same(run: Path, config: RunConfig) -> None:
    """Raise where a finished run was made with other options: a table must not mix them."""
    from ..engine.resolve import differences, to_dict

    before = json.loads((run / "run.json").read_text())["config"]
    changes = [change for change in differences(before, to_dict(config)) if change[0] not in ("seed", "out")]
    if changes:
        key, was, now = changes[0]
        raise ConfigError(
            f"{run} is finished, with {key} = {was}, and now it is {now} ({len(changes)} such options); give the old ones, or another --out"
        )


def _train(out: Path, on: str, typed: list[str], rows: list[Row], seeds: range, lanes: int, stop: StopRequest) -> None:
    from ..engine.train import Job, train_together
    from ..engine.validate import check

    jobs = []
    for seed in seeds:  # seed by seed, so that a table is there early
        for row in rows:
            run = folder_of(out, row, seed)
            if _finished(run):
                _check_same(run, row.config)
            else:
                check(row.config)
                sink = _LastWords(f"{row.label}, seed {seed}")
                jobs.append(Job(dataclasses.replace(row.config, seed=seed), run, on, typed, resume=True, sinks=[sink]))
    print(f"{len(rows) * len(seeds) - len(jobs)} runs are finished, {len(jobs)} to go", flush=True)
    results = train_together(jobs, lanes=lanes, stop=stop)
    if errors := [(job.out, result) for job, result in zip(jobs, results, strict=True) if not isinstance(result, dict)]:
        where, error = errors[0]
        raise ConfigError(f"{len(errors)} of {len(jobs)} runs failed; the first is {where}: {error}")


def _note(out: Path, name: str, study: Study) -> None:
    """Write down what the rows are, for whoever reads the folder later."""
    rows = [{"label": row.label, "paper": row.paper, "folder": folder_of(out, row, 0).parent.name} for row in study.rows]
    claims = [dataclasses.asdict(claim) for claim in study.claims]
    facts = {"format": 1, "name": name, "title": study.title, "rows": rows, "claims": claims, "notes": list(study.notes)}
    out.mkdir(parents=True, exist_ok=True)
    (out / "study.json").write_text(json.dumps(facts, indent=1) + "\n")
