"""Help, laid out for the terminal that shows it: what commands write themselves, and what tyro writes for them. Needs no torch.

How the first is written: lines at the left edge are paragraphs; a line behind two spaces is an entry of a list, a name and behind two
spaces or more its text; a line farther in goes on with the one above. So a help text reads in the source as it does on a terminal.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

__all__ = ["fitted", "fitting"]

_WIDEST = 120  # longer lines are hard to read
_USUAL = 80  # where there is no terminal
_LEAST = 30  # room beside a name; where there is less, its text goes below it


def fitted(text: str, indent: int = 0) -> str:
    """`text` in lines that a terminal has room for. `indent`: of all lines of a paragraph but its first; what is given to tyro needs one,
    or the lines are joined again."""
    width = _width()
    return "\n".join(line for block in _blocks(text) for line in _wrapped(block, width, indent))


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """While inside, the help that tyro prints is as wide as that of `fitted`. Left to itself, tyro fills a wide terminal with boxes side by
    side, and leaves it to a narrow one to break its first line, which says how to call the command, wherever it ends."""
    held, columns, width = _Held(sys.stdout), os.environ.get("COLUMNS"), _width()
    os.environ["COLUMNS"] = str(width)
    try:
        with contextlib.redirect_stdout(held):
            yield
    finally:
        del os.environ["COLUMNS"]
        os.environ |= {} if columns is None else {"COLUMNS": columns}
        usage, *rest = held.getvalue().split("\n")
        words = re.sub(r"\x1b\[[\d;]*m", "", usage)  # on a terminal the first of them is bold
        lines = [usage] if len(words) <= width else _wrapped(words, width, 0)
        sys.stdout.write("\n".join([*lines, *rest]))


class _Held(io.StringIO):
    """Holds back what is meant for `shown`, and looks like it to who asks for colours and for the letters that it has."""

    def __init__(self, shown: TextIO) -> None:
        super().__init__()
        self._shown = shown

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._shown.encoding

    def isatty(self) -> bool:
        return self._shown.isatty()


def _width() -> int:
    return min(shutil.get_terminal_size((_USUAL, 24)).columns, _WIDEST)


def _blocks(text: str) -> list[str]:
    """Paragraphs, entries and empty lines."""
    blocks = [""]
    for line in text.splitlines():
        goes_on = line.startswith("   ") or not (line.startswith("  ") or blocks[-1].startswith("  "))
        if line.strip() and blocks[-1] and goes_on:
            blocks[-1] += f" {line.strip()}"
        else:
            blocks.append(line.rstrip())
    return blocks[1:]


def _wrapped(block: str, width: int, indent: int) -> list[str]:
    if not block:
        return [""]
    entry, usage = re.match(r"  \S.*?  +", block), re.match(r"usage: \S+ \S+ ", block)
    begun = entry or usage
    hang = begun.end() if begun is not None else 6 if block.startswith("  ") else indent
    lines = []
    if entry is not None and width - hang < _LEAST:
        lines, hang = [entry[0].rstrip()], 6
        block = " " * hang + block[entry.end() :]
    whole = re.sub(r"\[[^][]*\]", lambda found: found[0].replace(" ", "\0"), block)  # an option and its value stay together
    more = textwrap.wrap(whole, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in [*lines, *more]]
