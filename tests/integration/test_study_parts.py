"""A campaign in parts: stopped by the clock, with runs that failed, brought back from elsewhere as folders or as lines of a table."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from test_study import lines, made, study, table

from nofm.cli.main import main
from nofm.engine import train as engine_train
from nofm.errors import NofmError

__all__ = ["made"]  # a fixture


def test_the_clock_stops_it_and_it_goes_on(tmp_path, made, capsys):
    """The time is up before the first step: what is there then is a checkpoint and no table."""
    assert study("fig3", tmp_path / "a", "--limit", "0.000001") == 0
    said = capsys.readouterr().out
    assert "the time is up, 1e-06 minutes; give the same command again to go on" in said
    assert "no run of this study is finished yet" in said
    assert [run.name for run in made] == ["seed-0"]
    assert (made[0] / "checkpoints" / "latest").exists()
    assert study("fig3", tmp_path / "a") == 0
    assert study("fig3", tmp_path / "b") == 0
    unsteady = ("seconds",)
    first, second = ([{k: v for k, v in line.items() if k not in unsteady} for line in lines(tmp_path / name / "fig3")] for name in "ab")
    assert first == second


@pytest.fixture
def unlucky(monkeypatch) -> dict[tuple[str, str], str]:
    """What ends runs, by the names of their folders, before their first step."""
    real, found = engine_train._training, {}

    def failing(job, stop):
        if message := found.get((job.out.parent.name, job.out.name)):
            raise NofmError(message)
        return (yield from real(job, stop))

    monkeypatch.setattr(engine_train, "_training", failing)
    return found


def test_runs_that_fail_do_not_keep_the_table_from_being_written(tmp_path, unlucky, capsys):
    unlucky["ste-1of16", "seed-0"] = "no luck"
    assert study("fig3", tmp_path) == 2
    assert f"nofm: 1 of 2 runs failed:\n1 run ('STE 1:16'), such as {tmp_path}/runs/ste-1of16/seed-0: no luck\n" == capsys.readouterr().err
    assert list(table(tmp_path / "fig3")) == ["dense"]


def test_a_run_that_fails_says_so_at_once_and_every_error_is_in_the_end(tmp_path, unlucky, capsys):
    runs = tmp_path / "runs"
    unlucky |= {("dense-1of16", f"seed-{seed}"): "no luck:\nnone at all" for seed in (0, 2)}
    unlucky |= {("ste-1of16", "seed-0"): "no luck:\nnone at all", ("ste-1of16", "seed-1"): "no memory"}
    assert study("fig3", tmp_path, "--seeds", "3", "--order", "row") == 2
    said = capsys.readouterr()
    told = [line for line in said.out.splitlines() if line.startswith("[")]
    assert told[0] == "[1/6] dense, seed 0: failed: no luck:"
    assert told[1].startswith("[2/6] dense, seed 1: accuracy ")
    assert told[2:5] == [
        "[3/6] dense, seed 2: failed: no luck:",
        "[4/6] STE 1:16, seed 0: failed: no luck:",
        "[5/6] STE 1:16, seed 1: failed: no memory",
    ]
    assert said.err.splitlines() == [
        "nofm: 4 of 6 runs failed:",
        f"3 runs ('dense', 'STE 1:16'), such as {runs}/dense-1of16/seed-0: no luck:",
        "none at all",
        f"1 run ('STE 1:16'), such as {runs}/ste-1of16/seed-1: no memory",
    ]


def test_a_run_that_fails_in_the_middle_says_so_once(tmp_path, capsys):
    """Its events hold the error, too."""
    assert study("fig3", tmp_path, "--optim.lr", "1e30", "--rows", "dense") == 2
    said = capsys.readouterr()
    (told,) = [line for line in said.out.splitlines() if line.startswith("[")]
    assert told.startswith("[1/1] dense, seed 0: failed: ")
    events = (tmp_path / "runs" / "dense-1of16" / "seed-0" / "events.jsonl").read_text()
    assert json.loads(events.splitlines()[-1])["message"].startswith(told.partition("failed: ")[2])


@pytest.mark.parametrize("processes", ["1", "2"])
def test_where_all_runs_fail_it_says_why(processes, tmp_path, capfd):
    """Not that none is finished yet, which would hide it."""
    (tmp_path / "empty").mkdir()
    command = ["study", "fig3", "--on", "cifar10/resnet20", "--data.root", str(tmp_path / "empty"), "--out", str(tmp_path / "s")]
    assert main([*command, "--engine.epochs", "none", "--engine.steps", "2", "--device", "cpu", "--processes", processes]) == 2
    said = capfd.readouterr()
    assert said.err.startswith("nofm: 2 of 2 runs failed:\n2 runs ('dense', 'STE 1:16'), such as ")
    assert f"{tmp_path}/empty" in said.err
    told = sorted(line.partition(f"{tmp_path}/empty")[0] for line in said.out.splitlines() if line.startswith("["))
    assert told == ["[1/2] dense, seed 0: failed: ", "[2/2] STE 1:16, seed 0: failed: "]


def bare(campaign: Path, copy: Path) -> Path:
    """What comes back from another machine: run.json and events.jsonl of each run, and no more."""
    for file in [*campaign.glob("runs/*/*/run.json"), *campaign.glob("runs/*/*/events.jsonl")]:
        target = copy / file.relative_to(campaign)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return copy


def test_a_table_from_what_came_back(tmp_path, made):
    assert study("fig3", tmp_path / "there", "--seeds", "2") == 0
    here = bare(tmp_path / "there", tmp_path / "here")
    made.clear()
    assert study("fig3", here, "--table", "--into", str(tmp_path / "results"), "--data.crop", "0") == 0
    for name in ("runs.csv", "table.csv", "claims.csv", "table.md", "study.json"):
        assert (tmp_path / "results" / "fig3" / name).read_text() == (tmp_path / "there" / "fig3" / name).read_text()
    assert not made
    assert not list(here.glob("fig3"))


def test_lines_of_runs_that_are_elsewhere_stay_and_count(tmp_path, made):
    """Seed 0 is known by its lines only; seed 1 is trained; another study takes the lines of its own rows."""
    results = str(tmp_path / "results")
    assert study("fig3", tmp_path / "first", "--into", results) == 0
    before = lines(tmp_path / "results" / "fig3")
    made.clear()
    assert study("fig3", tmp_path / "second", "--seeds", "2", "--into", results) == 0
    assert [run.name for run in made] == ["seed-1", "seed-1"]
    after = lines(tmp_path / "results" / "fig3")
    assert [line for line in after if line["seed"] == "0"] == before
    assert {row["n"] for row in table(tmp_path / "results" / "fig3").values()} == {"2"}
    assert study("fig4", tmp_path / "second", "--table", "--into", results) == 0
    assert {label: row["n"] for label, row in table(tmp_path / "results" / "fig4").items()} == {"dense": "2", "lambda 0": "2"}


@pytest.mark.parametrize("how", [[], ["--table"]], ids=["trained", "table"])
def test_lines_of_another_configuration_are_refused(how, tmp_path, made, capsys):
    """Before anything is trained for them, and with nothing written."""
    assert study("fig3", tmp_path / "first", "--into", str(tmp_path / "results")) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "results").glob("*/*")}
    made.clear()
    assert study("fig3", tmp_path / "second", "--into", str(tmp_path / "results"), "--optim.lr", "0.05", *how) == 2
    assert "runs.csv, line 2: 'dense' was made by configuration" in capsys.readouterr().err
    assert not made
    assert {path: path.read_bytes() for path in (tmp_path / "results").glob("*/*")} == before


@pytest.mark.parametrize("damage", ["", "{}", "[1]"], ids=["empty", "no configuration", "a list"])
def test_a_run_without_its_configuration_is_refused(damage, tmp_path, capsys):
    run = tmp_path / "runs" / "dense-1of16" / "seed-0"
    run.mkdir(parents=True)
    (run / "run.json").write_text(damage)
    assert study("fig3", tmp_path, "--table") == 2
    assert "run.json: does not hold the configuration of a run" in capsys.readouterr().err


def test_a_folder_with_runs_needs_no_options(tmp_path, made, capsys):
    """The table, and going on with what is missing: here seed 1 of STE."""
    assert study("fig3", tmp_path / "there", "--seeds", "2", "--optim.nesterov", "false", "--rows", "*") == 0
    here = bare(tmp_path / "there", tmp_path / "here")
    made.clear()
    assert main(["study", "fig3", "--out", str(here), "--table"]) == 0
    for name in ("runs.csv", "table.csv", "study.json"):
        assert (here / "fig3" / name).read_text() == (tmp_path / "there" / "fig3" / name).read_text()
    assert not made

    gone = here / "runs" / "ste-1of16" / "seed-1"
    before = json.loads((gone / "run.json").read_text())
    shutil.rmtree(gone)
    (here / "fig3" / "runs.csv").unlink()
    capsys.readouterr()
    assert main(["study", "fig3", "--out", str(here)]) == 0
    assert made == [gone]
    assert re.search(r"seed-[01] was started: --on digits --engine.steps 12 --schedule.warmup 2 ", capsys.readouterr().out)
    after = json.loads((gone / "run.json").read_text())
    assert after["config"] == {**before["config"], "out": str(gone)}
    whole = "nofm study fig3 --out HERE --on digits --engine.steps 12 --schedule.warmup 2 --engine.eval_every 6 --engine.log_every 3"
    assert " ".join(after["command"]).replace(str(here), "HERE") == f"{whole} --seeds 2 --optim.nesterov false"


def test_going_on_is_about_the_rows_that_were_asked_for(tmp_path, made, capsys):
    """Which had been trained in full with no word of --rows; given anew they are more, and what is finished stays."""
    assert study("fig3", tmp_path, "--seeds", "2", "--rows", "dense") == 0
    gone, table_of_runs = tmp_path / "runs" / "dense-1of16" / "seed-1", tmp_path / "fig3" / "runs.csv"
    shutil.rmtree(gone)
    table_of_runs.unlink()
    made.clear()
    assert main(["study", "fig3", "--out", str(tmp_path)]) == 0
    assert made == [gone]
    assert "only the rows of before: --rows dense (all of them: --rows '*')" in capsys.readouterr().out
    made.clear()
    assert main(["study", "fig3", "--out", str(tmp_path), "--rows", "*"]) == 0
    assert [run.parent.name for run in made] == ["ste-1of16"] * 2
    shutil.rmtree(made[0])
    table_of_runs.unlink()
    del made[1:]
    assert main(["study", "fig3", "--out", str(tmp_path)]) == 0
    assert len(made) == 2, "of all rows, from then on"
    assert made[0] == made[1]


def test_options_of_before_may_be_those_of_another_study(tmp_path):
    """Lambda is the appendix's; who then asks for the other study alone has not typed it."""
    assert study("fig3 appendix", tmp_path, "--rows", "STE*", "--sparsity.method.decay", "1e-3") == 0
    assert main(["study", "fig3", "--out", str(tmp_path), "--table"]) == 0
    assert main(["study", "fig3", "--out", str(tmp_path), "--table", "--sparsity.method.decay", "1e-3"]) == 2


def test_a_terminal_has_room_for_the_table(tmp_path, monkeypatch, capsys):
    assert study("fig3", tmp_path, "--seeds", "2") == 0
    capsys.readouterr()
    command = ["study", "fig3", "--out", str(tmp_path), "--table"]
    assert main(command) == 0
    assert (tmp_path / "fig3" / "table.md").read_text() in capsys.readouterr().out, "a program gets what the file has"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 0
    shown = capsys.readouterr().out.partition("# Mask movement")[2]
    assert max(map(len, shown.splitlines())) <= 80
    score = table(tmp_path / "fig3")["dense"]["score"]
    assert re.search(rf"^dense +{float(score):.2f} ± ", shown, re.MULTILINE)
    assert "|" not in shown


def test_options_that_are_given_count(tmp_path, capsys):
    assert study("fig3", tmp_path, "--rows", "dense") == 0
    for differing in (["--optim.lr", "0.05"], ["--on", "cifar10/resnet20"]):
        assert main(["study", "fig3", "--out", str(tmp_path), "--table", *differing]) == 2
        assert "dense-1of16/seed-0 was made with " in capsys.readouterr().err
