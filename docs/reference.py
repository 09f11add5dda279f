"""Writes docs/reference.md from what the code says of itself: every public name, how it is called, and how its docstring begins.

python docs/reference.py            writes the page
python docs/reference.py --check    1 if the page is not what this would write
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import nofm

PAGE = Path(__file__).with_suffix(".md")
GROUPS = {
    "Make a model sparse": ("sparsify_", "summary", "allocate_patterns", "register_layer", "fold_", "densify_", "follow_"),
    "Train it": ("attach", "SRSTE", "STE", "ASP", "Dense", "Handle", "Method"),
    "Unstructured rivals": (
        "GMP", "STR", "RigL", "SET", "SNFS", "DSR", "DeepRewiring", "UnstructuredSTE", "DNW", "SNIP", "LotteryTicket",
    ),
    "Measure": ("SAD", "sad_of_forwards", "cost", "verify", "check_ranks", "mask", "sites"),
    "Ship": ("save_packed", "load_packed", "pack_", "unpack_"),
    "What these return": ("Pattern", "Summary", "Divergence", "Cost", "Verification", "PackedFile", "Packing"),
    "Errors": (
        "NofmError", "PatternError", "LayerError", "OptimizerError", "NonFiniteWeightError", "MaskDivergenceError", "PackedError",
    ),
}  # fmt: skip
ELSEWHERE = {"METHODS", "__version__"}  # a dictionary of all methods by name, and a text
_HEAD = """# Reference

Every public name, as its docstring begins. `help(nofm.NAME)` has the rest: options, what is refused, examples.
How to use them is in the [guide](guide.md).
"""
_MADE = ("What these return", "Errors", "Handle", "Method")  # which users do not make themselves: how is of no use to them


def page() -> str:
    """The page's text."""
    parts = [_HEAD]
    for title, names in GROUPS.items():
        rows = [f"| {_call(name, title)} | {_first_paragraph(getattr(nofm, name))} |" for name in names]
        parts.append("\n".join([f"## {title}\n", "| name | what it is |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _call(name: str, title: str) -> str:
    if title in _MADE or name in _MADE:
        return f"`{name}`"
    parameters = inspect.signature(getattr(nofm, name)).parameters.values()
    return f"`{name}({', '.join(_parameters(list(parameters)))})`"


def _parameters(all_of_them: list[inspect.Parameter]) -> list[str]:
    texts: list[str] = []
    for each in all_of_them:
        if each.kind is each.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        prefix = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        texts.append(prefix + each.name + ("" if each.default is each.empty else f"={each.default!r}"))
    return texts


def _first_paragraph(of: Any) -> str:
    text = " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())
    return re.sub(r"\*(?=\w+:)|(?<!\\)\|", lambda found: "\\" + found.group(), text)


def main() -> int:
    """Write the page, or compare it."""
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
