"""What a report prints and what it says in words, on runs made up by hand so that every number can be had by pencil."""

from __future__ import annotations

import csv
import json
import re
import textwrap
from pathlib import Path

import pytest
from test_report_numbers import EVENTS, LAYERS, write_run

from nofm.columns import table_in_parts
from nofm.report import files_of, table, write_report
from nofm.report.compare import group_runs
from nofm.report.measures import MEASURES
from nofm.report.picture import figure_of
from nofm.report.read import load
from nofm.report.study import measured


def finished(folder, seed, accuracy, changed, **more):
    """The run of the other tests with another end."""
    events = [dict(event) for event in EVENTS]
    events[-1]["metrics"] = {"accuracy": accuracy}
    events[5]["changed"] = {"a": changed, "b": 0}
    return write_run(folder, events, seed, **more)


def test_what_is_printed_has_mean_and_spread_of_each_configuration(tmp_path):
    runs = [finished(tmp_path / f"s{seed}", seed, 70.0 + 2 * seed, 8 + 4 * seed) for seed in (0, 1)]
    other = {"sparsity": {"method": {"kind": "dense"}}}
    runs.append(finished(tmp_path / "dense", 0, 90.0, 8, config=other))
    *heads, sparse, dense, note = table(runs).splitlines()
    assert heads == [  # they name what is counted, and are broken where the numbers are narrower
        "                            weights kept                   mask changes",
        "                     final     in sparse   weights kept  of all weights",
        "         seeds  accuracy %        layers  in all layers           (SAD)",
    ]
    # 70 and 72; 12 + 8 = 20 and 12 + 12 = 24 changes: each with a sample standard deviation of sqrt(2) times 1 and 2.
    assert re.split(r"  +", sparse) == ["default", "2", "71.0 ± 1.4", "50.0 %", "66.7 %", "22.0 ± 2.8"]
    assert re.split(r"  +", dense)[:3] == ["dense", "1", "90.00"]
    assert note == "mean ± standard deviation over seeds"
    unfinished = write_run(tmp_path / "cut", EVENTS[:6], 2)
    assert "1 of 2" in table([runs[0], unfinished])


def test_what_is_printed_fits_a_terminal_with_a_column_for_each_evaluation(tmp_path):
    runs = []
    for decay in (0.1, 0.2):
        for seed in (0, 1):
            config = {"sparsity": {"method": {"kind": "srste", "decay": decay}}}
            runs.append(finished(tmp_path / f"{decay}-{seed}", seed, 70.0 + 2 * seed, 8, config=config))
            (runs[-1] / "evaluations").mkdir()
            for name in ("test", "other-data"):
                facts = {"step": 20, "headline": "accuracy", "metrics": {"accuracy": 71.0 + seed}}
                (runs[-1] / "evaluations" / f"{name}.json").write_text(json.dumps(facts))
    first, second = (part.splitlines() for part in table(runs).split("\n\n"))
    assert max(map(len, [*first, *second])) <= 80
    assert [re.split(r"  +", line) for line in first[-2:]] == [
        ["decay=0.1", "2", "71.0 ± 1.4", "71.50 ± 0.71", "71.50 ± 0.71", "50.0 %"],
        ["decay=0.2", "2", "71.0 ± 1.4", "71.50 ± 0.71", "71.50 ± 0.71", "50.0 %"],
    ]
    assert [re.split(r"  +", line) for line in second[-3:-1]] == [[f"decay={decay}", "66.7 %", "20 ± 0"] for decay in (0.1, 0.2)]


def test_a_long_name_leaves_room_for_numbers_beside_its_last_line():
    name = " ".join(["srste", "1:16"] * 6)
    lines = table_in_parts(["", "seeds", "one more column"], [[name, "1", "2"], ["dense", "3" * 20, "4" * 21]])
    assert max(map(len, lines)) <= 80
    shown = [line[:36].rstrip().partition("   ")[0] for line in lines]
    assert shown[1:4] == [*textwrap.wrap(name, 36, subsequent_indent="  "), "dense"]
    assert lines[2].split()[-2:] == ["1", "2"], "numbers stand beside its last line"


def test_final_metrics_are_of_the_average_where_there_is_one(tmp_path):
    plain, averaged = finished(tmp_path / "plain", 0, 70.0, 8), [dict(event) for event in EVENTS]
    averaged[-1]["metrics"] = {"accuracy": 80.0, "ema_accuracy": 85.0}
    said = "inal metrics are of the moving average of the weights, where a run has one"
    assert said not in table([plain])
    assert said not in write_report([plain], tmp_path / "out").read_text()
    run = write_run(tmp_path / "averaged", averaged, 0)
    assert re.split(r"  +", table([run]).splitlines()[3])[2] == "85.00"
    assert said in table([run]).splitlines()[-1]
    assert said in write_report([run], tmp_path / "out2").read_text()


def test_scores_of_the_headline_are_those_of_the_table(tmp_path):
    """Means over seeds at the end, and not the best evaluation of any run, which was picked on the test images."""
    runs = []
    for name, seed, best, last in (("a", 0, 99.0, 80.0), ("a", 1, 85.0, 82.0), ("b", 0, 75.0, 70.0), ("b", 1, 75.0, 74.0)):
        scores = [{**EVENTS[3], "step": step, "metrics": {"accuracy": score}} for step, score in ((10, best), (20, last))]
        events = [*EVENTS[:3], *scores, {**EVENTS[-1], "metrics": {"accuracy": last}}]
        config = {"sparsity": {"pattern": "2:4", "method": {"kind": name}}}
        runs.append(write_run(tmp_path / name / str(seed), events, seed, config))
    page = write_report(runs, tmp_path / "out").read_text()
    tiles = re.findall(r'<dt>(.*?)</dt><dd class="number">(.*?)<', page)
    assert [number for name, number in tiles if "accuracy" in name] == ["81.0"]
    assert '<dd class="below">± 1.4 over 2 seeds</dd>' in page
    assert '<td class="main"><span>81.0</span> <span>± 1.4</span></td>' in page
    assert "99.00" not in page


def on(folder: Path, held_out: int | None, accuracy: float, **data: object) -> Path:
    """A run measured on other images, with a pattern of its own."""
    config = {"data": {"name": "digits", "held_out": held_out, **data}, "sparsity": {"pattern": f"1:{int(accuracy)}"}}
    return finished(folder, 0, accuracy, 8, config=config)


def test_runs_measured_on_different_images_have_no_best(tmp_path):
    runs = [on(tmp_path / "a", 3000, 70.0), on(tmp_path / "b", None, 80.0)]
    shown = table(runs)
    assert [re.split(r"  +", line)[2:4] for line in shown.splitlines()[3:5]] == [["70.00", "3,000 held out"], ["80.00", "test data"]]
    why = "Measured on different data, so none of them is called the best: 3,000 training images held out (1:70); test data (1:80)."
    assert f"note: {why}" in shown.replace("\n  ", " ")
    page = write_report(runs, tmp_path / "out").read_text()
    assert "by mean" not in page
    assert "<dt>final accuracy</dt>" not in page
    assert f"<li>{why}</li>" in page
    assert re.search(r"best accuracy, %</th><th[^>]*>measured on</th>", page)
    assert "<td><span>3,000 training images held out</span></td>" in page
    captions = re.findall(r'<p class="caption">On (.*?)\.[ <]', page)
    assert set(captions) == {"3,000 training images held out (1:70); test data (1:80)"}
    assert len(captions) == 3, "accuracy, loss, and run by run"


def test_other_data_sets_have_no_best_either(tmp_path):
    runs = [on(tmp_path / "a", None, 70.0), on(tmp_path / "b", None, 80.0, name="fashion")]
    assert "the best: digits: test data (digits 1:70); fashion: test data (fashion 1:80)." in table(runs).replace("\n  ", " ")
    assert "by mean" not in write_report(runs, tmp_path / "out").read_text()


def test_where_all_runs_are_measured_on_images_held_out_one_note_says_so(tmp_path):
    runs = [on(tmp_path / "a", 300, 70.0), on(tmp_path / "b", 300, 80.0)]
    note = "Measured on 300 training images held out, not on test data."
    assert table(runs).splitlines()[-1] == f"note: {note}"
    assert "measured on" not in table(runs)
    page = write_report(runs, tmp_path / "out").read_text()
    assert "Best configuration by mean: <strong>1:80</strong>" in page
    assert "one seed, so no spread; of 300 training images held out" in page
    assert page.count(f"<li>{note}</li>") == 1
    assert '<p class="caption">On 300 training images held out.' in page


def test_test_data_are_called_so_and_nothing_else_is_said_of_them(tmp_path):
    runs = [on(tmp_path / "a", None, 70.0), finished(tmp_path / "of an earlier version", 0, 80.0, 8)]
    page = write_report(runs, tmp_path / "out").read_text()
    assert '<p class="caption">On test data.' in page
    assert "held" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).replace("held_out", "")
    assert "Best configuration by mean" in page
    assert "easured on" not in table(runs)
    split = write_report([on(tmp_path / "c", None, 70.0, test="test_2017")], tmp_path / "split").read_text()
    assert '<p class="caption">On test data, test_2017.' in split


@pytest.mark.parametrize("held_out", [None, 300])
def test_the_picture_says_where_scores_are_of_images_held_out(held_out, tmp_path):
    groups = group_runs([load(on(tmp_path / "a", held_out, 70.0))])
    title = figure_of(groups).axes[0].get_title().replace("\n", " ")
    assert ("measured on 300 training images held out" in title) == (held_out is not None)


@pytest.mark.parametrize(("decay", "told"), [(0.999, True), (0.5, False)])
def test_an_average_of_more_steps_than_there_were_is_told(tmp_path, decay, told):
    averaged = [dict(event) for event in EVENTS]
    averaged[-1]["metrics"] = {"accuracy": 80.0, "ema_accuracy": 1.0}
    run = write_run(tmp_path / "run", averaged, config={"engine": {"ema": decay}})
    said = "after 20 steps with a decay of 0.999 the average of weights is still 98% the first ones"
    assert (said in write_report([run], tmp_path / "out").read_text()) == told


def test_a_command_that_made_several_runs_is_listed_once(tmp_path):
    same = ["nofm", "train", "tiny", "--seeds", "2"]
    runs = [write_run(tmp_path / f"s{seed}", seed=seed, command=same) for seed in (0, 1)]
    page = write_report(runs, tmp_path / "out").read_text()
    assert len(re.findall(r"<li><code>", page)) == 1


def test_no_axis_of_a_share_reaches_over_100_percent(tmp_path):
    runs = [finished(tmp_path / f"s{seed}", seed, 99.0, 8) for seed in (0, 1)]
    for run, (early, late) in zip(runs, ((100.0, 100.0), (1.0, 99.9)), strict=True):
        text = (run / "events.jsonl").read_text()
        text = text.replace('"accuracy": 60.0', f'"accuracy": {early}').replace('"accuracy": 80.0', f'"accuracy": {late}')
        (run / "events.jsonl").write_text(text)
    page = write_report(runs, tmp_path / "out").read_text()
    drawing = next(svg for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL) if "<title>Accuracy</title>" in svg)
    labels = [float(text) for text in re.findall(r">(\d+(?:\.\d+)?)</text>", drawing)]
    shares = [label for label in labels if label > 50]
    assert shares
    assert max(shares) <= 100.0


def test_a_change_of_processes_is_said(tmp_path):
    again = {"event": "start", "step": 10, "resumed_from": 10, "processes": 1, "processes_before": 2}
    run = write_run(tmp_path / "run", [*EVENTS[:4], again, *EVENTS[4:]])
    page = write_report([run], tmp_path / "out").read_text()
    assert "run went on at step 10 with 1 processes instead of 2" in page
    assert "instead of" not in write_report([write_run(tmp_path / "plain")], tmp_path / "plain-out").read_text()


def test_the_commit_of_nofm_and_that_of_the_working_folder_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / "old"), write_run(tmp_path / "new", seed=1, commit="abc123", workdir_commit="def456+")]
    page = write_report(runs, tmp_path / "out" / "report.html")
    shown = page.read_text()
    assert "The runs differ in the commit of nofm: None, abc123." in shown
    assert "The runs differ in the commit of the working folder: None, def456+." in shown
    assert re.search(r"<th[^>]*>commit of nofm</th>\s*<th[^>]*>commit of the working folder</th>", shown)
    lines = list(csv.DictReader((tmp_path / "out" / "report.csv").open()))
    assert [(line["commit"], line["workdir_commit"]) for line in lines] == [("", ""), ("abc123", "def456+")]


def test_what_a_search_has_found_is_in_the_table_and_the_files(tmp_path):
    def searched(seed: int, decay: float) -> Path:
        found = {"event": "found", "step": 10, "values": {"decay": decay}}
        config = {"sparsity": {"method": {"kind": "srste", "decay": "auto"}}}
        return write_run(tmp_path / f"auto-{seed}", [*EVENTS[:4], found, *EVENTS[4:]], seed, config=config)

    fixed = write_run(tmp_path / "fixed", config={"sparsity": {"method": {"kind": "srste", "decay": 0.002}}})
    runs = [searched(0, 0.001), searched(1, 0.003), fixed]
    header, auto, plain, *_ = (re.split(r"  +", line) for line in table(runs).partition("\n\n")[2].splitlines())  # there is no more room
    assert (header[-1], auto[-1], plain[-1]) == ("decay found", "0.002 ± 0.0014", "\N{EM DASH}")
    page = write_report(runs, tmp_path / "out" / "report.html")
    lines = list(csv.DictReader(page.with_suffix(".csv").open()))
    assert [line["found:decay"] for line in lines] == ["0.001", "0.003", ""]
    numbers = [group["numbers"] for group in json.loads(page.with_suffix(".json").read_text())["groups"]]
    assert numbers[0]["found:decay"]["mean"] == pytest.approx(0.002)
    assert "found:decay" not in numbers[1]
    told = [measured("auto", "1", load(run), MEASURES["classification"]).found for run in runs]
    assert told == [{"decay": 0.001}, {"decay": 0.003}, {}], "and of a study's runs"
    assert "found" not in table([fixed]), "a column for nobody"
    assert "found" not in write_report([fixed], tmp_path / "plain" / "report.html").with_suffix(".csv").read_text()


@pytest.mark.parametrize("picture", [False, True])
def test_all_files_are_listed(picture, tmp_path):
    page = write_report([write_run(tmp_path / "run")], tmp_path / "out" / "name.html", picture=picture)
    assert sorted(files_of(page, picture=picture)) == sorted((tmp_path / "out").iterdir())
    assert len(files_of(page, picture=picture)) == 4 + picture


def test_shares_of_weights_say_which_layers_they_are_of(tmp_path):
    dense_layers = [layer for layer in LAYERS if not layer["pattern"]]
    still = [{**event, "changed": {}} if event["event"] == "sad" else event for event in EVENTS]
    runs = [write_run(tmp_path / "sparse"), write_run(tmp_path / "none", still, layers=dense_layers, recipe="other")]
    page = write_report(runs, tmp_path / "out").read_text()
    header = re.findall(r'<th scope="col">(weights kept[^<]*)</th>', page)
    assert header == ["weights kept in sparse layers", "weights kept in all layers", "weights kept", "weights kept"]  # then layer by layer
    assert re.search(r"kept in sparse layers</dt>.*?66\.7 % kept in all layers, 32 of 48", page, re.DOTALL)
    assert re.split(r"  +", table(runs).splitlines()[4])[3:5] == ["\N{EM DASH}", "100.0 %"]


def test_an_unstructured_network_is_not_said_to_be_1_1_and_whole(tmp_path):
    anywhere = [{**layer, "pattern": "1:1", "kept": 16, "groups": 16} if layer["pattern"] else layer for layer in LAYERS]
    ended = [*EVENTS[:-1], {**EVENTS[-1], "kept": 4}]
    configs = [{"sparsity": {"pattern": pattern, "method": {"kind": kind}}} for pattern, kind in (("2:4", "srste"), ("1:1", "rigl"))]
    runs = [
        write_run(tmp_path / "srste", config=configs[0]),
        write_run(
            tmp_path / "rigl",
            ended,
            config=configs[1],
            layers=anywhere,
            cost={"params": 48, "params_sparse": 48, "macs": 9, "macs_sparse": 9},
        ),
    ]
    page = write_report(runs, tmp_path / "out").read_text()
    assert [line.split()[0] for line in table(runs).splitlines()[3:5]] == ["srste", "rigl"]
    assert "2:4, unstructured sparse" in page
    assert page.count('<span class="tag">unstructured</span></td><td></td><td>16</td><td></td><td></td>') == 2
    assert "multiply-adds of one forward" not in page
    assert '<span class="tag">1:1</span>' not in page


def test_runs_that_say_what_layers_keep_share_their_table_with_those_that_do_not(tmp_path):
    """Unfinished runs do not, nor do those of before; what they keep is the same."""
    told = [*EVENTS[:-1], {**EVENTS[-1], "kept": 16, "kept_in": {"a": 8, "b": 8}}]
    runs = [write_run(tmp_path / "told", told), write_run(tmp_path / "before", recipe="other")]
    page = write_report(runs, tmp_path / "out").read_text()
    assert page.count("layers, their patterns and costs") == 1


def test_what_an_unstructured_layer_keeps_in_the_end_is_shown(tmp_path):
    layers = [{**layer, "pattern": "1:1", "kept": 16, "groups": 16, "macs": 64} if layer["pattern"] else layer for layer in LAYERS]
    ended = [*EVENTS[:-1], {**EVENTS[-1], "kept": 12, "kept_in": {"a": 4, "b": 8}}]
    config = {"sparsity": {"pattern": "1:1", "method": {"kind": "rigl"}}}
    run = write_run(tmp_path / "rigl", ended, config=config, layers=layers, cost={"macs": 144, "macs_sparse": 144})
    page = write_report([run], tmp_path / "out").read_text()
    assert page.count('<th scope="col">multiply-adds</th><th scope="col">multiply-adds kept</th>') == 1
    rows = re.findall(r'<tr><th scope="row">([ab])</th>(.*?)</tr>', page)
    cells = {name: re.findall(r"<td[^>]*>(?:<span.*?</span>)?([^<]*)", row) for name, row in rows}
    assert cells["a"][4:9] == ["16", "4", "25.0 %", "64", "16"]
    assert cells["b"][4:9] == ["16", "8", "50.0 %", "64", "32"]
    assert "64 of 144" in page, "multiply-adds kept: 16 and 32, and 16 of the layer that stays dense"
