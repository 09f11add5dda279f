"""The report as a reader sees it: opened in headless Chromium on a phone and on a desk, in light and in dark.

Needs chromium and chromedriver on the PATH and fails where they are missing, so it runs with `-m slow` only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium

from nofm.report import write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import trained_runs

pytestmark = pytest.mark.slow

SCREENS = [(390, False), (390, True), (1200, False), (1440, False), (1440, True)]
METHODS = ("dense", "srste", "ste")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    folders = [root / f"{method}-with-a-long-name-for-a-folder-{seed}" for method in METHODS for seed in (0, 1, 2)]
    for folder in folders:
        trained_runs.train(folder, folder.name.split("-")[0], int(folder.name[-1]), "2:8", steps=100)
    with (folders[-1] / "events.jsonl").open("a") as file:
        file.write('{"event": "tra')  # as after a crash: the page then has a notice
    return folders


@pytest.fixture(scope="module", params=["several-runs", "one-run"])
def page(request, runs, tmp_path_factory) -> Path:
    return write_report(runs if request.param == "several-runs" else runs[-1:], tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as browser:
        yield browser


@pytest.fixture(params=SCREENS, ids=lambda screen: f"{screen[0]}-{'dark' if screen[1] else 'light'}")
def opened(request, browser, page) -> Chromium:
    browser.console()
    browser.open(page, *request.param)
    return browser


def test_it_opens_in_silence_and_loads_nothing(opened):
    assert opened.console() == []
    assert opened.run("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert opened.run("return document.querySelectorAll('figure svg').length") >= 6


def test_nothing_overflows(opened):
    # Not innerWidth: on a phone that grows with what overflows.
    assert opened.run("return document.documentElement.scrollWidth") <= opened.width
    out = opened.run(f"""
        return [...document.querySelectorAll('body *')].filter(e => e.getClientRects().length)
            .filter(e => !e.closest('.scroll table') && !e.closest('svg'))
            .filter(e => e.getBoundingClientRect().right > {opened.width} + 0.5 || e.getBoundingClientRect().left < -0.5)
            .map(e => e.outerHTML.slice(0, 80));""")
    assert out == []


def test_on_a_desk_the_comparison_is_seen_whole(browser, page):
    """Also that of a long run, with numbers of many digits: a mean and its spread stand in two lines where one has no room."""
    browser.open(page, 1200, False)
    browser.run("""
        for (const cell of document.querySelectorAll('.compared td')) {
            const parts = cell.querySelectorAll('span');
            if (parts.length == 2) { parts[0].textContent = '1,234,567.89'; parts[1].textContent = '± 1,234.5678'; }
        }""")
    box = "document.querySelector('.scroll:has(.compared)')"
    assert browser.run(f"return {box}.scrollWidth") <= browser.run(f"return {box}.clientWidth")


def test_text_of_drawings_stays_inside_and_is_large_enough_to_read(opened):
    texts = opened.run("""
        return [...document.querySelectorAll('figure svg text')].map(t => {
            const box = t.getBoundingClientRect(), svg = t.closest('svg').getBoundingClientRect();
            const size = parseFloat(getComputedStyle(t).fontSize) * svg.width / t.closest('svg').viewBox.baseVal.width;
            return [t.textContent, size, box.left - svg.left, svg.right - box.right, box.top - svg.top, svg.bottom - box.bottom];});""")
    assert len(texts) > 50
    for text, size, *inside in texts:
        assert 10 <= size <= 16, f"{text!r} is {size:.1f} px high"
        assert min(inside) > -2, f"{text!r} leaves its drawing: {inside}"


def test_texts_of_a_drawing_do_not_lie_on_each_other(opened):
    crossing = opened.run("""
        const found = [];
        for (const svg of document.querySelectorAll('figure svg')) {
            const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
            boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
                const x = Math.min(p.right, q.right) - Math.max(p.left, q.left), y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
                if (x > 1 && y > 4) found.push([svg.querySelector('title').textContent, a, b, x, y]);
            }));
        }
        return found;""")
    assert crossing == []


# The contrast of a colour with what lies behind an element, as WCAG defines it. A canvas turns any CSS colour into RGB.
CONTRAST = """
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const rgb = colour => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = colour => { const [r, g, b] = rgb(colour).map(v => linear(v / 255)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const behind = e => {
        for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (rgb(c)[3] === 255) return c; }
        return 'white';
    };
    const ratio = (e, colour) => {
        const [a, b] = [light(colour), light(behind(e))];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    };
"""


def test_text_and_lines_can_be_read_on_their_background(opened):
    texts = opened.run(f"""{CONTRAST}
        return [...document.querySelectorAll('svg text')].map(t => [t.textContent, ratio(t, getComputedStyle(t).fill)]).concat(
            [...document.querySelectorAll('h1, h2, h3, p, li, th, td, dt, dd, summary, a, code')].filter(e => e.getClientRects().length)
                .map(e => [e.textContent.slice(0, 40), ratio(e, getComputedStyle(e).color)]));""")
    assert len(texts) > 100
    assert [row for row in texts if row[1] < 4.5] == []  # WCAG AA for text
    lines = opened.run(f"""{CONTRAST}
        return [...document.querySelectorAll('svg path')].filter(p => /var\\(--[sd]\\d/.test(p.style.stroke))
            .map(p => [p.style.stroke, ratio(p, getComputedStyle(p).stroke)]);""")
    assert len(lines) >= 3
    assert [row for row in lines if row[1] < 3] == []  # WCAG AA for graphics


def test_all_colours_of_the_palette_can_be_read(opened):
    names = [f"--s{i}" for i in range(8)] + [f"--d{i}" for i in range(10)]
    ratios = opened.run(f"""{CONTRAST}
        const card = document.querySelector('figure'), probe = card.appendChild(document.createElement('i'));
        const found = {names}.map(n => {{ probe.style.color = `var(${{n}})`; return [n, ratio(card, getComputedStyle(probe).color)]; }});
        probe.remove(); return found;""")
    assert [row for row in ratios if row[1] < 3] == []


def test_a_picture_can_be_taken(opened, tmp_path):
    opened.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
