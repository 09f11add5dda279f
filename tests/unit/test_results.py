"""What is committed under results/ and in the two pages follows from the committed runs, to the last digit."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from nofm.report.errors import ReportError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("results_build", ROOT / "results" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stale(build, root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path, text in build.built(root).items() if not path.is_file() or path.read_text() != text]


def test_everything_is_up_to_date(build):
    assert stale(build, ROOT) == [], "run python results/build.py"


@pytest.fixture
def copy(tmp_path) -> Path:
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


TABLE = "results/cifar10-resnet20/table1"


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (f"{TABLE}/runs.csv", "accuracy,91.78,", "accuracy,91.98,"),
        (f"{TABLE}/table.csv", "dense,", "dense ,"),
        (f"{TABLE}/claims.csv", "holds", "fails"),
        ("README.md", "| dense | 9", "| dense | 8"),
        ("results/README.md", "holds |", "fails |"),
    ],
)
def test_a_number_that_is_edited_is_noticed(file, old, new, build, copy):
    assert stale(build, copy) == []
    edited(copy / file, old, new)
    noticed = stale(build, copy)
    assert noticed
    if file.endswith("runs.csv"):
        assert {f"{TABLE}/table.csv", "README.md", "results/README.md"} <= set(noticed)
    else:
        assert noticed == [file]


def test_prose_is_left_alone(build, copy):
    edited(copy / "README.md", "# nofm", "# Nofm")
    assert stale(build, copy) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- end -->", "", "README.md: 2 regions begin, 1 end"),
        ("generated: brief", "generated: short", "'short' is none of overview, verdicts, across, table, brief"),
        ("cifar10-resnet20/table1", "cifar10-resnet20/table9", "results/cifar10-resnet20/table9 has no study.json"),
    ],
    ids=["no end", "no such thing", "no such study"],
)
def test_a_region_that_cannot_be_made_is_an_error(old, new, message, build, copy):
    edited(copy / "README.md", old, new)
    with pytest.raises(ReportError, match=message):
        build.built(copy)


def test_a_claim_that_no_study_has_is_an_error(build, copy):
    edited(copy / "results/claims.toml", "SR-STE is above STE at 1:16", "SR-STE is above STE at 1:32")
    with pytest.raises(ReportError, match=r"claims\.toml: results/cifar10-resnet20/table1 has no claim 'SR-STE is above STE at 1:32'"):
        build.built(copy)


def test_the_overview_says_what_the_runs_say(build, copy):
    """Of two rows of a claim one loses its runs, and the other's are turned round."""
    runs = copy / "results/cifar10-resnet20/table1/runs.csv"
    lines = [line for line in runs.read_text().splitlines(keepends=True) if not line.startswith("STE 1:4,")]
    swapped = [{"SR-STE 1:16": "STE 1:16", "STE 1:16": "SR-STE 1:16"}.get(line.split(",")[0]) for line in lines]
    configs = {line.split(",")[0]: line.split(",")[2] for line in lines}
    out = []
    for line, name in zip(lines, swapped, strict=True):
        fields = line.split(",")
        out.append(line if name is None else ",".join([name, fields[1], configs[name], *fields[3:]]))
    runs.write_text("".join(out))
    overview = build.built(copy)[copy / "results/README.md"].partition("overview")[2].partition("<!-- end -->")[0]
    assert "| SR-STE is above STE | CIFAR-10, 1:16 | -2.33 points | -2.56 to -2.09 | fails |" in overview
    assert "|  | CIFAR-10, 1:4 |  |  | not measured yet |" in overview
    page = build.built(copy)[copy / "results/README.md"]
    (line,) = [line for line in page.partition("verdicts")[2].splitlines() if line.startswith("| SR-STE is above STE |")][:1]
    assert [cell.strip() for cell in line.split("|")[2:5]] == [
        "",
        "CIFAR-10, 1:16; CIFAR-10, ResNet-18, 1:16, first round (rate 0.1, lambda 3.2e-3)",
        "in 12 places",
    ]


def test_rows_that_a_study_has_no_runs_of_are_named(build, copy):
    edited(copy / "README.md", '"row=SR-STE 2:8" -->', '"row=SR-STE 9:8" -->')
    with pytest.raises(ReportError, match="across: results/multi30k-small/translation has no runs of SR-STE 9:8"):
        build.built(copy)


def test_pictures_are_drawn_anew_from_the_lines_alone(build, copy):
    study = copy / TABLE
    for other in {file.parent for file in copy.glob("results/*/*/study.json")} - {study}:
        shutil.rmtree(other)
    (study / "figure.png").unlink()
    (study / "kept.png").write_bytes(b"half of one")
    (study / "lambda.png").write_bytes(b"of a time when rows were lambdas")
    before = {path: path.read_bytes() for path in study.iterdir() if path.suffix != ".png"}
    assert build.drawn(copy) == [study / "figure.png", study / "kept.png"]
    assert {path.name for path in study.glob("*.png") if path.read_bytes().startswith(b"\x89PNG")} == {"figure.png", "kept.png"}
    assert not (study / "lambda.png").exists()
    assert {path: path.read_bytes() for path in study.iterdir() if path.suffix != ".png"} == before, "and nothing else is touched"
    (study / "curves.csv").write_text("config,seed,epoch,curve,steps,values\n")
    assert build.drawn(copy) == [], "a study without curves has no pictures"


def test_pictures_are_drawn_when_they_are_asked_for(build, monkeypatch, capsys):
    monkeypatch.setattr(build, "drawn", lambda: [ROOT / TABLE / "figure.png"])
    monkeypatch.setattr(build, "built", lambda: pytest.fail("tables are written as well"))
    monkeypatch.setattr("sys.argv", ["build.py", "--pictures"])
    assert build.main() == 0
    assert capsys.readouterr().out == f"{TABLE}/figure.png: drawn\n"
