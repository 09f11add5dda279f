"""Claims about the first steps, the paper's Fig. 3: what runs tell of them, what becomes of claims, and the picture by layer."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from scipy import stats
from test_pictures_fit import assert_readable
from test_report_numbers import EVENTS, write_run
from test_studies import FACTS

from nofm.report import study_layers
from nofm.report.study import read_facts, read_rows, write_study
from nofm.report.study_curves import known_curves

CLAIMS = [
    {"text": text, "first": "a", "second": "b", "metric": metric, "level": False}
    for text, metric in (("step 1", "sad_0:1"), ("step 10", "sad_0:10"), ("grows", "sad_growth"))
]


def trained(folder: Path, seed: int, early: dict[int, tuple[int, int]]) -> None:
    """A run of two layers, a and b, with 16 weights each; how many of these differ from the start after some steps."""
    told = [{"event": "sad_from_start", "step": t, "changed": dict(zip("ab", n, strict=True)), "weights": 32} for t, n in early.items()]
    ended = [{**event, "epoch": event["step"] / 10} for event in EVENTS[:-1]] + [{**EVENTS[-1], "metrics": {"map": 0.5}}]
    write_run(folder, [ended[0], *told, *ended[1:]], seed=seed)


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "tables" / "x").mkdir(parents=True)
    (tmp_path / "tables" / "x" / "study.json").write_text(json.dumps({**FACTS, "claims": CLAIMS}))
    return tmp_path / "tables" / "x"


@pytest.fixture
def runs(tmp_path) -> Path:
    for seed, (less, more) in enumerate((((0, 2), (4, 6)), ((1, 3), (4, 8)))):
        trained(tmp_path / "runs" / "a" / f"seed-{seed}", seed, {1: (0, seed), 10: less})
        trained(tmp_path / "runs" / "b" / f"seed-{seed}", seed, {1: (2, 3 + seed), 10: more})
    return tmp_path / "runs"


def test_claims_about_the_first_steps_are_judged(folder, runs):
    write_study(folder, runs)
    found = {row["claim"]: row for row in csv.DictReader((folder / "claims.csv").open())}
    assert {claim: row["verdict"] for claim, row in found.items()} == {"step 1": "holds", "step 10": "holds", "grows": "open"}
    # After 10 steps 2 and 4 of 32 differ in rows of a, 10 and 12 in those of b; after 1 step 0 and 1, and 5 and 6.
    assert float(found["step 10"]["difference"]) == pytest.approx((3 - 11) / 32)
    assert float(found["grows"]["difference"]) == pytest.approx((2.5 - 5.5) / 32)
    half = stats.t.ppf(0.975, 2) * 2**0.5  # variances of 2 and two runs each
    page = (folder / "table.md").read_text()
    assert f"| step 10 | -25.00 % of weights | {100 * (-8 - half) / 32:+.2f} to {100 * (-8 + half) / 32:+.2f} | holds |" in page
    assert "| masks not as at the start, step 1 (%) | masks not as at the start, step 10 (%) |" in page
    table = list(csv.DictReader((folder / "table.csv").open()))
    assert [float(row["sad_0:10"]) for row in table] == [3 / 32, 11 / 32]


def test_they_are_known_when_the_runs_are_gone(folder, runs, monkeypatch):
    write_study(folder, runs)
    before = {name: (folder / name).read_bytes() for name in ("runs.csv", "curves.csv", "claims.csv", "table.md")}
    assert read_rows(folder / "runs.csv", read_facts(folder / "study.json"))["a"][1].early == {"sad_0:1": 1 / 32, "sad_0:10": 4 / 32}
    assert [curves.after_10 for curves in known_curves(folder.parent).values()] == [
        {1: 0, 2: 0.125}, {1: 0.0625, 2: 0.1875}, {1: 0.25, 2: 0.375}, {1: 0.25, 2: 0.5},
    ]  # fmt: skip
    shutil.rmtree(runs)
    (folder / "layers.png").unlink()
    assert folder / "layers.png" in write_study(folder, runs)
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_runs_of_earlier_versions_have_no_picture_and_their_claims_are_not_measured_yet(folder, tmp_path):
    for label in ("a", "b"):
        for seed in (0, 1):
            trained(tmp_path / "runs" / label / f"seed-{seed}", seed, {})
    (folder / "layers.png").write_text("of runs that told it")
    assert folder / "layers.png" not in write_study(folder, tmp_path / "runs")
    assert not (folder / "layers.png").exists()
    page = (folder / "table.md").read_text()
    assert "| step 1 |  |  | not measured yet |" in page
    assert "at the start" not in page, "a column for nobody"
    assert "sad_0" not in (folder / "runs.csv").read_text() + (folder / "curves.csv").read_text()
    assert "after_" not in (folder / "curves.csv").read_text()
    assert [row["verdict"] for row in csv.DictReader((folder / "claims.csv").open())] == ["", "", ""]
    trained(tmp_path / "runs" / "a" / "seed-2", 2, {1: (0, 0), 10: (0, 0)})
    assert folder / "layers.png" not in write_study(folder, tmp_path / "runs"), "of one row there is nothing to compare"
    assert "| step 1 |  |  | not measured yet |" in (folder / "table.md").read_text()


def test_other_studies_draw_no_such_picture(folder, runs):
    (folder / "study.json").write_text(json.dumps(FACTS))
    assert folder / "layers.png" not in write_study(folder, runs)
    assert "at the start" not in (folder / "table.md").read_text()


def test_the_picture_has_a_bar_for_each_layer_and_row(folder, runs):
    write_study(folder, runs)
    known = list(known_curves(folder.parent).values())
    rows = {"dense": known[:2], "STE 1:16": known[2:]}
    figure = study_layers.figure_of("X", rows, {"dense": "dense", "STE 1:16": "ste"}, "0.04, constant")
    first, tenth = figure.axes
    assert [bar.get_height() for bar in tenth.patches] == pytest.approx([3.125, 15.625, 25, 43.75])
    assert [bar.get_height() for bar in first.patches] == pytest.approx([0, 3.125, 12.5, 21.875])
    assert [axes.get_title() for axes in figure.axes] == ["after 1 step", "after 10 steps"]
    assert_readable(figure)
    assert "learning rate 0.04, constant, mean and spread over 2 seeds" in figure.get_suptitle()
    assert "learning rate" not in study_layers.figure_of("X", rows).get_suptitle(), "study.json of an earlier version"
    assert min(low for bars in figure.axes[0].containers[::2] for (_, low), _ in bars[2][0].get_segments()) == 0, "no share is below zero"


def test_the_picture_says_the_rate_of_study_json(folder, runs, monkeypatch):
    (folder / "study.json").write_text(json.dumps({**FACTS, "claims": CLAIMS, "rate": "0.04, constant"}))
    drawn = []
    monkeypatch.setattr(study_layers, "write_png", lambda figure, path: drawn.append(figure.get_suptitle()))
    write_study(folder, runs)
    assert ["learning rate 0.04, constant" in title for title in drawn] == [True]
