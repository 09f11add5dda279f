"""A run whose network is not as sparse from the first step on as it is in the end: where that start ends is told, and no evaluation before
it is the best of the sparse network."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from test_pictures_fit import assert_readable
from test_report_numbers import EVENTS, write_run
from torch import nn

import nofm
from nofm.report import curves, picture, table, write_report
from nofm.report.compare import group_runs
from nofm.report.read import load
from nofm.report.sections import marks_of
from nofm.report.start import Start, start_of

SCORES = {10: 70.0, 20: 90.0, 30: 60.0, 40: 80.0}  # the best is of step 20


def started(folder: Path, events: int = 4, epochs: float | None = None, used: dict[int, int] | None = None, **method: Any) -> Path:
    """A run of 40 steps with an evaluation every ten; of an epoch with five steps. It tells the weights `used` at each, or none."""
    rows: list[dict[str, Any]] = [{"event": "start", "step": 0, "resumed_from": None}]
    for step, score in list(SCORES.items())[:events]:
        rows.append({**EVENTS[1], "step": step, "epoch": step / 5})
        rows.append({**EVENTS[2], "step": step, "since": step - 10})
        told = {} if used is None else {"used": used[step]}
        rows.append({"event": "eval", "step": step, "metrics": {"accuracy": score}, "ema": False, "epoch": step / 5, **told})
    if events == len(SCORES):
        rows.append({"event": "end", "step": 40, "metrics": {"accuracy": 80.0}, "seconds": 1.0})
    return write_run(folder, rows, config={"sparsity": {"method": method}, "engine": {"epochs": epochs}})


STARTS: dict[str, tuple[dict[str, Any], Start | None, str]] = {
    "none": ({"kind": "srste", "begin_at": None, "ramp_at": None}, None, ""),
    "of no length": ({"kind": "srste", "begin_at": 0.0}, None, ""),
    "a dense network": ({"kind": "dense"}, None, ""),
    "an unknown sparsity": ({"kind": "str", "initial": -5.0}, None, ""),
    "dense": ({"kind": "srste", "begin_at": 30.0, "ramp_at": None}, Start(30, 30), "dense up to step 30"),
    "gradual": ({"kind": "srste", "begin_at": 30.0, "ramp_at": 0.0}, Start(0, 30), "with fewer and fewer weights up to step 30"),
    "both": (
        {"kind": "srste", "begin_at": 30.0, "ramp_at": 10.0},
        Start(10, 30),
        "dense up to step 10, with fewer and fewer weights up to step 30",
    ),
    "ASP": ({"kind": "asp", "prune_at": 30.0}, Start(30, 30), "dense up to step 30"),
    "GMP": ({"kind": "gmp", "begin_at": None, "end_at": 25}, Start(0, 25), "with fewer and fewer weights up to step 25"),
    "lottery": (
        {"kind": "lottery", "every": 20.0, "rounds": 2, "rewind_to": 5.0},
        Start(20, 35),
        "dense up to step 20, with fewer and fewer weights up to step 35",
    ),
    "SNIP": ({"kind": "snip", "batches": 30, "epochs": 8.0}, Start(30, 30), "dense up to step 30"),
    "SNIP, as usual": ({"kind": "snip", "batches": None}, Start(1, 1), "dense up to step 1"),
    "in epochs": ({"kind": "srste", "begin_at": 4.5, "epochs": 8.0}, Start(22, 22), "dense up to step 22"),  # as round(4.5 * 5) is
}


@pytest.mark.parametrize(("method", "start", "words"), STARTS.values(), ids=STARTS)
def test_where_a_start_ends(method, start, words, tmp_path):
    run = load(started(tmp_path / "run", **method))
    assert start_of(run) == start
    assert start is None or start.words == words
    late = [score for step, score in SCORES.items() if step >= (start.until if start else 0)]
    assert curves.best(run, "accuracy") == max(late)


def test_what_a_run_tells_counts_more_than_its_configuration(tmp_path):
    """With fp16 steps may be skipped, which the method does not count, so that its start ends later; STR's sparsity is not configured."""
    skipped = started(tmp_path / "fp16", kind="srste", begin_at=20.0, used={10: 64, 20: 64, 30: 4, 40: 4})
    assert curves.best(load(skipped), "accuracy") == 80.0, "not the 90 of step 20, which were dense"
    thresholds = started(tmp_path / "str", kind="str", used={10: 64, 20: 30, 30: 8, 40: 6})
    assert curves.best(load(thresholds), "accuracy") == 80.0
    page = write_report([skipped, thresholds], tmp_path / "page.html")
    assert [run["sparse_from"] for run in json.loads(page.with_suffix(".json").read_text())["runs"]] == [20, None]
    assert [row["sparse_from"] for row in csv.DictReader(page.with_suffix(".csv").open())] == ["20", ""]
    later = started(tmp_path / "start", 2, kind="srste", begin_at=30.0, used={10: 64, 20: 64})
    assert curves.best(load(later), "accuracy") is None, "it has not come to its sparsity"


def test_epochs_are_as_long_as_they_are_in_the_end(tmp_path):
    """Resumed with twice the batch: ten steps were two epochs, and from then on four."""
    folder = started(tmp_path / "run", kind="srste", begin_at=6.0, epochs=8.0)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] <= 10 and "epoch" in line:
            line["epoch"] /= 2
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert start_of(load(folder)) == Start(30, 30)


METHODS: dict[str, tuple[nofm.methods.Method, str]] = {
    "dense": (nofm.SRSTE(begin_at=4), "1:8"),
    "gradual": (nofm.SRSTE(begin_at=4, ramp_at=1), "1:8"),
    "asp": (nofm.ASP(prune_at=3), "1:8"),
    "gmp": (nofm.GMP(begin_at=1, end_at=5, every=2), "1:1"),
    "lottery": (nofm.LotteryTicket(rounds=2, every=3, rewind_to=1), "1:1"),
    "lottery, as many rounds as usual": (nofm.LotteryTicket(every=1), "1:1"),
    "none": (nofm.SRSTE(), "1:8"),
    "snip": (nofm.SNIP(batches=3), "1:1"),
    "rigl": (nofm.RigL(end_at=4, every=2), "1:1"),
}


@pytest.mark.parametrize(("method", "pattern"), METHODS.values(), ids=METHODS)
def test_the_methods_themselves_come_to_their_sparsity_there(method, pattern, tmp_path):
    """Each trains, and what its layer computes with is counted after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    nofm.sparsify_(model, {"0": pattern})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nofm.attach(method, model, optimizer)
    (site,) = nofm.sites(model)
    kept, used = [int(site.seen().count_nonzero())], [site.used()]
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
        kept.append(int(site.seen().count_nonzero()))
        used.append(site.used())
    assert used == kept or isinstance(method, nofm.RigL), "which begins its new connections at zero"
    begin = next(step for step, count in enumerate(kept) if count <= kept[-1])
    kind = next(name for name, row in nofm.METHODS.items() if row.method is type(method))
    usual = {field.name: field.default for field in dataclasses.fields(method)}
    given = {name: None if value == usual[name] else value for name, value in dataclasses.asdict(method).items()}
    start = start_of(load(started(tmp_path / "run", kind=kind, **given)))
    assert (0 if start is None else start.until) == begin


def test_the_page_marks_the_end_of_a_start(tmp_path):
    methods = {
        "plain": {"kind": "srste"},
        "dense": {"kind": "srste", "begin_at": 30.0},
        "ramp": {"kind": "srste", "begin_at": 30.0, "ramp_at": 5.0},
    }
    folders = [started(tmp_path / name, **{"begin_at": None, "ramp_at": None, **method}) for name, method in methods.items()]
    page = write_report(folders, tmp_path / "all.html")
    text = re.sub(r"\s+", " ", page.read_text())
    words = "begin_at=30: dense up to step 30; begin_at=30 ramp_at=5: dense up to step 5, with fewer and fewer weights up to step 30."
    assert words in text
    mark = "begin_at=30, begin_at=30 ramp_at=5: as sparse as in the end from step 30 on</li>"
    assert text.count(mark) == 4, "both in accuracy, loss, SAD and flip rate"
    assert text.count('tick" style="color: var(--muted)"></span>as sparse as in the end from step 30 on</li>') == 2, "and each by layer"
    assert [run["sparse_from"] for run in json.loads(page.with_suffix(".json").read_text())["runs"]] == [0, 30, 30]
    assert [row["best/accuracy"] for row in csv.DictReader(page.with_suffix(".csv").open())] == ["90.0", "80.0", "80.0"]
    assert table(folders).replace("\n  ", " ").splitlines()[-2:] == words.removesuffix(".").split("; ")


def drawn_at(svg: str) -> list[str]:
    """The dotted lines from top to bottom, as the places where they stand."""
    found = re.findall(r'd="M (\S+) \S+ L (\S+) \S+ ?"[^>]*stroke: var\(--muted\)', svg.replace("\n", " "))
    return [x for x, other in found if x == other]


def test_a_mark_stands_at_its_step(tmp_path):
    for name, begin in (("late", 30.0), ("early", 10.0), ("none", None)):
        page = write_report([started(tmp_path / name, kind="srste", begin_at=begin)], tmp_path / f"{name}.html").read_text()
        svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
        places = [place for svg in svgs for place in drawn_at(svg)]
        assert len(places) == (0 if begin is None else 5)
        if begin is not None:
            left, width = 0.118 * 400, 0.845 * 400
            assert min(map(float, places)) == pytest.approx(left + width * begin / (40 * 1.02), abs=0.5)


def test_the_page_says_what_the_best_of_a_run_is(tmp_path):
    page = write_report([started(tmp_path / "run", kind="asp", prune_at=30.0)], tmp_path / "page.html").read_text()
    assert "Best numbers are of networks with no more weights than in the end" in page
    plain = write_report([started(tmp_path / "plain", kind="ste")], tmp_path / "plain.html").read_text()
    assert "as sparse as in the end" not in plain
    assert "picked on the data that it is measured on" in plain


@pytest.mark.parametrize(("events", "below"), [(2, "the run has not finished: dense up to step 30"), (3, "the run has not finished")])
def test_a_run_that_is_still_in_its_start_says_so(events, below, tmp_path):
    run = started(tmp_path / "run", events, kind="srste", begin_at=30.0)
    assert f'<dd class="below">{below}</dd>' in write_report([run], tmp_path / "page.html").read_text()
    assert curves.best(load(run), "accuracy") == (None if events == 2 else 60.0)


def test_the_picture_marks_the_end_of_each_start(tmp_path):
    runs = [load(started(tmp_path / str(begin), kind="srste", begin_at=begin)) for begin in (None, 20.0, 30.0)]
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = picture.figure_of(group_runs(runs))
        assert_readable(figure)
    for axes in figure.axes:
        upright = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":" and len(line.get_xdata())]
        assert upright == [20, 30]
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said[-1] == "from here on as sparse as in the end"
    plain = picture.figure_of(group_runs(runs[:1]))
    assert [len(legend.get_texts()) for legend in plain.legends] == [1]


METHODS_AT: dict[str, dict[str, Any]] = {
    "none": {"begin_at": None, "ramp_at": None},
    "20": {"begin_at": 20.0, "ramp_at": None},
    "30": {"begin_at": 30.0, "ramp_at": None},
    "30, gradual": {"begin_at": 30.0, "ramp_at": 5.0},
}


@pytest.mark.parametrize(
    ("names", "colours", "legend"),
    [
        (["none", "20"], {20: 1}, 1),
        (["30", "none", "20"], {30: 0, 20: 2}, None),
        (["none", "20", "30", "30, gradual"], {20: 1, 30: None}, None),
        (["30", "30, gradual"], {30: None}, None),
        (["30"], {30: None}, None),
    ],
    ids=["of one group", "of two", "of one and of two together", "of two together", "no other group"],
)
def test_a_mark_has_the_colour_of_the_only_group_that_it_is_of(names, colours, legend, tmp_path):
    groups = group_runs([load(started(tmp_path / name, kind="srste", **METHODS_AT[name])) for name in names])
    marks = {mark.step: mark.colour for mark in marks_of(groups)}
    assert marks == {step: "muted" if index is None else f"s{index}" for step, index in colours.items()}
    figure = picture.figure_of(groups)
    curves_of_groups = [line.get_color() for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    assert len(set(curves_of_groups)) == len(names)
    assert "black" not in curves_of_groups
    expected = {step: "black" if index is None else curves_of_groups[index] for step, index in colours.items()}
    for axes in figure.axes:
        upright = [line for line in axes.lines if line.get_linestyle() == ":" and len(line.get_xdata())]
        assert [(line.get_xdata()[0], line.get_color()) for line in upright] == list(expected.items())
    key = figure.legends[0].get_lines()[-1]
    assert (key.get_linestyle(), key.get_color()) == (":", "black" if legend is None else curves_of_groups[legend])


@pytest.mark.parametrize(("events", "is_there"), [(2, False), (3, True)])
def test_a_mark_that_no_curve_reaches_is_left_out(events, is_there, tmp_path):
    run = started(tmp_path / "run", events, kind="srste", begin_at=30.0)
    page = write_report([run], tmp_path / "page.html").read_text()
    assert page.count("as sparse as in the end from step 30 on") == (5 if is_there else 0)
    figure = picture.figure_of(group_runs([load(run)]))
    for axes in figure.axes:
        assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":" and len(line.get_xdata())] == [30] * is_there
        assert axes.get_xlim()[1] < (32 if is_there else 22), "the axis ends where the curves do"
    assert ("from here on" in figure.legends[0].get_texts()[-1].get_text()) == is_there


@pytest.mark.parametrize("count", [3, 4, 10])
def test_a_mark_of_many_configurations_counts_them(count, tmp_path):
    groups = group_runs([load(started(tmp_path / str(ramp), kind="srste", begin_at=30.0, ramp_at=float(ramp))) for ramp in range(count)])
    names = ", ".join(group.label for group in groups) if count == 3 else f"{count} configurations"
    assert [mark.name for mark in marks_of(groups)] == [f"{names}: as sparse as in the end from step 30 on"]
