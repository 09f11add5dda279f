"""Studies of the other tasks, and those that go beyond the paper: every row can be run, and is, briefly, where a row differs in kind."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from task_runs import arguments, config_of, write_all

from nofm.cli.main import main
from nofm.engine.build import preflight
from nofm.engine.resolve import differences, to_dict
from nofm.engine.validate import check
from nofm.engine.world import World
from nofm.recipes.studies import STUDIES
from nofm.report.measures import MEASURES

TASKS = ("detection", "segmentation", "flow", "translation")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("task", TASKS)
def test_every_row_can_be_run_and_differs_in_its_sparsity_only(task, data):
    base = config_of(task, data[task])
    study = STUDIES[task](base)
    labels = [row.label for row in study.rows]
    assert labels[:4] == ["dense", "STE 2:4", "SR-STE 2:4", "SR-STE 2:8"]
    assert ("2:4, decoupled, lambda 1" in labels) == (task in ("flow", "translation"))
    for row in study.rows:
        check(row.config)
        preflight(dataclasses.replace(row.config, device="cpu"), World(torch.device("cpu")))  # its network is built, on no memory
        assert all(key.startswith("sparsity.") for key, _, _ in differences(to_dict(base), to_dict(row.config)))


@pytest.mark.parametrize("task", ["translation", *(pytest.param(task, marks=pytest.mark.slow) for task in TASKS[:3])])
def test_a_study_of_each_task(task, data, tmp_path, capsys):
    recipe, *options = arguments(task, data[task])
    chosen = "2:4, decoupled, lambda 10" if task in ("flow", "translation") else "SR-STE 2:8"
    command = ["study", task, "--on", recipe, "--out", str(tmp_path), "--rows", chosen, "--without", "STE*", *options]
    assert main(command) == 0
    (run,) = csv.DictReader((tmp_path / task / "runs.csv").open())
    (events,) = tmp_path.glob("runs/*/seed-1/events.jsonl")
    final = json.loads(events.read_text().splitlines()[-1])["metrics"]
    averaged = any(name.startswith("ema_") for name in final)
    assert run["metric"] == ("ema_" if averaged else "") + MEASURES[task].name
    assert float(run["score"]) == final[run["metric"]]
    assert {name.partition(":")[2] for name in run if name.startswith("metric:")} == set(final)
    assert float(run["macs"]) > 0
    assert int(run["params"]) > 0
    assert MEASURES[task].words in capsys.readouterr().out


def test_everything_beyond_plain_srste_trains(tmp_path):
    """Every row at 1:16 for twenty steps, on a network whose layers get different patterns, and measured by an average."""
    options = ["--model.name", "cifar/resnet20", "--engine.steps", "20", "--schedule.warmup", "1", "--engine.eval_every", "20"]
    command = ["study", "beyond", "--on", "digits", "--out", str(tmp_path), "--rows", "*1:16*", "--engine.ema", "0.9", *options]
    assert main(command) == 0
    rows = {row["row"]: row for row in csv.DictReader((tmp_path / "beyond" / "table.csv").open())}
    assert len(rows) == 18
    for label, row in rows.items():
        assert float(row["kept"]) == 1 / 16, label
        assert row["metric"] == "ema_accuracy"
        assert ("mixed" in label) == (float(row["macs"]) > 2 * float(rows["SR-STE 1:16"]["macs"]))
