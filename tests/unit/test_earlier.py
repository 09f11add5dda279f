"""Options that `nofm study` takes from the runs that are there: which, from which run, and when none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nofm.cli.earlier import completed

EARLIER = ["--on", "digits", "--out", "elsewhere", "--engine.steps", "12", "--engine.no-compile", "--seeds", "5", "--rows", "a", "--table"]
EARLIER += ["--sparsity.rules", "conv1:2:4", "conv2:1:4", "--data.root=--odd"]
ADDED = ["--on", "digits", "--engine.steps", "12", "--engine.no_compile", "--seeds", "5", "--sparsity.rules", "conv1:2:4", "conv2:1:4"]
ADDED += ["--data.root=--odd"]
ROWS = ["--rows", "a"]


def started(out: Path, name: str, command: object, when: str = "2026-01-02T00:00:00Z") -> None:
    run = out / "runs" / name / "seed-0"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"command": command, "started": when}))


@pytest.fixture
def out(tmp_path) -> Path:
    started(tmp_path, "a", ["nofm", "study", "fig3", *EARLIER])
    return tmp_path


def added(out: Path, *more: str, names: tuple[str, ...] = ("fig3",)) -> list[str]:
    args = ["--out", str(out), *more]
    result = completed(names, args)
    assert result[: len(args)] == args, "what is given stays as it is"
    return result[len(args) :]


def test_all_but_what_the_command_asked_for_itself(out, capsys):
    assert added(out) == ADDED + ROWS
    said = capsys.readouterr().out
    assert f"as {out / 'runs' / 'a' / 'seed-0'} was started: --on digits --engine.steps 12" in said
    assert "only the rows of before: --rows a (all of them: --rows '*')" in said


@pytest.mark.parametrize("given", [["--rows", "b"], ["--rows=*"], ["--without", "b"], ["--table"]], ids=" ".join)
def test_rows_are_taken_where_nothing_is_said_of_them(given, out, capsys):
    assert added(out, *given) == ADDED
    assert "rows of before" not in capsys.readouterr().out


@pytest.mark.parametrize("last", ["b", "c"])
def test_of_two_runs_of_one_second_the_later_file_tells(out, last):
    for name in ("b", "c"):
        started(out, name, ["nofm", "study", "fig3", "--on", "digits", "--rows", name], "2026-01-03T00:00:00Z")
        os.utime(out / "runs" / name / "seed-0" / "run.json", (2 if name == last else 1, 2 if name == last else 1))
    assert added(out, "--on", "digits") == ["--rows", last]


def test_rows_are_those_of_the_last_command_about_the_same_studies(out):
    on = ["--on", "digits"]
    started(out, "b", ["nofm", "study", "fig4", *on, "--rows", "b"], "2026-01-03T00:00:00Z")
    started(out, "c", ["nofm", "study", "fig4", "fig3", *on, "--rows", "*", "--without", "c"], "2026-01-04T00:00:00Z")
    assert added(out, *on) == ROWS
    assert added(out, *on, names=("fig4",)) == ["--rows", "b"]
    assert added(out, *on, names=("fig3", "fig4")) == ["--without", "c"]
    assert added(out, *on, names=("table1",)) == []
    started(out, "d", ["nofm", "study", "fig3", *on, "--rows", "*"], "2026-01-05T00:00:00Z")
    assert added(out, *on) == []


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (["--on", "digits"], ADDED[2:] + ROWS),
        (["--engine.steps=20"], ADDED[:2] + ADDED[4:] + ROWS),
        (["--engine.compile", "true"], ADDED[:4] + ADDED[5:] + ROWS),
        (["--rows", "b", "--table"], ADDED),
        (["--on", "cifar10/resnet20"], []),
        (["--config", "all.toml"], []),
    ],
    ids=["the same recipe", "a value", "the opposite of a flag", "of this command", "another recipe", "a file"],
)
def test_what_is_given_is_not_taken(given, left, out):
    assert added(out, *given) == left


def test_the_newest_run_of_a_study_says_it(out):
    started(out, "b", ["nofm", "study", "fig4", "--on", "digits", "--engine.steps", "9"], "2026-01-01T00:00:00Z")
    started(out, "c", ["nofm", "train", "digits", "--engine.steps", "9"], "2026-01-03T00:00:00Z")
    started(out, "d", ["nofm", "study", "fig4", "--engine.steps", "9"], "2026-01-04T00:00:00Z")
    started(out, "e", None, "2026-01-05T00:00:00Z")
    assert added(out) == ADDED + ROWS
    started(out, "f", ["nofm", "study", "fig3", "--on", "digits", "--engine.steps", "9"], "2026-01-06T00:00:00Z")
    assert added(out) == ["--on", "digits", "--engine.steps", "9"]


def test_nothing_is_taken_where_nothing_is(tmp_path, capsys):
    assert added(tmp_path / "new") == []
    assert completed(["fig3"], ["--on", "digits"]) == ["--on", "digits"]
    assert capsys.readouterr().out == ""
