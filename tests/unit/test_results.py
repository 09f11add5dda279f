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
        ("<!-- end -->", "", "README.md: 1 regions begin, 0 end"),
        ("generated: brief", "generated: short", "'short' is none of table, brief"),
        ("cifar10-resnet20/table1", "cifar10-resnet20/table9", "results/cifar10-resnet20/table9 has no study.json"),
    ],
    ids=["no end", "no such thing", "no such study"],
)
def test_a_region_that_cannot_be_made_is_an_error(old, new, message, build, copy):
    edited(copy / "README.md", old, new)
    with pytest.raises(ReportError, match=message):
        build.built(copy)
