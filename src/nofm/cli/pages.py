"""Help that commands write themselves, laid out for the terminal that shows it. Needs no torch.

How it is written: lines at the left edge are paragraphs; a line behind two spaces is an entry of a list, a name and behind two spaces or
more its text; a line farther in goes on with the one above. So a help text reads in the source as it does on a terminal.
"""

from __future__ import annotations

import re
import shutil
import textwrap

__all__ = ["fitted"]

_WIDEST = 120  # longer lines are hard to read, and where there is no terminal this is the width
_LEAST = 30  # room beside a name; where there is less, its text goes below it


def fitted(text: str, indent: int = 0) -> str:
    """`text` in lines that a terminal has room for. `indent`: of all lines of a paragraph but its first; what is given to tyro needs one,
    or the lines are joined again."""
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    return "\n".join(line for block in _blocks(text) for line in _wrapped(block, width, indent))


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
