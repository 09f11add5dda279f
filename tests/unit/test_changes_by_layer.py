"""results/changes_by_layer.py: the mask changes of each layer, from the events of real runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from trained_runs import train

SCRIPT = Path(__file__).parents[2] / "results" / "changes_by_layer.py"
lines = runpy.run_path(str(SCRIPT))["lines"]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two rows, one with two seeds, beside its runs, and a run that has not ended."""
    folder = tmp_path_factory.mktemp("study")
    rows = [{"label": "STE 1:4", "runs": "ste"}, {"label": "SR-STE 1:4", "runs": "srste"}, {"label": "dense", "runs": "dense"}]
    (folder / "study.json").write_text(json.dumps({"rows": rows}))
    for name, seed in (("ste", 0), ("ste", 1), ("srste", 0), ("srste", 2)):
        train(folder / "runs" / name / f"seed-{seed}", name, seed)
    events = folder / "runs" / "srste" / "seed-2" / "events.jsonl"
    events.write_text("\n".join(events.read_text().splitlines()[:-1]) + "\n")
    return folder


def test_changes_are_summed_by_layer_and_seed(study):
    header, *found = lines(study, study, ["STE 1:4", "SR-STE 1:4"], after=30)
    assert header == ["row", "layer", "seed_0", "seed_1"]  # seed 2 has not ended
    assert [row for row, *_ in found] == ["STE 1:4"] * 2 + ["SR-STE 1:4"] * 2  # the first of three convolutions is dense
    for row, layer, *counts in found:
        for seed, count in enumerate(counts):
            file = study / "runs" / ("ste" if row.startswith("STE") else "srste") / f"seed-{seed}" / "events.jsonl"
            looks = [json.loads(line) for line in file.read_text().splitlines() if '"sad"' in line] if file.exists() else []
            assert count == (str(sum(look["changed"][layer] for look in looks if look["step"] > 30)) if looks else "")


@pytest.mark.parametrize(
    ("row", "said"), [("ste", "has no row 'ste'; it has STE 1:4, SR-STE 1:4, dense"), ("dense", "has no finished run of 'dense'")]
)
def test_what_is_not_there_is_said(study, row, said):
    with pytest.raises(SystemExit, match=said):
        next(lines(study, study, [row], after=0))
