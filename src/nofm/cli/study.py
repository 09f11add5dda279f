"""`nofm study NAME...`: train all rows of tables and figures, with several seeds, and write the tables.

Finished runs are skipped and interrupted ones go on, so the command can be given again after anything, and shorter: `earlier.py` finds the
options that DIR's runs were started with. What is in DIR:
DIR/runs/CONFIGURATION/seed-N (run folders, shared by all studies), and for each study DIR/NAME with study.json (rows, claims) and what
`report.study` makes of it. A table needs run.json and events.jsonl of each run, or its line of a runs.csv from before, and no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Any

from ..engine.config import ConfigError
from ..engine.resolve import near_path
from ..recipes import RECIPES, find
from ..recipes.studies import STUDIES, check_names, find_studies
from .campaign import check_runs, check_tables, facts_of, limited, note, planned, train_rows
from .earlier import completed
from .markdown import laid_out
from .options import pairs_of, parse
from .pages import fitted
from .without_effect import check_sparsity
from .words import taken

__all__ = ["command"]

_HELP = """usage: nofm study NAME... --on RECIPE --out DIR [--seeds COUNT] [--lanes COUNT] [--processes COUNT] [--rows GLOB]
                  [--without GLOB] [--order seed|row] [--limit MINUTES] [--table] [--into DIR] [--group.key VALUE ...]

Trains every row of tables and figures and writes each table (mean, spread, number of seeds), its figure and what became of the
claims. Rows that several studies share are trained once. To go on after an interruption, nofm study NAME... --out DIR is enough: what
is finished is skipped, and options that are not given are those that the runs in DIR were started with, --rows and --without among them.

positional arguments:
  NAME...            Studies, of those below, or "all": those of the recipe's task. (one or more)
options:
  -h, --help         show this help message and exit
  --on RECIPE        What to train on; all options of nofm train RECIPE may follow (nofm train RECIPE --help lists them).
  --out DIR          Where runs and tables go. (required)
  --seeds COUNT      Runs of each row, with seeds from --seed on; a spread needs two or more. (default: 1)
  --lanes COUNT      Runs that share a GPU; on a CPU runs come one after another. (default: 4)
  --processes COUNT  Processes that share the runs, each with its lanes: for steps that wait for the host, as detectors' do. (default: 1)
  --rows GLOB        Train only the rows whose label matches, such as "SR-STE*" or "dense|*1:16"; "*" for all again.
  --without GLOB     Train all but the rows whose label matches, such as "*ticket*", which take almost five times as long.
  --order ORDER      seed: all rows with the first seed, then with the second; row: all seeds of a row together. (default: seed)
  --limit MINUTES    When the time is up, stop with checkpoints and write the tables of what is finished.
  --table            Train nothing; write the tables from the runs that are there: nofm study NAME... --out DIR --table
  --into DIR         Where tables go, in folders of their names. Runs that a runs.csv there has a line of count as finished, and their
                     lines stay. (default: --out)
  --group.key VALUE  What to change in the recipe, for all rows alike. Sparsity options are those that some row takes from the recipe, such
                     as sparsity.pattern, sparsity.skip or sparsity.method.decay; others are refused.
studies:
{studies}
recipes to train on:
  {recipes}

A first one, in a minute on two CPU cores:

  nofm study table2 --on digits --out runs/table2 --seeds 3
"""


@dataclasses.dataclass(frozen=True)
class _Wishes:
    """What the command's own options say."""

    on: str
    lanes: int
    processes: int
    rows: str
    without: str
    by_row: bool
    minutes: float | None
    only_table: bool
    into: Path | None


def command(args: list[str]) -> int:
    """Run the command; returns its exit code."""
    if not args or "-h" in args or "--help" in args:
        listed = "\n".join(f"  {name:14}{(make.__doc__ or '').strip()}" for name, make in STUDIES.items())
        print(fitted(_HELP.format(studies=listed, recipes=", ".join(RECIPES))))
        return 0 if args else 2
    count = next((i for i, arg in enumerate(args) if arg.startswith("-")), len(args))
    names = args[:count]
    check_names(names)
    typed, args = args, [*names, *completed(names, args[count:])]
    of_before = {key for key, _ in pairs_of(args[len(typed) :])}  # by a command that may have been about other studies, too
    if "--table" in args:
        _check_runs_are_there(names, args[count:])
    wishes, rest = _wishes(args[count:])

    from ..engine.signals import Stopped, StopRequest, listening
    from ..report.study import known_runs

    # Tables alone have nothing to bring to a good end: Ctrl-C ends them as it does other commands.
    heard = contextlib.nullcontext(StopRequest()) if wishes.only_table else listening()
    with heard as stop, limited(stop, wishes.minutes) as over:
        recipe = find(wishes.on)
        base, options, origins = parse(wishes.on, recipe, rest)
        if options.seeds < 1:
            raise ConfigError(f"--seeds {options.seeds}: must be 1 or more")
        if base.out is None:
            raise ConfigError("study: say where its runs go: --out DIR")
        out, base = Path(base.out), dataclasses.replace(base, out=None)
        studies = find_studies(names, base)
        check_sparsity(list(studies), base, recipe, {key: where for key, where in origins.items() if key not in of_before})
        rows = planned(studies, base, wishes.rows, wishes.without)
        facts = {name: facts_of(name, study, base, wishes.on) for name, study in studies.items()}
        check_runs(out, studies, base)
        check_tables(wishes.into or out, facts)
        trouble = None
        if not wishes.only_table:
            seeds = range(base.seed, base.seed + options.seeds)
            how: dict[str, Any] = {
                "by_row": wishes.by_row,
                "lanes": wishes.lanes,
                "processes": wishes.processes,
                "known": known_runs(wishes.into or out),
            }
            try:
                trouble = train_rows(out, wishes.on, ["nofm", "study", *args], rows, seeds, stop=stop, **how)
            except Stopped as stopped:
                if not over.is_set():
                    stopped.go_on = "the same command"
                    raise
                print(f"the time is up, {wishes.minutes:g} minutes; give the same command again to go on", flush=True)
    _write(out, wishes.into or out, facts, may_be_empty=over.is_set() or trouble is not None)
    if trouble is not None:
        raise ConfigError(trouble)
    return 0


def _check_runs_are_there(names: list[str], options: list[str]) -> None:
    """Raise where --table has nothing to make a table of, before a folder is made for it."""
    out, others = taken(options, "--out", "")
    into, _ = taken(others, "--into", out)
    if not out or any(Path(out).glob("runs/*/seed-*/run.json")) or any(Path(into).glob("*/runs.csv")):
        return
    lacks = "has no runs (runs/NAME/seed-N)" if Path(out).is_dir() else "no such folder"
    hint = "" if Path(out).is_dir() else near_path(Path(out), (path for path in Path(out).parent.glob("*") if path.is_dir()))
    raise ConfigError(
        f"--out {out}: {lacks}, and --table writes the tables of runs that are there; to train them, "
        f"nofm study {' '.join(names)} --on {taken(others, '--on', 'RECIPE')[0]} --out {shlex.quote(out)}{hint}"
    )


def _write(out: Path, into: Path, studies: dict[str, dict[str, Any]], *, may_be_empty: bool) -> None:
    """The tables of all studies that have finished runs."""
    from ..report.errors import ReportError
    from ..report.study import Unfinished, write_study

    unfinished: list[ReportError] = []
    for name, facts in studies.items():
        note(into / name, facts)
        try:
            for file in write_study(into / name, out / "runs"):
                print(file)
            text = (into / name / "table.md").read_text()
            print(laid_out(text) if sys.stdout.isatty() else text)
            if importlib.util.find_spec("matplotlib") is None:
                print("no figure: matplotlib is not installed, pip install 'nofm[report]' (in a clone '.[report]'); --table draws it later")
        except Unfinished as error:
            unfinished.append(error)
    if len(unfinished) == len(studies) and not may_be_empty:
        raise ConfigError("\n".join(map(str, unfinished)))
    for found in unfinished:
        print(found, flush=True)


def _wishes(args: list[str]) -> tuple[_Wishes, list[str]]:
    """The command's own options, and the others, which are the recipe's."""
    on, args = taken(
        args, "--on", missing=f"study: {{key}} is missing: nofm study NAME... --on RECIPE --out DIR; recipes are {', '.join(RECIPES)}"
    )
    lanes, args = taken(args, "--lanes", "4")
    processes, args = taken(args, "--processes", "1")
    rows, args = taken(args, "--rows", "*")
    without, args = taken(args, "--without", "")
    order, args = taken(args, "--order", "seed")
    limit, args = taken(args, "--limit", "")
    into, args = taken(args, "--into", "")
    for key, text in (("--lanes", lanes), ("--processes", processes)):
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(f"{key} {text}: must be a whole number above 0")
    if order not in ("seed", "row"):
        raise ConfigError(f"--order {order}: must be seed or row")
    minutes = _minutes(limit) if limit else None
    rest = [arg for arg in args if arg != "--table"]
    only_table, folder = len(rest) < len(args), Path(into) if into else None
    return _Wishes(on, int(lanes), int(processes), rows, without, order == "row", minutes, only_table, folder), rest


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 < minutes < 1e6:
        raise ConfigError(f"--limit {text}: must be minutes, a number above 0")
    return minutes
