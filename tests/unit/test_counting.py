"""A run that is asked for in the other unit than its recipe counts in, or is too short for it: what is not given is scaled, what is given
stays."""

from __future__ import annotations

import sys
from functools import reduce

import pytest

from nofm.cli.main import main
from nofm.cli.options import parse
from nofm.engine.config import ConfigError
from nofm.engine.counting import LENGTHS
from nofm.engine.validate import check
from nofm.recipes import RECIPES, find

# Recipe, options, what the configuration then has, and what of it is said.
ASKED = {
    "steps to epochs": (
        "flow/stamps", "--engine.epochs 5",
        {"engine.epochs": 5, "engine.steps": None, "schedule.warmup": 0.25, "engine.eval_every": 1.25},
        "5 epochs instead of the recipe's 5000 steps; scaled to that, since not given: "
        "schedule.warmup 250 steps -> 0.25 epochs, engine.eval_every 1250 steps -> 1.25 epochs",
    ),
    "the old unit unset by hand": (
        "multi30k/small", "--engine.epochs 20 --engine.steps none",
        {"engine.steps": None, "schedule.warmup": 5}, "schedule.warmup 2000 steps -> 5 epochs",
    ),
    "what is given stays": (
        "flow/stamps", "--engine.epochs 5 --schedule.warmup 2 --engine.eval_every 1",
        {"schedule.warmup": 2, "engine.eval_every": 1}, "5 epochs instead of the recipe's 5000 steps",
    ),
    "epochs to steps, which are whole": (
        "fashion/cnn", "--engine.steps 50", {"engine.steps": 50, "engine.epochs": None, "schedule.warmup": 3},
        "schedule.warmup 1 epochs -> 3 steps",
    ),
    "no less than one step": ("fashion/cnn", "--engine.steps 4", {"schedule.warmup": 1, "engine.eval_every": 1}, ""),
    "ten tests at most": ("imagenet/resnet50", "--engine.steps 200", {"engine.eval_every": 20, "engine.checkpoint_every": None}, ""),
    "lists": (
        "bccd/fasterrcnn", "--engine.steps 800", {"schedule.milestones": (530, 730)}, "schedule.milestones 53 73 epochs -> 530 730 steps",
    ),
    "another schedule's lengths are not there to be scaled": (
        "bccd/fasterrcnn", "--engine.steps 800 --schedule.kind cosine", {"schedule.milestones": ()}, "",
    ),
    "the recipe's own unit": ("digits", "--engine.steps 100 --schedule.warmup 7", {"schedule.warmup": 7, "engine.eval_every": 20}, None),
    "the recipe's own unit, as docs/command-line.md has it": ("digits", "--engine.steps 100", {"schedule.warmup": 40}, None),
    "too short for the recipe": (
        "digits", "--engine.steps 40", {"schedule.warmup": 4, "engine.eval_every": 20},
        "40 steps instead of the recipe's 400 steps; scaled to that, since not given: schedule.warmup 40 steps -> 4 steps\n",
    ),
    "long enough for the recipe": ("digits", "--engine.steps 41", {"schedule.warmup": 40}, None),
    "too short for what is given": ("digits", "--engine.steps 40 --schedule.warmup 50", {"schedule.warmup": 50}, None),
    "too short for the last milestone": (
        "bccd/fasterrcnn", "--engine.epochs 40", {"schedule.milestones": (26.5, 36.5), "schedule.warmup": 10},
        "schedule.milestones 53 73 epochs -> 26.5 36.5 epochs",
    ),
    "nothing asked": ("digits", "--seed 1", {"schedule.warmup": 40}, None),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "options", "expected", "said"), ASKED.values(), ids=ASKED)
def test_what_is_not_given_is_scaled(recipe, options, expected, said, capsys):
    config, *_ = parse(recipe, find(recipe), options.split())
    assert {key: reduce(getattr, key.split("."), config) for key in expected} == expected
    shown = capsys.readouterr().out
    assert shown == "" if said is None else said in shown and shown.count("\n") == 1


def test_a_terminal_has_room_for_what_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    parse("digits", find("digits"), ["--engine.epochs", "100"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80


def test_what_a_file_gives_stays(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("[engine]\nepochs = 5\n[schedule]\nwarmup = 1\n")
    config, *_ = parse("digits", find("digits"), ["--config", str(file)])
    assert (config.engine.epochs, config.engine.steps, config.schedule.warmup, config.engine.eval_every) == (5, None, 1, 0.5)
    assert "schedule.warmup" not in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_asked_for_in_the_other_unit(recipe):
    """With nothing else given: what is complained about is that there are no data."""
    base = find(recipe).engine
    config, _, origins = parse(recipe, find(recipe), ["--engine.epochs", "6"] if base.epochs is None else ["--engine.steps", "60"])
    complaints = []
    try:
        check(config, origins)
    except ConfigError as error:
        complaints = str(error).splitlines()
    assert all(line.startswith("data.root = none") for line in complaints)
    assert (config.engine.epochs, config.engine.steps) == ((6, None) if base.epochs is None else (None, 60))


@pytest.mark.parametrize("given", ["--engine.steps 20 --engine.epochs 2", "--engine.epochs 2 --engine.steps 20"])
def test_both_units_are_one_mistake(given, capsys):
    assert main(["train", "digits", *given.split()]) == 2
    said = "--engine.epochs 2.0: give either engine.epochs or engine.steps: both are set, and engine.steps is 20; leave one of them out"
    assert capsys.readouterr() == ("", f"nofm: {said}\n")


def test_lengths_are_those_of_the_configuration():
    assert set(LENGTHS) == {
        "schedule.warmup", "schedule.milestones", "schedule.restarts", "engine.eval_every", "engine.checkpoint_every",
        *(f"sparsity.method.{name}" for name in ("probe", "prune_at", "every", "begin_at", "ramp_at", "end_at", "rewind_to")),
    }  # fmt: skip


def test_only_the_first_process_says_so(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    parse("digits", find("digits"), ["--engine.epochs", "5"])
    assert capsys.readouterr().out == ""


def test_a_run_goes_on_in_its_own_unit(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["train", "digits", "--engine.epochs", "0.5", "--out", out]) == 0
    assert "0.5 epochs, 11 steps of 64 images" in capsys.readouterr().out
    assert main(["resume", out, "--allow_change", "--engine.steps=20"]) == 2
    assert "--engine.steps: this run counts in epochs and has 0.5; give --engine.epochs" in capsys.readouterr().err
    assert main(["resume", out, "--allow_change", "--engine.epochs", "1"]) == 0
    assert "22 steps" in capsys.readouterr().out


def test_what_is_behind_a_run_is_not_scaled(tmp_path, capsys):
    """Its warm-up is in the past: with another one it would be another run."""
    out = str(tmp_path / "run")
    assert main(["train", "digits", "--engine.steps", "8", "--schedule.warmup", "6", "--out", out]) == 0
    assert main(["resume", out, "--allow_change", "--engine.steps", "5"]) == 2
    shown = capsys.readouterr()
    assert "schedule.warmup = 6.0: must end before the run does" in shown.err
    assert "scaled" not in shown.out
