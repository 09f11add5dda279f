"""Samples in the report as a reader sees them, in headless Chromium: pictures are decoded, texts wrap, nothing overflows or is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium

from nofm.report import write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_report_samples import flow_file, lines, objects_file, run

pytestmark = pytest.mark.slow

LONG = "a sentence that goes on and on, " * 12
TEXTS = [{"source": LONG, "reference": LONG, "hypothesis": "Donaudampfschifffahrtsgesellschaft" * 4}]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    files = {"translations.jsonl": lines(TEXTS), "flow-0.npz": flow_file(1.0), "objects-0.npz": objects_file(0.9)}
    return write_report([run(root / name, files, name) for name in ("srste", "ste")], root / "out")


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_samples_are_shown_and_nothing_overflows(browser, page, width, dark):
    browser.console()
    browser.open(page, width, dark)
    assert browser.console() == []
    assert browser.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
    pictures = browser.run("return [...document.images].map(i => [i.complete, i.naturalWidth, i.getBoundingClientRect().width])")
    assert len(pictures) == 2
    assert all(complete and natural > 0 and 0 < shown <= width for complete, natural, shown in pictures)
    assert browser.run("return document.documentElement.scrollWidth") <= browser.width
    rows = browser.run("return [...document.querySelectorAll('.texts td')].map(e => [e.clientWidth, e.scrollWidth])")
    assert rows
    assert all(inside <= outside + 1 for outside, inside in rows), "a word is wider than its cell"
