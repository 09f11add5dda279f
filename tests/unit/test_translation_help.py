"""LibreOffice's help as parallel text, from pages written here as its packages write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nofm.data.errors import DataError
from nofm.data.libreoffice import paragraphs, read_help
from nofm.data.text import read_corpus

PAGE = """<!DOCTYPE html><html lang="{lang}"><head><base href="../"><title>no</title><script>var no = "<p>";</script></head><body>
<header><p dir="auto">Help</p></header><div id="DisplayArea"><meta itemprop="keywords" content="no">
<h1 id="hd_id1" dir="auto">
<a name="x"></a>{title} {page}</h1>
<p id="par_id2" class="paragraph" dir="auto"></p>
<p id="par_id3" class="listitem">{press} <span id="sw" class="switchinline"><span hidden="true" id="MACx" class="MAC">Command
</span><span hidden="true" id="defaultx">{ctrl}</span></span>+<span class="emph">Z</span> &amp; <br>{page}.</p>
<p id="par_id4">{choose} <span class="menuitem">{tools} - </span>
<span class="switchinline"><span id="WRITERx"><span>Auto - </span></span></span>{page}</p>
<pre id="par_id5" class="bascode">Print {lang}</pre><p id="par_id6" class="code">Sub {lang}</p>
<p id="par_id7">LibreOffice</p><p id="par_id8">{everywhere}<p id="par_id{lang}">{lang}</p>
</div></body></html>"""
WORDS = {
    "en-US": {"title": "Undo", "press": "Press", "ctrl": "Ctrl", "choose": "Choose", "tools": "Tools", "everywhere": "On all pages"},
    "de": {
        "title": "Rückgängig",
        "press": "Drücke",
        "ctrl": "Strg",
        "choose": "Wähle",
        "tools": "Extras",
        "everywhere": "Auf allen Seiten",
    },
}


def write_help(root: Path, pages: int = 120) -> None:
    for language, words in WORDS.items():
        for page in range(pages):
            path = root / "usr/share/libreoffice/help" / language / "text" / "swriter" / f"{page}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(PAGE.format(lang=language, page=page, **words))


def test_a_help_page_is_its_paragraphs(tmp_path):
    write_help(tmp_path, 1)
    page = tmp_path / "usr/share/libreoffice/help/de/text/swriter/0.html"
    assert paragraphs(page) == {
        "hd_id1": "Rückgängig 0",
        "par_id3": "Drücke Strg+Z & 0.",
        "par_id4": "Wähle Extras - Auto - 0",
        "par_id7": "LibreOffice",
        "par_id8": "Auf allen Seiten",
        "par_idde": "de",
    }


def test_help_is_matched_by_page_and_paragraph_and_split_by_page(tmp_path):
    write_help(tmp_path)
    splits = read_help(tmp_path)
    pairs = {name: list(zip(text.source, text.target, strict=True)) for name, text in splits.items()}
    every = [pair for found in pairs.values() for pair in found]
    expected = {(f"Undo {i}", f"Rückgängig {i}") for i in range(120)} | {("On all pages", "Auf allen Seiten")}
    expected |= {(f"Press Ctrl+Z & {i}.", f"Drücke Strg+Z & {i}.") for i in range(120)}
    expected |= {(f"Choose Tools - Auto - {i}", f"Wähle Extras - Auto - {i}") for i in range(120)}
    assert set(every) == expected
    assert not {source for source, _ in pairs["train"]} & {source for name in ("valid", "test") for source, _ in pairs[name]}
    assert ("On all pages", "Auf allen Seiten") in pairs["test"]
    for name, found in pairs.items():
        assert len(found) == len(set(found)), name
        pages = {source.rstrip(".").split()[-1] for source, _ in found} - {"pages"}
        assert len([pair for pair in found if pair[0] != "On all pages"]) == 3 * len(pages), "a page lies in one split"
    assert read_corpus("libreoffice", tmp_path / "usr/share", test="valid").test.source == splits["valid"].source


def test_missing_help_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no usr/share/libreoffice/help/en-US/text; unpack libreoffice-help-en-us there"):
        read_help(tmp_path)
    write_help(tmp_path, 2)
    with pytest.raises(DataError, match=r"unpack libreoffice-help-fr there"):
        read_help(tmp_path, "en", "fr")
    with pytest.raises(DataError, match=r"no paragraphs of 2 pages are for (train|valid|test)"):
        read_help(tmp_path)
    write_help(tmp_path)
    with pytest.raises(DataError, match=r"data.test = val: LibreOffice's help is split into train, valid, test"):
        read_corpus("libreoffice", tmp_path, test="val")
    (tmp_path / "usr/share/libreoffice/help/de/text/swriter/0.html").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"0\.html: cannot be read"):
        read_help(tmp_path)
