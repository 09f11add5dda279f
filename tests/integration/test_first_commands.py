"""Commands as somebody gives them for the first time: what is missing, what is left to be guessed, what stands in the wrong place."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from nofm.cli.main import main

SHORT = ["train", "digits", "--engine.steps", "4", "--engine.threads", "1", "--schedule.warmup", "1", "--model.width", "16"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("first") / "run"
    assert main([*SHORT, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("first") / "dense"
    assert main([*SHORT, "--sparsity.method.kind", "dense", "--out", str(out)]) == 0
    return out


# ---- cost ----


@pytest.mark.parametrize(
    ("model", "sizes", "macs"),
    [("cnn", "1 x 8 x 8", "64.832"), ("cifar/resnet20", "3 x 32 x 32", "40.551"), ("torchvision/resnet18", "3 x 224 x 224", "1.814")],
)
def test_a_network_is_counted_for_images_that_it_is_made_for(model, sizes, macs, capsys):
    """And it is said for which: CIFAR's ResNet-20 costs 49 times as much on images of 224 x 224."""
    assert main(["cost", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{model}, one image of {sizes}"
    assert lines[4].split()[2:] == [macs, macs, "1.000"]
    assert lines[-1] == f"dense throughout; sparse: nofm cost {model} --pattern 2:4"
    assert max(map(len, lines)) <= 80
    assert main(["cost", model, "--pattern", "2:4", "--input", *sizes.replace(" x", "").split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{model}, one image of {sizes}"
    assert not any("dense throughout" in line for line in lines)


def test_what_cost_cannot_count_is_said_in_its_own_words(run, capsys):
    for words, said in {
        ("torchvision/resnet18", "--input", "224 224 3"): "--input 224 224 3: torchvision/resnet18 cannot compute it: ",
        (str(run),): f"{run} is a run, and the page of nofm report {run} has its parameters and multiply-adds",
    }.items():
        assert main(["cost", *" ".join(words).split()]) == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert "tensor" not in shown


@pytest.mark.parametrize("command", ["cost cnn", "check RUN", "bench cnn"])
def test_a_pattern_by_itself_is_told_its_option(command, run, capsys):
    assert main([*command.replace("RUN", str(run)).split(), "1:16"]) == 2
    assert "nofm: 1:16: a pattern is given by its option: --pattern 1:16\n" in capsys.readouterr().err


WRONG = {
    "cost --all": "--all: no such option of nofm cost; nofm cost --help lists them",
    "cost cnn --inputs 3 8 8": "--inputs: no such option of nofm cost; did you mean '--input'?",
    "check FILE --patern 2:4": "--patern: no such option of nofm check; did you mean '--pattern'?",
    "cost cnn -p": "-p: no such option of nofm cost; nofm cost --help lists them",
    "bench cnn --no-batch": "--no-batch: no such option of nofm bench; did you mean '--batch'?",
    "cost": "cost: MODEL is missing: nofm cost MODEL; nofm cost --help says what it is",
    "cost cnn --pattern": "--pattern: needs a value: a text or none",
    "cost cnn --pattern 2:4 --pattern=1:4": "--pattern: given 2 times; give it once",
    "cost cnn --preset papr": "--preset papr: must be one of default, paper, asp, all; did you mean 'paper'?",
    "cost cnn --input 3 x 4": "--input x: must be a list, each a whole number or none",
    "bench cnn --batch 1e1": "--batch 1e1: must be a whole number; did you mean '10'?",
    "cost cnn resnet": "resnet: is one too many: nofm cost MODEL; options look like --name value, see nofm cost --help",
    "completion zshh": "zshh: must be one of bash, zsh, tcsh; did you mean 'zsh'?",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_no_command_has_is_told_in_one_line(line, capsys):
    """As of `nofm train`, and not in a box."""
    assert main(line.split()) == 2
    assert capsys.readouterr() == ("", f"nofm: {WRONG[line]}\n")


@pytest.mark.parametrize("line", ["cost --pattern=2:4 cnn --input 1 8 8", "cost cnn --preset all", "recipes", "completion", "recipes -h"])
def test_what_a_command_has_is_taken_in_any_order(line):
    assert main(line.split()) == 0


# ---- check and analyse ----


def test_check_of_a_dense_run_does_not_ask_to_skip_what_should_be_sparse(dense_run, capsys):
    for more in ([], ["--pattern", "1:16"]):
        assert main(["check", str(dense_run), *more]) == 1
        shown = capsys.readouterr().out
        assert shown.splitlines()[-1] == f"{dense_run}: was trained dense, so nothing is pruned in it"
        assert "--skip" not in shown


def test_analyse_names_what_it_counts(run, dense_run, capsys):
    assert main(["analyse", str(run)]) == 0
    head, columns, *rows, beside = capsys.readouterr().out.splitlines()
    assert head == "SAD between step 0 and step 4: weights that changed between kept and pruned"
    assert re.split(r"  +", columns) == ["layer", "weights changed", "of its weights"]
    assert [row.split()[0] for row in rows] == ["conv2", "conv3", "all"]
    counts = [int(row.split()[-2]) for row in rows]
    assert counts[2] == counts[0] + counts[1] > 0
    assert rows[0].split()[-1] == f"{counts[0] / (16 * 16 * 9):.3%}"
    assert beside == f"What changed and changed back counts 0; nofm report adds up all changes: {counts[2]:,}", "of one record"
    assert main(["analyse", str(dense_run)]) == 0
    assert capsys.readouterr().out.endswith("\nThis run is dense: the masks are those that pruning would give.\n")


def test_analyse_has_the_number_of_the_report_beside_its_own(tmp_path, capsys):
    """They differ where masks change and change back; of steps between records the report has none."""
    run = tmp_path / "run"
    words = ["--engine.steps", "12", "--engine.log_every", "2", "--engine.checkpoint_every", "6", "--out", str(run)]
    assert main([*SHORT[:2], *SHORT[4:], *words]) == 0
    assert main(["report", str(run)]) == 0
    added = json.loads((run / "report.json").read_text())["runs"][0]["sad"]
    capsys.readouterr()
    beside = []
    for steps in ([], ["--steps", "12", "6"], ["--steps", "0", "6"]):
        assert main(["analyse", str(run), *steps]) == 0
        *_, moved, said = capsys.readouterr().out.splitlines()
        beside.append(int(said.rpartition(" ")[2].replace(",", "")))
        assert int(moved.split()[-2].replace(",", "")) <= beside[-1]
    assert beside[0] == added == beside[1] + beside[2]
    (run / "events.jsonl").write_text("")
    assert main(["analyse", str(run)]) == 0
    assert capsys.readouterr().out.endswith("\nWhat changed and changed back counts 0; nofm report adds up all changes\n")


@pytest.mark.parametrize(
    ("steps", "said"),
    [("4", "--steps 4: must be two steps; masks are saved of 0, 4"), ("0 3", "--steps 3: no masks of that step; there are 0, 4")],
)
def test_analyse_says_of_which_steps_masks_are_saved(steps, said, run, capsys):
    assert main(["analyse", str(run), "--steps", *steps.split()]) == 2
    assert capsys.readouterr().err == f"nofm: {said}\n"


# ---- recipes, report, study ----


def test_recipes_are_found_by_a_part_of_their_name(capsys):
    assert main(["recipes", "resnet"]) == 0
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"cifar10/resnet20", "imagenet/resnet50"} <= set(found)
    assert all("resnet" in name for name in found)


def test_recipes_have_room_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_report_under_the_name_of_another_kind_of_file_is_refused(run, tmp_path, capsys):
    assert main(["report", str(run), "--out", str(tmp_path / "page.pdf")]) == 2
    assert f"--out {tmp_path}/page.pdf: the page is HTML, so a name that ends in .html, or a folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["report", str(run), "--out", str(tmp_path / "v1.2")]) == 0
    assert (tmp_path / "v1.2" / "report.html").is_file()


def test_a_study_of_no_seeds_is_refused(tmp_path, capsys):
    assert main(["study", "table2", "--on", "digits", "--out", str(tmp_path / "s"), "--seeds", "0"]) == 2
    assert capsys.readouterr().err == "nofm: --seeds 0: must be 1 or more\n"
    assert not (tmp_path / "s").exists()


def test_runs_that_are_not_of_one_kind_each_say_what_they_are(run, dense_run, tmp_path, capsys):
    """Gone on with together: one line a run is enough only where all are the same but for their seeds."""
    for name, source in (("a", run), ("b", dense_run)):
        shutil.copytree(source, tmp_path / name)
    assert main(["resume", str(tmp_path), "--allow_change", "--engine.steps", "6"]) == 0
    shown = capsys.readouterr().out
    for name in "ab":
        config = json.loads((tmp_path / name / "run.json").read_text())["config"]
        assert f"run {tmp_path / name}, resumed from step 4: digits, cnn on digits, {config['engine']['steps']} steps" in shown
    assert shown.count("to look at the run:") == 2


# ---- report, export ----


def test_a_report_of_runs_from_here_and_there_comes_to_where_one_works(run, dense_run, tmp_path, monkeypatch):
    """What they have in common is a folder of all temporary files, or of all users, where nobody looks."""
    here, there = tmp_path / "here", tmp_path / "there" / "runs"
    here.mkdir()
    for name, source in (("one", run), ("two", dense_run)):
        shutil.copytree(source, there / name)
    shutil.copytree(run, here / "own")
    monkeypatch.chdir(here)
    assert main(["report", "own", str(there / "two")]) == 0
    assert (here / "report.html").is_file()
    assert not (tmp_path / "report.html").exists()
    assert main(["report", str(there / "one"), str(there / "two")]) == 0
    assert (there / "report.html").is_file(), "these have a home of their own"


def test_an_onnx_file_is_looked_at_and_not_exported(tmp_path, capsys):
    (tmp_path / "model.onnx").write_bytes(b"anything")
    assert main(["export", str(tmp_path / "model.onnx")]) == 2
    assert "ONNX files are only looked at, by nofm check" in capsys.readouterr().err
