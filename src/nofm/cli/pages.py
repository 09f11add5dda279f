"""Help, laid out for the terminal that shows it: what commands write themselves, and what tyro writes for them. Needs no torch.

How the first is written: lines at the left edge are paragraphs; a line behind two spaces is an entry of a list, a name and behind two
spaces or more its text; a line farther in goes on with the one above. So a help text reads in the source as it does on a terminal.
A list right below a line that ends with a colon is drawn in a box with that line as its title, as tyro draws them: commands whose options
tyro does not read (`train` takes those of a recipe, `study` those of `train` besides its own) look like the others.
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
    width, parts = _width(), _parts(text)
    # Boxes are all as wide as the widest, which has its title or one of its entries between its borders.
    across = min(width, max((len(part) for head, entries in parts if entries for part in (f"{head}   ", *entries)), default=0) + 2)
    lines: list[str] = []
    for head, entries in parts:
        rows = [row for entry in entries for row in _rows(entry[2:], width - 4)]
        boxed = _box(head[:-1], rows, across) if rows else None
        lines += boxed or [line for block in (head, *entries) for line in _wrapped(block, width, indent)]
    return "\n".join(lines)


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


def _parts(text: str) -> list[tuple[str, list[str]]]:
    """Each block of `text`, and where it is the title of a list, the entries of that."""
    parts: list[tuple[str, list[str]]] = []
    for block in _blocks(text):
        if block.startswith("  ") and parts and re.match(r"\S.*:$", parts[-1][0]):
            parts[-1][1].append(block)
        else:
            parts.append((block, []))
    return parts


def _wrapped(block: str, width: int, indent: int) -> list[str]:
    if not block:
        return [""]
    if block.startswith("  "):
        return [f"  {name}{words}" for name, words in _rows(block[2:], width - 2)]
    usage = re.match(r"usage: \S+ \S+ ", block)
    first, *others = _lines(block, width, indent if usage is None else usage.end())
    return [first if usage is None else _shown("usage:", _BOLD) + first.removeprefix("usage:"), *others]


def _rows(entry: str, width: int) -> list[tuple[str, str]]:
    """The lines of an entry, each as what stands in the column of names and what beside it."""
    named = re.match(r"\S.*?  +", entry)
    if named is None:
        return [(line, "") for line in _lines(entry, width, 4)]
    words = entry[named.end() :]
    if width - named.end() < _LEAST:
        return [(named[0].rstrip(), ""), *((" " * 4, line) for line in _lines(words, width - 4, 0))]
    first, *others = _lines(words, width - named.end(), 0)
    return [(named[0], first), *((" " * named.end(), line) for line in others)]


def _lines(text: str, width: int, hang: int) -> list[str]:
    whole = re.sub(r"\[[^][]*\]", lambda found: found[0].replace(" ", "\0"), text)  # an option and its value stay together
    found = textwrap.wrap(whole, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in found]


# ---- boxes, as tyro's ----

_BORDER, _BESIDE, _BOLD = "37;2", "2", "1"  # in colours and weight, too


def _box(title: str, rows: list[tuple[str, str]], width: int) -> list[str] | None:
    """The rows of a list in a box; None where there is no room for one."""
    if max(len(title) + 2, *(len(name + words) for name, words in rows)) > width - 4:
        return None
    if sys.stdout.encoding != "utf-8":  # the corners may be none of its letters
        return [f" {title}", f" {'-' * (width - 2)}", *(f"  {name}{words}" for name, words in rows), ""]
    edge, lines = _shown("│", _BORDER), []
    for name, words in rows:
        shown = re.sub(r"\b[A-Z][A-Z:]*\b", lambda found: _shown(found[0], _BOLD), name) if name.startswith("-") else name
        lines.append(f"{edge} {shown}{_shown(words, _BESIDE)}{' ' * (width - 4 - len(name + words))} {edge}")
    top, bottom = f"╭─ {title} {'─' * (width - 5 - len(title))}╮", f"╰{'─' * (width - 2)}╯"
    return [_shown(top, _BORDER), *lines, _shown(bottom, _BORDER)]


def _shown(text: str, style: str) -> str:
    """`text` in this style, on a terminal that has styles."""
    is_plain = not sys.stdout.isatty() or os.environ.get("TERM") in (None, "dumb")
    return text if is_plain or not text else f"\x1b[{style}m{text}\x1b[0m"
