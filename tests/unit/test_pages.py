"""Help on terminals of several widths: no line is wider than its terminal, and nothing of the text is lost."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import termios

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
  a    b
  -c D  to what it has been given, in more words
or another:
  an example
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

╭─ an end ─────────────────╮
│ a                        │
│     b                    │
│ -c D                     │
│     to what it has been  │
│     given, in more words │
╰──────────────────────────╯
╭─ or another ─────────────╮
│ an example               │
╰──────────────────────────╯"""
WIDE = """usage: nofm do NAME [--one A B] [--two C] [--three]

A paragraph of some words. goes on.

  --name NAME  what it is called, at length
  --x          short
  an example of a line

╭─ an end ───────────────────────────────────────╮
│ a    b                                         │
│ -c D  to what it has been given, in more words │
╰────────────────────────────────────────────────╯
╭─ or another ───────────────────────────────────╮
│ an example                                     │
╰────────────────────────────────────────────────╯"""


@pytest.mark.parametrize(("columns", "expected"), [(28, NARROW), (60, WIDE), (500, WIDE)], ids=["narrow", "wide", "very wide"])
def test_a_text_is_laid_out_for_the_terminal(columns, expected, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert fitted(TEXT) == expected


@pytest.mark.parametrize("columns", [10, 14])
def test_where_there_is_no_room_for_a_box_there_is_none(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert fitted("a title:\n  unbreakable  b") == "a title:\n  unbreakable\n      b"


def test_a_terminal_without_corners_has_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert fitted("options:\n  -a B  what\nand") == " options\n ------------\n  -a B\n      what\n\nand"


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


def pieces(shown: str) -> list[str]:
    """What no end of a line may part: words, and of a list without spaces its entries."""
    return re.findall(r"[^\s,]+,?", re.sub(r"[│╭╮╰╯─]|-{5,}", " ", shown))  # without the boxes


@pytest.mark.parametrize("args", PAGES, ids=lambda args: " ".join(["nofm", *args]))
def test_help_fits_on_the_terminal(args, monkeypatch, capsys):
    shown = {}
    for columns in (60, 80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main([*args, "--help"]) == 0
        shown[columns] = capsys.readouterr().out
        assert [line for line in shown[columns].splitlines() if len(line) > columns] == []
        assert pieces(shown[columns]) == pieces(shown[60]), "nothing is lost, and no word parted"
        assert os.environ["COLUMNS"] == str(columns), "as it was before"
    assert shown[200] == shown[120], "longer lines are hard to read"
    words = " ".join(shown[120].splitlines())
    assert "None" not in words, "what is not set needs no default"
    assert "(default: )" not in re.sub(r"[│\s]+", " ", words)


def on_a_terminal(command: list[str], columns: int, env: dict[str, str], *, as_it_is: bool = False) -> str:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    process = subprocess.Popen(command, stdout=theirs, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other side is closed
        while more := os.read(ours, 65536):
            shown += more
    os.close(ours)
    assert process.wait() == 0
    text = shown.decode().replace("\r\n", "\n")
    return text if as_it_is else re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.parametrize("args", PAGES[1:], ids=lambda args: " ".join(["nofm", *args]))
def test_all_commands_have_their_options_in_boxes(args, monkeypatch):
    """Whether tyro draws them or not: the same titles, of one width, the borders unbroken, one below the other."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # pytest's own calls it UTF-8, which tyro does not know
    monkeypatch.setattr(sys, "stdout", shown)
    assert main([*args, "--help"]) == 0
    shown.flush()
    lines = shown.buffer.getvalue().decode().splitlines()
    boxes = [line for line in lines if line[:1] in "╭│╰" and line]
    assert len({len(line) for line in boxes}) == 1
    assert all(line[-1] == {"╭": "╮", "│": "│", "╰": "╯"}[line[0]] for line in boxes)
    titles = [line.strip("╭─╮ ") for line in boxes if line.startswith("╭")]
    first = ["options"] if len(args) == 2 else ["positional arguments", "options"]  # a recipe's own page has its options only
    assert titles[: len(first)] == first
    assert any(re.match(r"│ -h, --help +(show|│)", line) for line in boxes)
    outside = [line for line in lines if line not in boxes]
    assert not [line for line in outside if re.match(r"\s+-", line)], "no option stands elsewhere"


@pytest.mark.parametrize(("columns", "width"), [(None, 80), (100, 100), (200, 120)], ids=["no terminal", "100", "200"])
@pytest.mark.parametrize(("page", "least"), [("train digits", 100), ("study", 35)])
def test_boxes_are_as_wide_as_a_real_terminal(page, least, columns, width):
    command = [sys.executable, "-m", "nofm", *page.split(), "--help"]
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"} | {"TERM": "xterm-256color"}
    shown = subprocess.check_output(command, env=env, text=True) if columns is None else on_a_terminal(command, columns, env)
    boxes = [line for line in shown.splitlines() if line.startswith(("╭", "│", "╰"))]
    assert {len(line) for line in boxes} == {width}
    assert len(boxes) > least
    assert max(map(len, shown.splitlines())) == width


def test_a_terminal_shows_boxes_of_both_kinds_in_the_same_style():
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    for page in ("study", "check"):
        command = [sys.executable, "-m", "nofm", page, "--help"]
        plain, coloured = (on_a_terminal(command, 80, env | {"TERM": term}, as_it_is=True) for term in ("dumb", "xterm-256color"))
        assert "\x1b" not in plain
        assert coloured.startswith("\x1b[1musage:\x1b[0m")
        assert "\x1b[37;2m╭" in coloured
        assert re.search(r"\x1b\[1m(COUNT|N:M) *\x1b\[0m", coloured)
        assert re.search(r"\x1b\[37;2m│\x1b\[0m (\x1b\[m)?-h,", coloured)


def test_a_usage_that_is_too_long_goes_on_below(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "50")
    assert main(["cost", "--help"]) == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "usage: nofm cost [-h] MODEL [--pattern N:M]",
        "                 [--preset {default,paper,asp,all}]",
        "                 [--input C H W]",
        "",
    ]
