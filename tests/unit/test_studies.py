"""Studies as values: their rows can be run and differ in nothing but their subject; and what is made of finished runs, by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nofm.engine.resolve import differences, to_dict
from nofm.engine.validate import check
from nofm.recipes import find
from nofm.recipes.studies import STUDIES
from nofm.report.errors import ReportError
from nofm.report.study import Interval, difference, verdict, write_study

BASES = ("cifar10/resnet20", "cifar10/resnet18", "imagenet/resnet50", "digits")


@pytest.fixture
def images(tmp_path: Path) -> str:
    """Folders as ImageNet has them: all that `check` looks at."""
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
    return str(tmp_path)


def base(name: str, root: str):
    config = find(name)
    return config if config.data.name == "digits" else dataclasses.replace(config, data=dataclasses.replace(config.data, root=root))


# RegNets need large images; digits' one-cycle schedule cannot begin again for methods that train twice.
REFUSED = {("regnet", "cifar10/resnet20"), ("regnet", "cifar10/resnet18"), ("regnet", "digits"), ("table2", "digits"), ("table3", "digits")}


@pytest.mark.parametrize(("study", "name"), [(study, name) for study in STUDIES for name in BASES if (study, name) not in REFUSED])
def test_every_row_of_every_study_can_be_run(study, name, images):
    config = base(name, images)
    made = STUDIES[study](config)
    assert len(made.rows) > 1
    for row in made.rows:
        check(row.config)
        # What a table compares is the method, the pattern, the network, and for methods that train twice the length.
        allowed = ("sparsity.", "model.name", "engine.epochs", "engine.steps", "schedule.restarts")
        for key, _, _ in differences(to_dict(config), to_dict(row.config)):
            assert key.startswith(allowed), (row.label, key)


def test_regnets_need_large_images():
    with pytest.raises(ValueError, match="RegNets halve an image five times"):
        STUDIES["regnet"](find("cifar10/resnet20"))


def test_welch_by_hand():
    # Means 3 and 1, variances 1 and 4 over three values each: standard error sqrt(5/3), 2.94 degrees of freedom, taken as 2.
    found = difference([2.0, 3.0, 4.0], [-1.0, 1.0, 3.0])
    assert found is not None
    assert found.mean == pytest.approx(2.0)
    assert found.high - found.mean == pytest.approx(4.303 * (5 / 3) ** 0.5)
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    assert difference([1.0], [1.0, 2.0]) is None


@pytest.mark.parametrize(
    ("metric", "level", "interval", "expected"),
    [
        ("accuracy", False, Interval(1.0, 0.1, 1.9), "holds"),
        ("accuracy", False, Interval(1.0, -0.1, 2.1), "open"),
        ("accuracy", False, Interval(-1.0, -1.9, -0.1), "fails"),
        ("sad", False, Interval(-1.0, -1.9, -0.1), "holds"),
        ("sad", False, Interval(1.0, 0.1, 1.9), "fails"),
        ("accuracy", True, Interval(0.1, -0.2, 0.4), "holds"),
        ("accuracy", True, Interval(0.1, -0.2, 0.6), "open"),
        ("accuracy", True, Interval(-1.0, -1.2, -0.8), "fails"),
        ("accuracy", False, None, ""),
    ],
)
def test_verdicts(metric, level, interval, expected):
    assert verdict({"metric": metric, "level": level}, interval) == expected


def test_a_study_without_finished_runs_says_so(tmp_path):
    with pytest.raises(ReportError, match=r"study\.json.*nofm study"):
        write_study(tmp_path)
    facts = {"format": 1, "name": "x", "title": "X", "rows": [{"label": "a", "paper": "", "folder": "a"}], "claims": [], "notes": []}
    (tmp_path / "study.json").write_text(json.dumps(facts))
    with pytest.raises(ReportError, match="no run of this study is finished yet"):
        write_study(tmp_path)
