"""A study's table.md as a terminal has room for it: the same words, with tables whose columns stand below each other. Needs no torch."""

from __future__ import annotations

import itertools

from ..columns import table_in_parts, wrapped

__all__ = ["laid_out"]


def laid_out(markdown: str) -> str:
    """The lines of a Markdown text with tables."""
    lines: list[str] = []
    for is_table, block in itertools.groupby(markdown.splitlines(), key=lambda line: line.startswith("|")):
        if is_table:
            head, _, *rows = (_cells(line) for line in block)
            lines += table_in_parts(head, rows)
        else:
            lines += [line for paragraph in block for line in wrapped(paragraph) or [""]]
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split("|")]
