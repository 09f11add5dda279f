"""curves.csv: what the figure of a study needs of its runs, when their folders are gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_report_numbers import EVENTS, write_run
from test_studies import FACTS

from nofm.report import study_figure
from nofm.report.errors import ReportError
from nofm.report.study import read_facts, read_rows, write_study
from nofm.report.study_curves import HALVES, Curves, curves_csv, known_curves, sad_of_halves

KNOWN = {
    ("0c5b", 3): Curves({97: 0.123456789, 194: 2.5e-07}, {97: 0.0}, {97: 2.25, 194: 0.015}, 97.0),
    ("71c2", 0): Curves({}, {10: 1 / 3}, {}, 48.828125),  # never tested in between
}


def trained(folder: Path, score: float, seed: int = 0) -> Path:
    ended = [{**event, "epoch": event["step"] / 10} for event in EVENTS[:-1]] + [{**EVENTS[-1], "metrics": {"map": score}}]
    ended[3]["metrics"] = {"map": score / 2}
    return write_run(folder, ended, seed=seed)


def study(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps(FACTS))
    return folder


def drawn(monkeypatch, folder: Path, runs: Path) -> dict[str, list[Curves]]:
    """The curves that its figure shows."""
    found = {}
    monkeypatch.setattr(study_figure, "draw", lambda title, measure, rows, *_, **__: found.update({k: v[0] for k, v in rows.items()}))
    write_study(folder, runs)
    return found


def test_curves_are_read_as_they_were_written(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "curves.csv").write_text(curves_csv(KNOWN))
    found = known_curves(tmp_path)
    assert list(found) == list(KNOWN)
    for key, curves in KNOWN.items():
        assert found[key].score == pytest.approx(curves.score, rel=1e-5)
        assert found[key].flips == pytest.approx(curves.flips, rel=1e-5)
        assert found[key].loss == pytest.approx(curves.loss, rel=1e-5)
        assert found[key].epoch == curves.epoch


def test_a_figure_is_drawn_again_without_the_run_folders(tmp_path, monkeypatch):
    one = study(tmp_path / "tables" / "one")
    trained(tmp_path / "runs" / "a" / "seed-0", 0.4)
    trained(tmp_path / "runs" / "b" / "seed-0", 0.6)
    first = drawn(monkeypatch, one, tmp_path / "runs")
    assert first["a"] == [Curves({10: 0.2}, {10: 12 / 32 / 10, 20: 4 / 32 / 10}, {10: 2.0, 20: 1.0}, 10.0)]
    text = (one / "curves.csv").read_text()
    shutil.rmtree(tmp_path / "runs" / "a")
    trained(tmp_path / "runs" / "b" / "seed-1", 0.8, seed=1)
    again = drawn(monkeypatch, one, tmp_path / "runs")
    assert again["a"] == first["a"]
    assert [curves.score for curves in again["b"]] == [{10: 0.3}, {10: 0.4}]
    assert (one / "curves.csv").read_text().startswith(text)
    assert len((one / "curves.csv").read_text().splitlines()) == 1 + 3 * 3


@pytest.mark.parametrize(
    ("facts", "title"),
    [({}, FACTS["title"]), ({"on": ""}, FACTS["title"]), ({"on": "digits"}, f"{FACTS['title']}: digits")],
    ids=["of an earlier version", "several networks", "a recipe"],
)
def test_a_figure_says_what_was_trained_on_what(facts, title, tmp_path, monkeypatch):
    one, titles = study(tmp_path / "tables" / "one"), []
    (one / "study.json").write_text(json.dumps({**FACTS, **facts}))
    trained(tmp_path / "runs" / "a" / "seed-0", 0.4)
    monkeypatch.setattr(study_figure, "draw", lambda title, *_, **__: titles.append(title))
    write_study(one, tmp_path / "runs")
    assert titles == [title]


def test_a_figure_knows_the_methods_of_its_rows(tmp_path, monkeypatch):
    """By the names of their runs, which files of every version have."""
    one, looks = study(tmp_path / "tables" / "one"), study_figure.looks_of
    runs = {"a": "srste-2of4-decay0.0002", "b": "ste-unstructured-1of1-sparsity0.8"}
    (one / "study.json").write_text(json.dumps({**FACTS, "rows": [{**row, "runs": runs[row["label"]]} for row in FACTS["rows"]]}))
    for name in runs.values():
        trained(tmp_path / "runs" / name / "seed-0", 0.4)
    seen = {}
    monkeypatch.setattr(study_figure, "looks_of", lambda methods: seen.update(methods) or looks(methods))
    write_study(one, tmp_path / "runs")
    assert seen == {"a": "srste", "b": "ste_unstructured"}


def test_a_study_has_the_curves_of_a_neighbours_runs(tmp_path, monkeypatch):
    trained(tmp_path / "runs" / "b" / "seed-0", 0.6)
    write_study(study(tmp_path / "tables" / "one"), tmp_path / "runs")
    assert [len(curves) for curves in drawn(monkeypatch, study(tmp_path / "tables" / "two"), tmp_path / "nothing").values()] == [1]


def test_a_run_that_was_made_anew_has_its_own_curves(tmp_path, monkeypatch):
    one = study(tmp_path / "tables" / "one")
    for score in (0.4, 0.8):
        trained(tmp_path / "runs" / "a" / "seed-0", score)
        assert drawn(monkeypatch, one, tmp_path / "runs")["a"][0].score == {10: score / 2}
        shutil.rmtree(tmp_path / "runs" / "a")


@pytest.mark.parametrize(
    "line",
    ["0c5b,0,97,score,97 194,0.5", "0c5b,0,97,other,97,0.5", "0c5b,zero,97,score,97,0.5", "0c5b,0,97,score,97,high", "0c5b,0,97"],
    ids=["a value is missing", "an unknown curve", "no seed", "no number", "half a line"],
)
def test_files_that_are_no_curves_are_refused(line, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "curves.csv").write_text(f"config,seed,epoch,curve,steps,values\n{line}\n")
    with pytest.raises(ReportError, match=r"curves\.csv, line 2: is no line of curves .*`nofm study` writes it"):
        known_curves(tmp_path)


@pytest.mark.parametrize(
    ("flips", "halves"),
    [
        ({10: 0.5, 20: 0.25}, (5.0, 2.5)),
        ({10: 0.5, 20: 0.25, 25: 0.2}, (5.0, 2.5 + 1.0)),  # 12.5 is the middle
        ({30: 0.1, 40: 0.2}, ()),  # no look before the middle
        ({40: 0.2}, ()),
        ({}, ()),
    ],
)
def test_mask_changes_of_both_halves_of_a_run(flips, halves):
    assert sad_of_halves(Curves({}, flips, {}, 1.0)) == pytest.approx(dict(zip(HALVES, halves, strict=False)))


def test_a_claim_about_half_of_a_run(tmp_path):
    """By the curves, so that runs whose folders are gone, and lines of studies beside it, have it too; in other studies it is no column."""
    claims = [
        {"text": f"a moves less: {metric}", "first": "a", "second": "b", "metric": metric, "level": False} for metric in (*HALVES, "sad")
    ]
    one, plain = study(tmp_path / "tables" / "one"), study(tmp_path / "tables" / "plain")
    (one / "study.json").write_text(json.dumps({**FACTS, "claims": claims}))
    for seed in (0, 1):
        trained(tmp_path / "runs" / "a" / f"seed-{seed}", 0.4, seed)
        trained(tmp_path / "runs" / "b" / f"seed-{seed}", 0.6, seed)
    write_study(one, tmp_path / "runs")
    write_study(plain, tmp_path / "runs")
    rows = read_rows(one / "runs.csv", read_facts(one / "study.json"))
    assert rows["a"][1].halves == pytest.approx({HALVES[0]: 12 / 32, HALVES[1]: 4 / 32})
    assert sum(rows["a"][1].halves.values()) == pytest.approx(rows["a"][1].sad)
    assert not any(name in (plain / "runs.csv").read_text() for name in HALVES)
    lines = (one / "claims.csv").read_text().splitlines()[1:]
    assert ["open" in line for line in lines] == [True] * 3, "both rows are alike"
    before = (one / "runs.csv").read_text()
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(plain)
    write_study(one, tmp_path / "runs")
    assert (one / "runs.csv").read_text() == before
