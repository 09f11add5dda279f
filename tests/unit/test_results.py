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
        ("results/claims.md", "holds |", "fails |"),
        ("results/README.md", "| 91.86", "| 91.87"),
    ],
)
def test_a_number_that_is_edited_is_noticed(file, old, new, build, copy):
    assert stale(build, copy) == []
    edited(copy / file, old, new)
    noticed = stale(build, copy)
    assert noticed
    if file.endswith("runs.csv"):
        assert {f"{TABLE}/table.csv", "README.md", "results/README.md", "results/cifar10-resnet20/README.md"} <= set(noticed)
    else:
        assert noticed == [file]


def test_prose_is_left_alone(build, copy):
    edited(copy / "README.md", "# nofm", "# Nofm")
    assert stale(build, copy) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- end -->", "", "README.md: 2 regions begin, 1 end"),
        ("generated: brief", "generated: short", "'short' is none of overview, verdicts, across, beside, table, brief"),
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
    """Of two rows of a claim one loses all runs but one, and the other's are turned round."""
    runs = copy / "results/cifar10-resnet20/table1/runs.csv"
    lines = [
        line for line in runs.read_text().splitlines(keepends=True) if not line.startswith("STE 1:4,") or line.startswith("STE 1:4,0,")
    ]
    swapped = [{"SR-STE 1:16": "STE 1:16", "STE 1:16": "SR-STE 1:16"}.get(line.split(",")[0]) for line in lines]
    configs = {line.split(",")[0]: line.split(",")[2] for line in lines}
    out = []
    for line, name in zip(lines, swapped, strict=True):
        fields = line.split(",")
        out.append(line if name is None else ",".join([name, fields[1], configs[name], *fields[3:]]))
    runs.write_text("".join(out))
    overview = build.built(copy)[copy / "results/claims.md"].partition("overview")[2].partition("<!-- end -->")[0]
    assert "| SR-STE is above STE | ResNet-20, 1:16 | -2.33 points | -2.56 to -2.09 | fails |" in overview
    assert "|  | ResNet-20, 1:4 |  |  | not measured yet |" in overview
    page = build.built(copy)[copy / "results/README.md"]
    (line,) = [line for line in page.partition("verdicts")[2].splitlines() if line.startswith("| SR-STE is above STE |")][:1]
    assert [cell.strip() for cell in line.split("|")[2:5]] == [
        "**fails**: 1:16; open: 2:8, 2:4, 4:8",
        "**fails**: 1:16 in a first round; open: 1:16, 2:8, 1:4, 4:8, 2:4, 2:4 in a first round",
        "open: translation, detection, segmentation, flow",
    ]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["holds"], "holds"),
        (["fails"], "fails"),
        (["open, but worse"], "open, but worse"),
        (["holds", "holds"], "holds"),
        (["fails", "fails"], "holds"),  # less of one and less of the other
        (["holds", "fails"], "fails"),
        (["fails", "holds"], "fails"),
        (["open", "holds"], "open"),
        (["fails", "open"], "open"),
        (["open", "open"], "open"),
        (["not measured yet", "holds"], "not measured yet"),
    ],
)
def test_two_things_go_together_where_both_are_settled_and_go_the_same_way(verdicts, expected, build):
    assert build._together(verdicts) == expected


def test_a_claim_about_two_things_has_both_differences(build, copy):
    overview = (copy / "results/claims.md").read_text()
    assert "|  | ResNet-20, Eq. 6 | -1.11 points, +0.21 SAD | -1.51 to -0.71, +0.19 to +0.24 | holds |" in overview
    edited(copy / "results/claims.toml", '"STE is above Eq. 6", "STE has a lower SAD than Eq. 6"]', '"STE is above Eq. 6"]')
    assert "|  | ResNet-20, Eq. 6 | -1.11 points | -1.51 to -0.71 | fails |" in build.built(copy)[copy / "results/claims.md"]


def test_rows_that_a_study_has_no_runs_of_are_named(build, copy):
    edited(copy / "README.md", '"row=SR-STE 2:8" -->', '"row=SR-STE 9:8" -->')
    with pytest.raises(ReportError, match="across: results/multi30k-small/translation has no runs of SR-STE 9:8"):
        build.built(copy)


def beside(build, copy, words: str) -> list[list[str]]:
    """The cells of a table of two studies, without the line of dashes."""
    page = copy / "results/claims.md"
    page.write_text(f"<!-- generated: beside cifar10-resnet20/table2=A cifar10-resnet18/table2=B {words} -->\n<!-- end -->\n")
    lines = build.built(copy)[page].splitlines()[1:-1]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "---" not in line]


def test_rows_stand_side_by_side(build, copy):
    """Columns that are the same in both studies stand once: before the others if they were asked for before them, else after."""
    paper = '"take=in the paper (ResNet-50, ImageNet)=paper"'
    rows = 'row=dense "row=long=ASP, 1.67x epochs|STE 2:4" "row=SR-STE 2:4, 1.67x epochs=SR-STE 2:4, 1.67x epochs|"'
    head, *lines = beside(build, copy, f'take=seeds "take=accuracy %=score" take=epochs {rows}')
    assert head == ["", "A: seeds", "A: score", "A: epochs", "B: seeds", "B: score", "B: epochs"]
    assert [line[0] for line in lines] == ["dense", "long", "SR-STE 2:4, 1.67x epochs"]
    assert lines[1] == ["long", "5", "91.74 ± 0.16", "100", "3", "94.57 ± 0.06", "60"]
    assert lines[2][4:] == ["", "", ""], "B has no such row"
    head, *lines = beside(build, copy, f'take=epochs "take=accuracy %=score" {paper} row=dense "row=STE 2:4"')
    assert head == ["", "epochs", "A: score", "B: score", "paper"]
    assert lines[1] == ["STE 2:4", "60", "91.49 ± 0.24", "94.57 ± 0.06", "76.4"]


def test_how_much_a_row_is_above_another_is_that_of_its_claim(build, copy):
    head, *lines = beside(build, copy, '"take=accuracy %=score" "row=SR-STE 2:4" "row=ASP, same epochs" "against=SR-STE 2:4"')
    assert head[2] == "A: SR-STE 2:4 minus it"
    assert lines[0][2] == ""
    assert lines[1][2] == "+0.26 (+0.06 to +0.46)"
    assert lines[1][4] == "+0.34 (+0.10 to +0.58)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ('"take=accuracy %" "row=ASP 2:9"', "beside: A has no runs of ASP 2:9"),
        ("take=accurracy row=dense", "beside: A has no column 'accurracy', but accuracy %, weights kept"),
    ],
)
def test_what_stands_in_no_study_is_named(words, message, build, copy):
    with pytest.raises(ReportError, match=message):
        beside(build, copy, words)


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
