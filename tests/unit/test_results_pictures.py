"""results/pictures.py: samples of several runs side by side, as files for a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from test_report_evaluations import FLOW, measured
from test_report_samples import WIDTH, flow_file, lines, run

SCRIPT = Path(__file__).parents[2] / "results" / "pictures.py"
TEXTS = [{"source": "a|b", "reference": "R", "hypothesis": "H"}, {"source": "second", "reference": "R", "hypothesis": "H"}]


def pictures(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, words)], capture_output=True, text=True)


def test_what_runs_do_stands_side_by_side_in_files(tmp_path):
    two = [
        run(tmp_path / "a", {"translations.jsonl": lines(TEXTS), "flow-0.npz": flow_file(0.0), "flow-1.npz": flow_file(0.0)}),
        run(tmp_path / "b", {"translations.jsonl": lines([TEXTS[0] | {"hypothesis": "other"}]), "flow-0.npz": flow_file(1.0)}, "ste"),
    ]
    measured(two[0], "sintel", FLOW, {"flow-0.npz": flow_file(0.5)})
    done = pictures(tmp_path / "into", f"dense={two[0]}", f"STE 2:4={two[1]}", "--count", 1)
    assert done.returncode == 0, done.stderr
    names = ["samples.md", "sample-1.png", "sintel-sample-1.png"]
    assert done.stdout.splitlines() == [str(tmp_path / "into" / name) for name in names]
    assert (tmp_path / "into" / "samples.md").read_text().splitlines()[2:] == [
        "| source | reference | dense | STE 2:4 |",
        "| --- | --- | --- | --- |",
        "| a\\|b | R | H | other |",
    ]
    alone, both = (Image.open(tmp_path / "into" / name).width for name in ("sintel-sample-1.png", "sample-1.png"))
    assert both >= alone + WIDTH


def test_a_picture_is_no_wider_than_a_page_shows(tmp_path):
    wide = run(tmp_path / "wide", {"flow-0.npz": flow_file(0.0, width=1000)})
    assert pictures(tmp_path / "into", f"dense={wide}").returncode == 0
    shown = Image.open(tmp_path / "into" / "sample-1.png")
    assert shown.width == 2400  # of more than 3,000
    assert 15 < shown.height < 60
    colours = {shown.convert("RGB").getpixel((x, shown.height - 5)) for x in (100, 900, 1400, 2300)}
    assert (90, 90, 90) in colours  # the frame's own
    assert len(colours) > 1


@pytest.mark.parametrize(("words", "said"), [(["into", "dense"], "dense: LABEL=RUN is expected"), (["into", "dense=no-run"], "no-run")])
def test_what_cannot_be_shown_is_named(words, said):
    done = pictures(*words)
    assert done.returncode != 0
    assert said in done.stderr
    assert not Path("into").exists()
