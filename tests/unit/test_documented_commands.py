"""Every command that README.md and docs/ show does something: whole ones are given as they stand, with a small run, a folder for data and
so on where a page has RUN or DIR. Nothing is trained or measured: what would be is checked to its last option and layer instead.

(tests/unit/test_docs.py runs the first walk-through as it is.)"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from test_docs import PAGES, ROOT, commands

import nofm.cli.study
import nofm.deploy
import nofm.engine.evaluate
import nofm.engine.train
from nofm.cli.main import main
from nofm.engine.build import preflight
from nofm.engine.config import RunConfig
from nofm.engine.validate import check
from nofm.engine.world import joined_world

SMALL = "train digits --engine.steps 4 --schedule.warmup 1 --data.held_out 100 --sparsity.pattern 1:16"

# What stands for something of the reader's own, and what the test has for it, in its working folder.
FILLED = {"RUN": "run", "RUN...": "run", "FILE": "run/model.safetensors", "RECIPE": "digits"}

# What the test has nothing for: a finished run of RAFT and films.
NOT_HERE = {"evaluate RUN... --name sintel --data.name sintel --data.root DIR"}


class Resolved(Exception):
    """Training or measuring would begin now."""


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("small") / "run"
    assert main([*SMALL.split(), "--out", str(out)]) == 0
    return out


@pytest.fixture
def desk(small_run, tmp_path, monkeypatch) -> Path:
    """The working folder of who types the commands: with a run, those of the walk-through, a study that was begun, and a folder of data."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "runs/srste/seed-0", "runs/ste/seed-0", "runs/table2/runs/any/seed-0"):
        shutil.copytree(small_run, name)
    begun = Path("runs/table2/runs/any/seed-0/run.json")
    begun.write_text(
        json.dumps({**json.loads(begun.read_text()), "command": shlex.split("nofm study table2 --on digits --out runs/table2")})
    )
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def walled_up(monkeypatch) -> None:
    def would_train(config: RunConfig, *args: object, **kwargs: object) -> None:
        check(config)
        with joined_world("cpu") as world:
            preflight(config, world)
        raise Resolved

    def would_train_rows(out: Path, on: str, typed: object, rows: dict, *args: object, **kwargs: object) -> None:
        for row in rows.values():
            with pytest.raises(Resolved):
                would_train(row.config)
        raise Resolved

    def would_measure(*args: object, **kwargs: object) -> None:
        raise Resolved

    monkeypatch.setattr(nofm.engine.train, "train", would_train)
    monkeypatch.setattr(nofm.cli.study, "train_rows", would_train_rows)
    monkeypatch.setattr(nofm.deploy, "bench", would_measure)
    monkeypatch.setattr(nofm.engine.evaluate, "evaluate", would_measure)


def whole(page: str) -> list[str]:
    """The commands of a page that can be given: not those that are only named, as `nofm train` is."""
    return [shlex.join(words) for words in commands(page) if len(words) > 1 or words == ["recipes"]]


def filled(line: str) -> list[str]:
    words = [FILLED.get(word, word) for word in shlex.split(line)]
    for i, word in enumerate(words):
        if word == "DIR":
            words[i] = {"--data.root": "data", "--out": "new"}.get(words[i - 1], "run")
    return words


def outcome(words: list[str]) -> int | None:
    """The exit code; None where it has come to train or measure."""
    try:
        return main(words)
    except Resolved:
        return None


LINES = sorted({line for page in PAGES for line in whole(page)})


@pytest.mark.parametrize("line", sorted(set(LINES) - NOT_HERE))
def test_it_does_something(line, desk, walled_up, capsys):
    result = outcome(filled(line))
    assert result in (0, None), capsys.readouterr().err
    assert not re.search(r"\b[A-Z]{3,}\b(?!:)", " ".join(filled(line))), "nothing is left that only stands for something"


def test_those_that_are_left_out_are_on_a_page():
    assert set(LINES) >= NOT_HERE
    assert len(LINES) > 20


# ---- the table of options of nofm train ----


def options() -> list[str]:
    """The options in the second column of the table; a dash is none."""
    page = (ROOT / "docs/command-line.md").read_text()
    [rows] = re.findall(r"^\| you want to \| options of `nofm train` \|\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    return re.findall(r"`(--[a-z][^`]*)`", rows)


@pytest.mark.parametrize("line", options())
def test_an_option_of_the_table_is_one_that_a_recipe_takes(line, desk, walled_up, capsys):
    """Of a ResNet, which has the layers that are named there."""
    root = [] if "--data.root" in line else ["--data.root", "DIR"]
    words = filled(shlex.join(["train", "cifar10/resnet18", *shlex.split(line), *root]))
    assert outcome(words) is None, capsys.readouterr().err


def test_the_options_of_the_table_are_found():
    assert len(options()) >= 9
    assert '--sparsity.rules "layer4.*=1:4" "*=2:4"' in options()


@pytest.mark.parametrize(
    "line", ["train digits --sparsity.rules layer9=2:4", "train digits --data.root data", "study table2 --on cifar10/resnet20 --out new"]
)
def test_a_command_that_would_come_to_nothing_is_noticed(line, desk, walled_up):
    assert outcome(line.split()) == 2
