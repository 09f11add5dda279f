"""Tables and paragraphs in lines that a terminal of 80 columns has room for. Needs no torch: what reports on files prints by it, too."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

__all__ = ["table", "table_in_parts", "table_that_fits", "wrapped"]

WIDTH = 80  # of a terminal
_JOINED = "\N{NO-BREAK SPACE}"
_HEAD = 14  # letters in a line of a head, where the numbers below it are no wider
_NAME = 36  # of a row, in one line of a table that has several parts: numbers need the room


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """The lines of a table whose columns have the width of their longest cell; numbers stand in those that go to the `right`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    places = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return ["  ".join(place(cell, width) for place, cell, width in zip(places, row, widths, strict=True)).rstrip() for row in rows]


def table_that_fits(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """The same in lines that a terminal has room for: where names, which come first, are too long, each has a line of its own, and the rest
    of its row stands below."""
    lines = table(rows, right)
    if max(map(len, lines)) <= WIDTH:
        return lines
    below = table([row[1:] for row in rows], [i - 1 for i in right])
    return [line for row, rest in zip(rows, below, strict=True) for line in (row[0], f"  {rest}")]


def table_in_parts(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of a name and numbers, whose head is broken into lines, where words are longer than the numbers below them; where it is too
    wide for a terminal, the columns that have no room follow below in a table of their own, with the names again."""
    lines = _stacked(head, rows)
    if max(map(len, lines)) <= WIDTH:
        return lines
    whole: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    names = [textwrap.wrap(row[0], _NAME, **whole) or [""] for row in rows]
    parts: list[list[int]] = []
    for column in range(1, len(head)):
        longer = [*parts[-1], column] if parts else [column]
        if len(longer) > 1 and max(map(len, _part(head, names, rows, longer))) > WIDTH:
            parts.append([column])
        else:
            parts[-1:] = [longer]
    return [line for number, part in enumerate(parts) for line in (*([""] * (number > 0)), *_part(head, names, rows, part))]


def _part(head: Sequence[str], names: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], columns: Sequence[int]) -> list[str]:
    """Of these columns; numbers stand beside the last line of a name."""
    shown = []
    for name, row in zip(names, rows, strict=True):
        shown += [[line, *("" for _ in columns)] for line in name[:-1]] + [[name[-1], *(row[column] for column in columns)]]
    return _stacked([head[0], *(head[column] for column in columns)], shown)


def _stacked(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table under the lines of its head, whose last words stand right above the numbers."""
    columns = [textwrap.wrap(words, max(_HEAD, *map(len, cells))) for words, *cells in zip(head, *rows, strict=True)]
    height = max(map(len, columns))
    lines = zip(*([""] * (height - len(column)) + column for column in columns), strict=True)
    heads = [[words.replace(_JOINED, " ") for words in line] for line in lines]
    return table([*heads, *rows], right=range(1, len(head)))


def wrapped(text: str, indent: str = "") -> list[str]:
    """The lines of a paragraph, `indent` before all but the first; names and options stay in one piece."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
