"""Evaluations on other data: what `nofm evaluate` has left beside runs, on the page, in the terminal, and in the tables of studies."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest
from test_report_numbers import EVENTS, write_run
from test_report_samples import TEXTS, flow_file, lines, pictures
from test_studies import FACTS, ROWS, line

from nofm.report import table, write_report
from nofm.report.errors import ReportError
from nofm.report.study import known_runs, read_rows, runs_csv, write_study
from nofm.report.study_tables import table_markdown, texts

END = EVENTS[-1]["step"]
FLOW = {"headline": "epe", "metrics": {"epe": 4.0, "fl_all": 20.0}}
AVERAGED = {"headline": "ema_epe", "metrics": {"epe": 4.0, "ema_epe": 3.0}}


def measured(run: Path, name: str, facts: dict, files: dict[str, bytes] | None = None) -> Path:
    """`run`, with an evaluation."""
    (run / "evaluations" / name).mkdir(parents=True)
    (run / "evaluations" / f"{name}.json").write_text(json.dumps({"step": END, **facts}))
    for file, data in (files or {}).items():
        (run / "evaluations" / name / file).write_bytes(data)
    return run


def epe(value: float) -> dict:
    return {"headline": "epe", "metrics": {"epe": value}}


# ---- the report ----


def test_a_column_for_each_evaluation_over_seeds(tmp_path, capsys):
    runs = [measured(write_run(tmp_path / f"seed-{i}", seed=i), "sintel-v1.0", epe(value)) for i, value in enumerate((3.0, 5.0))]
    runs.append(write_run(tmp_path / "seed-2", seed=2))
    measured(runs[0], "kitti", AVERAGED)
    shown = table(runs).splitlines()
    assert "sintel-v1.0: EPE px" in shown[2]
    assert "kitti: EPE," in shown[0]
    assert "average px" in shown[2]
    assert "4.0 ± 1.4 (2 of 3 seeds)" in shown[3]
    assert "3 (1 of 3 seeds)" in shown[3]
    page = write_report(runs, tmp_path / "out")
    text = page.read_text()
    assert '<th scope="col">sintel-v1.0: EPE, px</th>' in text
    assert "<td><span>4.0</span> <span>± 1.4 (2 of 3 seeds)</span></td>" in text
    with page.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["sintel-v1.0.epe"] for row in rows] == ["3.0", "5.0", ""]
    assert [row["kitti.ema_epe"] for row in rows] == ["3.0", "", ""]
    numbers = json.loads(page.with_suffix(".json").read_text())
    assert numbers["groups"][0]["numbers"]["evaluation/sintel-v1.0/epe"]["mean"] == 4.0
    assert numbers["runs"][0]["evaluations"]["kitti"] == AVERAGED["metrics"]


def test_what_spoils_a_comparison_is_said_in_the_terminal_too(tmp_path):
    longer = [*EVENTS[:-1], EVENTS[-1] | {"step": END + 40}]
    same = [write_run(tmp_path / name, seed=7) for name in ("a", "b")]
    other = write_run(tmp_path / "c", longer, seed=8, config={"sparsity": {"pattern": "1:8"}})
    notes = [line for line in table([*same, other]).splitlines() if line.startswith("note: ")]
    assert len(notes) == 2
    assert "more than one run of seed 7" in notes[0]
    assert notes[1] == f"note: The runs differ in length: {END}, {END + 40} steps."
    assert "note: " not in table([same[0], write_run(tmp_path / "d", seed=8)])


def test_weights_that_a_run_began_with_are_in_its_name_and_said(tmp_path):
    begun = {"model": {"weights": "runs/dense/seed-{seed}"}, "sparsity": {"pattern": "1:8"}}
    random, *from_dense = write_run(tmp_path / "a", seed=0), *(write_run(tmp_path / f"b{i}", seed=i, config=begun) for i in (0, 1))
    published = write_run(tmp_path / "c", config={"model": {"pretrained": True}})
    shown = " ".join(table([random, *from_dense]).split())
    assert "from runs/dense/seed-{seed}" in shown
    assert "note: Begun with trained weights: from runs/dense/seed-{seed} 1:8. The others began with random ones" in shown
    assert "note: All runs began with the weights of runs/dense/seed-{seed}." in " ".join(table(from_dense).split())
    assert "note: All runs began with published weights." in table([published])
    assert "began with different trained weights: the weights of runs/dense/" in " ".join(table([*from_dense, published]).split())
    assert "began with" not in table([random])
    assert "Begun with" not in table([random])


@pytest.mark.parametrize(("events", "step"), [(EVENTS[:-1], END), (EVENTS, END - 1)], ids=["going on", "went on"])
def test_an_evaluation_of_an_earlier_end_does_not_count(events, step, tmp_path):
    run = measured(write_run(tmp_path / "run", events), "x", {"step": step, **FLOW})
    assert "EPE" not in table([run])
    assert "evaluations/x.json is left out, since the run has gone on after it" in write_report([run], tmp_path / "out").read_text()


def test_samples_have_a_section_for_each_evaluation(tmp_path):
    methods = [{"sparsity": {"method": {"kind": kind}}} for kind in ("srste", "ste")]
    runs = [write_run(tmp_path / str(i), config=config) for i, config in enumerate(methods)]
    for run, shift in zip(runs, (0.0, 1.0), strict=True):
        measured(run, "sintel", FLOW, {"flow-0.npz": flow_file(shift), "flow-1.npz": flow_file(shift)})
    measured(runs[1], "flickr", {"headline": "ema_bleu", "metrics": {"ema_bleu": 1.0}}, {"translations.jsonl": lines(TEXTS)})
    page = write_report(runs, tmp_path / "out").read_text()
    assert [page.count(f"<h2>What it does{name}</h2>") for name in ("", ": sintel", ": flickr")] == [0, 1, 1]
    assert "Examples of the evaluation sintel, seed 0. They were not chosen." in page
    assert "Examples of the evaluation flickr, seed 0, by the moving average of the weights. They were not chosen." in page
    assert len(pictures(page)) == 2, "each example once, with what both make of it"
    assert "H0" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no evaluation can be read from it .JSONDecodeError"),
        ("[]", "no evaluation can be read from it .TypeError"),
        ('{"step": 20, "metrics": {"epe": 1}}', "no evaluation can be read from it .KeyError: 'headline'"),
        ('{"step": 20, "headline": "epe", "metrics": {"epe": "much"}}', "no evaluation can be read from it .ValueError"),
        ('{"step": 20, "headline": "epe", "metrics": {"bleu": 1}}', "its headline 'epe' is not among its metrics"),
    ],
    ids=["cut short", "a list", "no headline", "no number", "headline without number"],
)
def test_a_file_that_is_no_evaluation_is_named(text, message, tmp_path):
    run = measured(write_run(tmp_path / "run"), "x", FLOW)
    (run / "evaluations" / "x.json").write_text(text)
    with pytest.raises(ReportError, match=rf"x\.json.*{message}.*nofm evaluate --again"):
        table([run])


# ---- studies ----


def with_evaluations(*found: dict[str, float]) -> dict:
    """ROWS of two labels with two seeds each, and these evaluations of theirs in turn."""
    runs = [run for label in ROWS for run in ROWS[label]]
    told = [dataclasses.replace(run, evaluations=each) for run, each in zip(runs, found, strict=True)]
    return {label: [run for run in told if run.label == label] for label in ROWS}


EVALUATED = with_evaluations({"test.map": 0.5, "test.map_50": 0.9}, {"test.map": 0.52}, {"test.map": 0.4, "v1.2.map": 0.1}, {})


def test_lines_keep_their_evaluations(tmp_path):
    (tmp_path / "runs.csv").write_text(runs_csv(EVALUATED))
    head = (tmp_path / "runs.csv").read_text().splitlines()[0]
    assert head.endswith(",metric:map,test.map,test.map_50,v1.2.map")
    assert read_rows(tmp_path / "runs.csv", FACTS) == EVALUATED
    assert runs_csv(ROWS).splitlines()[0].endswith(",metric:map"), "and files without are as they were"


def test_a_table_has_a_column_for_each_evaluation():
    cells = [[cell.strip() for cell in row.split("|")[2:5]] for row in table_markdown(FACTS, EVALUATED).splitlines() if row.startswith("|")]
    assert cells[0] == ["box mAP %", "test: box mAP %", "v1.2: box mAP %"]
    assert cells[2:] == [["42.00 ± 1.41", "51.00 ± 1.41", ""], ["30.50 ± 0.71", "40.00 (1 of 2 seeds)", "10.00 (1 of 2 seeds)"]]
    assert table_markdown(FACTS, EVALUATED, brief=True) == table_markdown(FACTS, ROWS, brief=True)
    rows = list(csv.DictReader(texts(FACTS, EVALUATED)["table.csv"].splitlines()))
    assert [row["test.map"] for row in rows] == ["0.51", "0.4"]
    assert [(row["test.map_n"], row["v1.2.map_n"], row["v1.2.map"]) for row in rows] == [("2", "0", ""), ("1", "1", "0.1")]


def test_a_row_shows_the_weights_that_its_score_is_of():
    both = {"test.map": 0.1, "test.ema_map": 0.7}
    rows = with_evaluations(both, both, both, {"test.map": 0.3})
    rows["a"] = [dataclasses.replace(run, metric="ema_map") for run in rows["a"]]
    shown = table_markdown(FACTS, rows).splitlines()
    assert "| 70.00 ± 0.00 |" in shown[2]
    assert "| 20.00 ± 14.14 |" in shown[3]
    rows["b"] = [dataclasses.replace(run, metric="ema_map", evaluations={"test.map": 0.3}) for run in rows["b"]]
    assert "| 30.00 ± 0.00 |" in table_markdown(FACTS, rows).splitlines()[3], "the average was not measured"


def study(folder: Path, rows: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps(FACTS))
    (folder / "runs.csv").write_text(runs_csv(rows))
    return folder


def test_evaluations_of_runs_that_are_not_here_stay(tmp_path):
    one = study(tmp_path / "one", EVALUATED)
    study(tmp_path / "two", ROWS)  # the same runs, tabled before they were evaluated
    assert known_runs(tmp_path)["1", 0].evaluations == EVALUATED["a"][0].evaluations
    write_study(one, tmp_path / "runs")
    assert read_rows(one / "runs.csv", FACTS) == EVALUATED


def test_a_run_that_is_here_adds_its_evaluations_to_those_of_its_line(tmp_path):
    ended = [{**event, "epoch": 1.0} for event in EVENTS[:-1]] + [{**EVENTS[-1], "metrics": {"map": 0.41}, "seconds": 4.0}]
    run = measured(write_run(tmp_path / "runs" / "a" / "seed-0", ended), "val", {"headline": "map", "metrics": {"map": 0.6}})
    one = study(tmp_path / "tables" / "one", EVALUATED)
    write_study(one, tmp_path / "runs")
    assert read_rows(one / "runs.csv", FACTS)["a"][0].evaluations == {**EVALUATED["a"][0].evaluations, "val.map": 0.6}
    # Made anew: what was measured of the one before is not its own.
    (run / "events.jsonl").write_text((run / "events.jsonl").read_text().replace("0.41", "0.45"))
    write_study(one, tmp_path / "runs")
    assert read_rows(one / "runs.csv", FACTS)["a"][0] == dataclasses.replace(
        read_rows(one / "runs.csv", FACTS)["a"][0], score=0.45, evaluations={"val.map": 0.6}
    )
    assert read_rows(one / "runs.csv", FACTS)["a"][1] == line("a", "1", 1, 0.43, evaluations={"test.map": 0.52})
