"""Help on terminals of several widths: no line is wider than its terminal, and nothing of the text is lost."""

from __future__ import annotations

import re

import pytest

from nofm.cli.main import COMMANDS, main
from nofm.cli.pages import fitted

TEXT = """usage: nofm do NAME [--one A B] [--two C]
              [--three]

A paragraph of some
words.
goes on.

  --name NAME  what it is called,
               at length
  --x          short
  an example of a line

an end:
  a  b
"""
# At 28 columns there is no room beside a name, so its text goes below; an option and its value are never parted.
NARROW = """usage: nofm do NAME
               [--one A B]
               [--two C]
               [--three]

A paragraph of some words.
goes on.

  --name NAME
      what it is called, at
      length
  --x
      short
  an example of a line

an end:
  a
      b"""
WIDE = """usage: nofm do NAME [--one A B] [--two C] [--three]

A paragraph of some words. goes on.

  --name NAME  what it is called, at length
  --x          short
  an example of a line

an end:
  a  b"""


@pytest.mark.parametrize(("columns", "expected"), [(28, NARROW), (60, WIDE), (500, WIDE)], ids=["narrow", "wide", "very wide"])
def test_a_text_is_laid_out_for_the_terminal(columns, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert fitted(TEXT) == expected


def test_paragraphs_may_be_indented(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    assert fitted("one two three four", indent=2) == "one two\n  three four"


PAGES = [
    [],
    ["train"],
    ["train", "digits"],
    ["train", "flow/stamps"],
    ["resume"],
    *([name] for name in COMMANDS if name not in ("train", "resume")),
]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("args", PAGES, ids=lambda args: " ".join(["nofm", *args]))
def test_help_fits_on_the_terminal(args, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*args, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    own = [line for line in lines if not line.startswith("usage: nofm cost")]  # tyro does not break these, and this one has 89
    assert [line for line in own if len(line) > columns] == []
    words = " ".join(lines)
    assert "None" not in words, "what is not set needs no default"
    assert "(default: )" not in re.sub(r"[│\s]+", " ", words)
