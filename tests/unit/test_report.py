"""The report of really trained runs: the page as a parser sees it, and its numbers against the events they come from.

The page in a browser (nothing overflows, colours can be read, the console is silent) is tests/integration/test_report_in_browser.py.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import trained_runs
from test_report_numbers import EVENTS, LAYERS, write_run

import nofm
from nofm.analysis.shapes import kernel_shapes
from nofm.report import curves, write_report
from nofm.report.figures import kernel_picture
from nofm.report.kernels import last_masks, read_shapes
from nofm.report.read import load

METHODS, SEEDS = ("dense", "srste", "ste"), (0, 1)
VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    parent: Element | None
    parts: list[Element | str] = field(default_factory=list)

    @property
    def children(self) -> list[Element]:
        return [part for part in self.parts if isinstance(part, Element)]

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)

    def all(self, tag: str) -> list[Element]:
        return [e for child in self.children for e in ([child] if child.tag == tag else []) + child.all(tag)]

    def every(self) -> list[Element]:
        return [e for child in self.children for e in [child, *child.every()]]


class Tree(HTMLParser):
    """A strict reader: every element that is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root = self.open = Element("", {}, None)
        self.feed(text)
        self.close()
        assert self.open is self.root, f"{self.open.tag} is never closed"

    def handle_starttag(self, tag, attrs):
        element = Element(tag, {key: value or "" for key, value in attrs}, self.open)
        self.open.parts.append(element)
        if tag not in VOID:
            self.open = element

    def handle_startendtag(self, tag, attrs):
        self.open.parts.append(Element(tag, {key: value or "" for key, value in attrs}, self.open))

    def handle_endtag(self, tag):
        assert self.open.tag == tag, f"</{tag}> closes <{self.open.tag}>"
        assert self.open.parent is not None
        self.open = self.open.parent

    def handle_data(self, data):
        self.open.parts.append(data)


@dataclass
class Reported:
    folders: list[Path]
    trained: dict[str, tuple[trained_runs.nn.Module, nofm.SAD]]
    page: Path

    @property
    def text(self) -> str:
        return self.page.read_text(encoding="utf-8")

    @property
    def data(self) -> dict:
        return json.loads(self.page.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> Reported:
    root = tmp_path_factory.mktemp("runs")
    trained = {f"{m}-{s}": trained_runs.train(root / f"{m}-{s}", m, s, "2:8", steps=40) for m in METHODS for s in SEEDS}
    folders = [root / name for name in trained]
    return Reported(folders, trained, write_report(folders, root / "out" / "page.html"))


def test_the_page_is_one_file_that_loads_nothing(reported):
    assert sorted(p.name for p in reported.page.parent.iterdir()) == ["page-curves.csv", "page.csv", "page.html", "page.json"]
    elements = Tree(reported.text).root.every()
    assert not [e for e in elements if e.tag in ("script", "img", "iframe", "object", "embed", "base", "form")]
    links = [
        e.attributes[key] for e in elements for key in ("href", "src", "xlink:href", "srcset", "action", "data") if key in e.attributes
    ]
    ids = [e.attributes["id"] for e in elements if "id" in e.attributes]
    assert len(ids) == len(set(ids)), "ids of several drawings must not meet"
    beside = {"data:,", "page.csv", "page-curves.csv", "page.json"}
    assert {link for link in links if not link.startswith("#")} == beside
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", reported.text)) <= set(ids)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)|\bon[a-z]+=", reported.text), "no address of another machine, no script"


def test_the_page_is_made_for_phones_and_for_both_colour_schemes(reported):
    root = Tree(reported.text).root
    assert {m.attributes.get("name"): m.attributes.get("content") for m in root.all("meta")}[
        "viewport"
    ] == "width=device-width, initial-scale=1"
    assert "prefers-color-scheme: dark" in root.all("style")[0].text
    for table in root.all("table"):
        assert table.parent is not None
        assert table.parent.attributes["class"] == "scroll", "a wide table scrolls by itself"
        assert table.all("th")
    fixed = re.findall(r"(?:fill|stroke|color): *(#[0-9a-f]{3,6}|rgb[^;\"]*|black|white)", "".join(svg_source(reported.text)))
    assert not fixed, "colours of a drawing are those of the page"
    assert "var(--s0)" in reported.text


def svg_source(text: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", text, re.DOTALL)


def test_every_drawing_has_title_units_and_legend(reported):
    figures = Tree(reported.text).root.all("figure")
    titles = [figure.all("h3")[0].text for figure in figures]
    by_layer, kernels = (
        [f"{what}: {method}{end}" for method in METHODS] for what, end in (("SAD by layer", ""), ("Kernel shapes", ", seed 0"))
    )
    learning = ["Accuracy", "Evaluation loss", "Training loss", "Final accuracy, run by run"]
    assert titles == [*learning, "SAD, all layers", "Flip rate", *by_layer, *kernels]
    expected = {
        "Accuracy": "accuracy (%)",
        "Training loss": "loss (unitless)",
        "SAD, all layers": "(weights)",
        "Flip rate": "(% of weights a step)",
    }
    for figure, title in zip(figures, titles, strict=True):
        (svg,) = figure.all("svg")
        assert svg.all("title")[0].text == title
        assert svg.attributes["role"] == "img"
        legend = [item.text.strip() for item in figure.all("ul")[0].all("li")]
        texts = [text.text for text in svg.all("text")]
        if title.startswith("Kernel"):
            assert legend == ["kept", "pruned"]
            assert sum(text.endswith(" %") for text in texts) == 12
            continue
        if title.startswith("Final"):
            assert texts.count("accuracy (%)") == 1
            assert set(METHODS) <= set(texts)
            continue
        assert "progress (optimizer steps)" in texts
        assert any(expected.get(title, "(") in text for text in texts)
        assert legend == (["3", "6"] if "by layer" in title else list(METHODS))
        assert not any("$" in text for text in texts), "no formula source in a label"


def test_numbers_are_those_of_the_events(reported):
    data = reported.data
    for run, folder in zip(data["runs"], reported.folders, strict=True):
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        evals = [e for e in events if e["event"] == "eval"]
        assert run["final"]["accuracy"] == evals[-1]["metrics"]["accuracy"]
        assert run["best"]["accuracy"] == max(e["metrics"]["accuracy"] for e in evals)
        assert run["sad"] == sum(sum(e["changed"].values()) for e in events if e["event"] == "sad") > 0
        (accuracy,) = [c for c in run["curves"] if c["curve"] == "eval/accuracy"]
        assert dict(zip(accuracy["steps"], accuracy["values"], strict=True)) == {e["step"]: e["metrics"]["accuracy"] for e in evals}
    for group in data["groups"]:
        finals = [run["final"]["accuracy"] for run in data["runs"] if run["group"] == group["label"]]
        assert len(finals) == 2
        numbers = group["numbers"]["final/accuracy"]
        assert (numbers["mean"], numbers["n"]) == (pytest.approx(statistics.mean(finals)), 2)
        assert numbers["spread"] == pytest.approx(statistics.stdev(finals))
        curves_of = [c for run in data["runs"] if run["group"] == group["label"] for c in run["curves"] if c["curve"] == "train/loss"]
        assert group["curves"]["train/loss"]["mean"] == pytest.approx(
            [statistics.mean(pair) for pair in zip(*(c["values"] for c in curves_of), strict=True)]
        )
    page = Tree(reported.text).root
    cells = {row.all("th")[0].text.strip(): [cell.text for cell in row.all("td")] for row in page.all("table")[0].all("tbody")[0].all("tr")}
    for group in data["groups"]:
        numbers = group["numbers"]["final/accuracy"]
        shown = re.fullmatch(r"([\d.]+)(?: ± ([\d.]+))?", cells[group["label"]][1])
        assert shown is not None
        assert float(shown[1]) == pytest.approx(numbers["mean"], abs=0.06)
        assert float(shown[2]) == pytest.approx(numbers["spread"], abs=0.06)


def test_flip_rates_are_those_that_nofm_measures(reported):
    for folder in reported.folders:
        _, sad = reported.trained[folder.name]
        assert curves.flip_rate(load(folder)) == pytest.approx(sad.flip_rate())


def test_csv_files_hold_the_same_numbers(reported):
    runs = list(csv.DictReader(io.StringIO(reported.page.with_suffix(".csv").read_text())))
    assert [(row["run"], int(row["seed"]), float(row["final/accuracy"]), float(row["sad"])) for row in runs] == [
        (run["name"], run["seed"], run["final"]["accuracy"], run["sad"]) for run in reported.data["runs"]
    ]
    points = list(csv.DictReader(io.StringIO(reported.page.with_name("page-curves.csv").read_text())))
    expected = [
        (run["name"], curve["curve"], curve["layer"], step, value)
        for run in reported.data["runs"]
        for curve in run["curves"]
        for step, value in zip(curve["steps"], curve["values"], strict=True)
    ]
    assert [(p["run"], p["curve"], p["layer"], int(p["step"]), float(p["value"])) for p in points] == expected


def test_kernel_shapes_are_those_of_the_trained_model(reported):
    for group in reported.data["groups"]:
        model, _ = reported.trained[group["runs"][0]]
        shown = reported.data["kernel_shapes"][group["label"]]
        expected = kernel_shapes(model)
        assert [layer["layer"] for layer in shown] == list(expected)
        for layer in shown:
            assert (layer["distinct"], layer["kernels"]) == (expected[layer["layer"]].distinct, expected[layer["layer"]].kernels)
    path = last_masks(load(reported.folders[0]))
    assert path is not None
    assert [layer.distinct for layer in read_shapes(path)] == [
        shapes.distinct for shapes in kernel_shapes(reported.trained["dense-0"][0]).values()
    ]


def test_the_page_says_what_was_run_and_how_to_make_it_again(reported):
    page = Tree(reported.text).root
    text = re.sub(r"\s+", " ", page.text)
    assert page.all("h1")[0].text == "digits"
    assert "3 configurations, 6 runs" in text
    for folder in reported.folders:
        command = " ".join(json.loads((folder / "run.json").read_text())["command"])
        assert command in text
    for fact in (nofm.__version__, trained_runs.torch.__version__, "0123456789abcdef0123456789abcdef01234567"):
        assert fact in text
    assert "dense computes with all weights" in text
    layers = next(table for table in page.all("table") if "density" in table.text)
    assert [row.all("th")[0].text for row in layers.all("tbody")[0].all("tr")] == ["0", "3", "6", "11"]
    assert "2:8" in layers.text


def test_the_same_folders_give_the_same_bytes(reported, tmp_path):
    again = write_report(reported.folders, tmp_path / "page.html")
    for path in again.parent.iterdir():
        assert path.read_bytes() == reported.page.with_name(path.name).read_bytes()


def test_a_copied_run_is_enough_and_torch_is_not_needed(reported, tmp_path):
    shutil.copytree(reported.folders[0], tmp_path / "copied")
    script = (
        "import sys; sys.modules['torch'] = None; from nofm.report import write_report; print(write_report([sys.argv[1]], sys.argv[2]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "copied"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").is_file()
    assert done.stdout.strip() == str(tmp_path / "out" / "report.html")


def test_names_from_a_run_cannot_become_part_of_the_page(tmp_path):
    name = '<script>alert("x")</script>$x_1$&'
    layers = [{**LAYERS[0], "name": name, "note": name}]
    events = [{**e, "changed": {name: 3}} if e["event"] == "sad" else e for e in EVENTS]
    folder = write_run(tmp_path / "run", events, layers=layers, recipe=name, command=["nofm", name], hardware={"name": name})
    page = Tree(write_report([folder], tmp_path / "out").read_text()).root
    assert not page.all("script")
    assert page.all("h1")[0].text == name
    assert name in [item.text.strip() for item in page.all("li")], "and it is shown as it is"


def test_values_that_are_not_finite_are_left_out_of_drawings_and_null_in_json(tmp_path):
    events = [*EVENTS[:5], {"event": "train", "step": 30, "loss": float("nan")}, {"event": "train", "step": 40, "loss": None}]
    page = write_report([write_run(tmp_path / "run", events)], tmp_path / "out")
    curve = next(c for c in json.loads(page.with_suffix(".json").read_text())["runs"][0]["curves"] if c["curve"] == "train/loss")
    assert (curve["steps"], curve["values"]) == ([10, 20, 30], [2.0, 1.0, None])
    assert "NaN" not in page.with_suffix(".json").read_text()
    assert "nan" not in "".join(svg_source(page.read_text())).lower()


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (EVENTS[:4], "accuracy so far"),
        (EVENTS[:2], "Training loss"),
        ([EVENTS[0], EVENTS[2]], "SAD by layer"),
        ([*EVENTS[:2], {"event": "sad", "step": 10, "since": 0, "changed": {"a": 0, "b": 0}, "weights": 32}], "Flip rate"),
        (EVENTS, "one seed, so no spread"),
    ],
    ids=["unfinished", "training-only", "sad-only", "nothing-moved", "one-run"],
)
def test_a_page_can_be_made_of_little(tmp_path, events, says):
    page = write_report([write_run(tmp_path / "run", events)], tmp_path / "out").read_text()
    assert says in page
    assert Tree(page).root.all("h1")[0].text == "tiny"


def test_a_layer_name_is_drawn_letter_by_letter(reported):
    shapes = read_shapes(next(reported.folders[0].glob("masks/*")))
    drawn = kernel_picture("title", [replace(shapes[0], layer="$x_1$ & <b>")], "s0", "")
    texts = [text.text for text in Tree(drawn.svg).root.all("text")]
    assert "$x_1$ & <b>" in texts
