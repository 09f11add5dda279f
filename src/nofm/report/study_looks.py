"""How methods look in the pictures of all studies: a colour and a marker for each, from one table.

A reader who has learned in one picture that SR-STE is blue reads the next one with that. So a look hangs on the method alone, and not on
which rows a study has or in what order. The colours lie at least 30 apart in CIE L*a*b*, and 17 as people see them who do not tell red
from green; fifteen of them is about as many as that allows, and no two methods share a marker, for eyes and printers that need it.

Rows of one method that stand in one picture keep its colour and marker. They differ in the kind of line and in how markers are filled, and
where there are more than four of them in shade.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["LEVEL", "LOOKS", "OTHER", "Look", "key_of", "look_of", "looks_of"]


@dataclass(frozen=True, slots=True)
class Look:
    """What matplotlib calls color, marker, linestyle and fillstyle."""

    colour: str
    marker: str
    line: str = "-"
    fill: str = "full"


LOOKS: dict[str, Look] = {  # by the names that `nofm.METHODS` has
    "dense": Look("#222222", "8"),
    "srste": Look("#1f5fd0", "s"),
    "ste": Look("#e8890c", "^"),
    "asp": Look("#2d963c", "D"),
    "ste_unstructured": Look("#ff9687", "v"),
    "str": Look("#ff1e87", "P"),
    "gmp": Look("#783c00", "X"),
    "rigl": Look("#5aa5f0", ">"),
    "set": Look("#a53ca5", "<"),
    "snfs": Look("#f096c3", "p"),
    "dsr": Look("#e1b45a", "d"),
    "deepr": Look("#3c2d5a", "h"),
    "snip": Look("#5a1eff", "o"),
    "lottery": Look("#695a3c", "*"),
    "dnw": Look("#1e2dc3", "H"),
}
OTHER = "#8a8f98"  # of methods that are not in the table
LEVEL = Look(LOOKS["dense"].colour, "", ":")  # of dense, where it is a line across and not a row
_LINES = ("-", "--", ":", "-.")
_FILLS = ("full", "none", "left", "right")
_SHADES = (0.0, 0.45, -0.45)  # the way to white, or to black


def look_of(method: str) -> Look:
    """Of a method, its own everywhere; of one that the table does not know, grey and a marker that follows from its name."""
    if method in LOOKS:
        return LOOKS[method]
    markers = [look.marker for look in LOOKS.values()]
    return Look(OTHER, markers[zlib.crc32(method.encode()) % len(markers)])  # `hash` differs from run to run


def looks_of(methods: Mapping[str, str]) -> dict[str, Look]:
    """By row, as `methods` is, a look of its own: that of its method for the first, and for the others one that tells them from it."""
    met: Counter[str] = Counter()  # by colour: lines have no marker
    looks: dict[str, Look] = {}
    for row, method in methods.items():
        look = look_of(method)
        shade, again = divmod(met[look.colour], len(_LINES))
        looks[row] = replace(look, colour=_shaded(look.colour, _SHADES[shade % len(_SHADES)]), line=_LINES[again], fill=_FILLS[again])
        met[look.colour] += 1
    return looks


def key_of(look: Look, name: str) -> Any:
    """The entry of a legend for it."""
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"color": look.colour, "marker": look.marker, "linestyle": look.line, "fillstyle": look.fill}
    return Line2D([], [], label=name, markersize=6, **style)


def _shaded(colour: str, share: float) -> str:
    if not share:
        return colour
    end = 255 if share > 0 else 0
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + abs(share) * (end - part)):02x}" for part in parts)
