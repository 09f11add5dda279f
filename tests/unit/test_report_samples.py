"""Samples on the page: what tasks leave in samples/ is shown side by side, one column a configuration, and what is broken is named."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_report_numbers import EVENTS, write_run

from nofm.report import write_report
from nofm.report.errors import ReportError

TEXTS = [{"source": f"<b>{i}</b>", "reference": f"R{i}", "hypothesis": f"H{i}"} for i in range(2)]
HEIGHT, WIDTH = 20, 32


def flow_file(shift: float, width: int = WIDTH) -> bytes:
    truth = np.zeros((HEIGHT, width, 2), np.float32)
    truth[:, width // 2 :] = 3
    arrays = {"frame": np.full((HEIGHT, width, 3), 90, np.uint8), "prediction": truth + np.float32([shift, 0]), "truth": truth}
    return npz(valid=np.ones((HEIGHT, width), bool), **arrays)


def objects_file(score: float) -> bytes:
    box = np.float32([[2, 3, 12, 14]])
    found = {"found_boxes": box, "found_labels": np.int64([1]), "found_scores": np.float32([score])}
    return npz(
        image=np.zeros((HEIGHT, WIDTH, 3), np.uint8), names=np.array(["", "cat"]), truth_boxes=box, truth_labels=np.int64([1]), **found
    )


def npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def run(folder: Path, files: dict[str, bytes], method: str = "srste", ema: bool = False) -> Path:
    """A finished run with samples; runs differ in their method."""
    events = [*EVENTS, {"event": "samples", "step": EVENTS[-1]["step"], "files": sorted(files), "ema": ema}] if files else EVENTS
    write_run(folder, events, config={"sparsity": {"method": {"kind": method}}})
    for name, data in files.items():
        (folder / "samples").mkdir(exist_ok=True)
        (folder / "samples" / name).write_bytes(data)
    return folder


def lines(texts: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(text) + "\n" for text in texts).encode()


def page_of(*runs: Path) -> str:
    return write_report(runs, runs[0].parent / "out").read_text()


def pictures(page: str) -> list[Image.Image]:
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)" width="(\d+)" height="(\d+)" alt="[^"]+"', page)
    images = [Image.open(io.BytesIO(base64.b64decode(data))) for data, _, _ in found]
    assert [(str(i.width), str(i.height)) for i in images] == [(width, height) for _, width, height in found]
    return images


def cells(page: str) -> list[list[str]]:
    table = re.search(r'<table class="texts">(.*?)</table>', page, re.DOTALL)[1]
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]


def test_translations_stand_side_by_side(tmp_path):
    others = [TEXTS[0] | {"hypothesis": "other"}]
    page = page_of(
        run(tmp_path / "a", {"translations.jsonl": lines(TEXTS)}), run(tmp_path / "b", {"translations.jsonl": lines(others)}, "ste")
    )
    header, first, second = cells(page)
    assert header[:2] == ["source", "reference"]
    assert len(header) == 4
    assert first == ["&lt;b&gt;0&lt;/b&gt;", "R0", "H0", "other"]
    assert second == ["&lt;b&gt;1&lt;/b&gt;", "R1", "H1", ""]


def test_one_run_has_one_column_and_says_what_translated(tmp_path):
    page = page_of(run(tmp_path / "a", {"translations.jsonl": lines(TEXTS)}, ema=True))
    assert cells(page)[0] == ["source", "reference", "translation"]
    assert "by the moving average of the weights" in page


def test_flow_is_drawn_beside_the_truth(tmp_path):
    two = [run(tmp_path / name, {"flow-0.npz": flow_file(shift)}, name) for name, shift in (("srste", 1.0), ("ste", 0.0))]
    (alone,), (both,) = pictures(page_of(two[0])), pictures(page_of(*two))
    assert alone.width == 3 * (WIDTH + 4) - 4, "frame, prediction, truth"
    assert both.width == 4 * (WIDTH + 4) - 4, "the same pair is drawn once, with both predictions"
    right = np.asarray(both)[:, -WIDTH // 4 :]
    exact = np.asarray(both)[:, 3 * (WIDTH + 4) - 4 - WIDTH // 4 : 3 * (WIDTH + 4) - 4]
    assert (right[-HEIGHT:] == exact[-HEIGHT:]).all(), "a prediction without error has the colours of the truth"


def test_detections_are_drawn_beside_the_truth(tmp_path):
    (sheet,) = pictures(page_of(run(tmp_path / "a", {"objects-0.npz": objects_file(0.9)})))
    (unsure,) = pictures(page_of(run(tmp_path / "b", {"objects-0.npz": objects_file(0.1)})))
    assert sheet.size == unsure.size
    assert (np.asarray(sheet) != np.asarray(unsure)).any(), "a box with a low score is not drawn"


def test_a_run_without_samples_has_no_such_section(tmp_path):
    page = page_of(run(tmp_path / "a", {}))
    assert "What it does" not in page
    assert "<img" not in page


def damaged(archive: bytes) -> bytes:
    """Wrong where its first array's packed data begin."""
    name, extra = (int.from_bytes(archive[place : place + 2], "little") for place in (26, 28))
    return archive[: 30 + name + extra] + b"\xff" * 10 + archive[40 + name + extra :]


BROKEN = {
    "half a line": ({"translations.jsonl": lines(TEXTS)[:-9]}, r"translations.jsonl, line 2: an object with source"),
    "a line of another kind": ({"translations.jsonl": b'["a", "b"]\n'}, r"translations.jsonl, line 1"),
    "no archive": ({"flow-0.npz": b"PK"}, r"flow-0.npz: cannot be read"),
    "an archive cut short": ({"flow-0.npz": flow_file(0)[:-40]}, r"flow-0.npz: cannot be read"),
    "an archive damaged inside": ({"flow-0.npz": damaged(flow_file(0))}, r"flow-0.npz: cannot be read \(Error -3 while decompressing"),
    "an array missing": ({"flow-0.npz": npz(frame=np.zeros((2, 2, 3)))}, r"flow-0.npz: an array 'prediction' of 3 dimensions"),
    "objects pickled": ({"objects-0.npz": npz(image=np.array([{}], object))}, r"objects-0.npz: cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_sample_is_named(name, tmp_path):
    files, message = BROKEN[name]
    with pytest.raises(ReportError, match=message):
        page_of(run(tmp_path / "a", files))
