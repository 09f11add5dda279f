"""Numbers -> SVG that lives inside a page: no fixed colours, no fonts of its own, nothing to load.

matplotlib draws with placeholder colours, which are then replaced by CSS variables, so that one drawing serves light and dark.
Text stays text, in the page's font. Titles and legends are HTML around the drawing (they wrap on a phone, SVG text does not);
axis labels with units are in it, and `<title>` and `<desc>` say the rest to a screen reader.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .compare import Band, stat, stretches, thin_band
from .kernels import SHOWN, LayerShapes

__all__ = [
    "DEPTHS",
    "PROGRESS",
    "SERIES",
    "Key",
    "Line",
    "Mark",
    "Picture",
    "curves",
    "depth_colour",
    "kernel_picture",
    "log_ticks",
    "plain",
    "series_colour",
    "strip",
]

SERIES, DEPTHS = 8, 10  # how many --s0.. and --d0.. colours the style sheet has
PROGRESS = "progress (optimizer steps)"
_WIDTH, _POINTS = 400, 300  # pixels of a drawing at its natural size; points drawn of a curve
_LETTER = 7.6  # pixels of a figure of a label where the page's type is largest
_TEXT, _MUTED, _GRID, _CARD = "#010100", "#010101", "#010102", "#010103"
_VARIABLES = {_TEXT: "--text", _MUTED: "--muted", _GRID: "--grid", _CARD: "--card"}
# Lines differ in their dashes too, for eyes and printers that do not tell the colours apart.
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.5, 1.2, 1.5)))


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve with its spread. `colour` is the name of a CSS variable, `dash` an index into the dash styles."""

    name: str
    band: Band
    colour: str
    dash: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A step at which something changes: a thin line from top to bottom. `colour` is the name of a CSS variable."""

    name: str
    step: int
    colour: str


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend: a CSS variable, how it is drawn (a class of the style sheet) and what it stands for."""

    colour: str
    drawn: str
    name: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing with all that a reader needs beside it."""

    title: str
    caption: str
    legend: tuple[Key, ...]
    svg: str


def series_colour(index: int) -> str:
    """The colour of group `index`."""
    return f"s{index % SERIES}"


def depth_colour(index: int, count: int) -> str:
    """The colour of layer `index` of `count`, along the ramp from first to last."""
    return f"d{round(index * (DEPTHS - 1) / max(1, count - 1))}"


def curves(
    title: str,
    y: str,
    lines: Sequence[Line],
    caption: str = "",
    *,
    scale: float = 1.0,
    log: bool = False,
    limits: tuple[float, float] | None = None,
    most: float = math.inf,
    ends_named: bool = False,
    marks: Sequence[Mark] = (),
) -> Picture:
    """Curves over the steps of training, mean and spread, and those `marks` of steps that the curves reach. `y` names the vertical axis
    and its unit; `limits`, and `most`, which no value can be above (a band may reach over 100 %), are in that unit.

    With `ends_named` the legend names the first line and the last only: for lines that are in order, as layers are by depth.
    """
    with _drawing(title, 250) as (figure, svg):
        axes = figure.add_axes((0.118, 0.175, 0.845, 0.71))
        end = max((line.band.steps[-1] for line in lines), default=1)
        marks = [mark for mark in marks if mark.step <= end]
        for mark in marks:
            axes.axvline(mark.step, color=_placeholder(mark.colour), linestyle=_DASHES[2], linewidth=1.2)
        for line in lines:
            for part in stretches(thin_band(line.band, _POINTS), positive=log):
                _draw(axes, line, part, scale, log, most)
        if log:
            axes.set_yscale("log")
        if limits is not None:
            axes.set_ylim(limits)
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, min(top, most + 0.03 * (most - bottom)))
        axes.set_xlim(0, end * 1.02)  # from the start to the end, also where nothing is drawn there
        _style(axes, PROGRESS, y)
        _make_room_for_labels(axes)
    keys = tuple(Key(line.colour, f"line{line.dash}", line.name) for line in lines)
    shown = (keys[0], keys[-1]) if ends_named else keys
    return Picture(title, caption, (*shown, *(Key(mark.colour, "tick", mark.name) for mark in marks)), svg[0])


def _draw(axes: Any, line: Line, part: Band, scale: float, log: bool, most: float) -> None:
    steps, middle, colour = part.steps, [scale * s.mean for s in part.stats], _placeholder(line.colour)
    spread = [scale * (s.spread or 0.0) for s in part.stats]
    if any(spread):
        low, high = ([min(most, m + sign * s) for m, s in zip(middle, spread, strict=True)] for sign in (-1, 1))
        shown = [bottom > 0 or not log for bottom in low]  # a logarithmic axis has no place for zero
        axes.fill_between(steps, low, high, where=shown, color=colour, alpha=0.16, linewidth=0)
    single = len(steps) == 1  # one point makes no line
    axes.plot(steps, middle, color=colour, linestyle=_DASHES[line.dash], linewidth=1.8, marker="o" if single else None, markersize=4)


def strip(title: str, x: str, rows: Sequence[tuple[str, str, Sequence[float]]]) -> Picture:
    """One row a group (name, colour, values): a dot for each run, a tick at the mean, a bar of one spread to each side."""
    with _drawing(title, max(250, 56 + 46 * len(rows))) as (figure, svg):
        height = figure.get_figheight() * 72
        axes = figure.add_axes((0.02, 44 / height, 0.96, 1 - 46 / height))
        for index, (name, colour, values) in enumerate(rows):
            found, paint = stat(values), _placeholder(colour)
            axes.annotate(
                name, (0, index), (2, 16), xycoords=("axes fraction", "data"), textcoords="offset points", color=_TEXT, va="center"
            )
            if found is None or not math.isfinite(found.mean):
                continue
            if found.spread is not None:
                ends = [found.mean - found.spread, found.mean + found.spread]
                axes.plot(ends, [index, index], color=paint, linewidth=10, alpha=0.25, solid_capstyle="butt")
            axes.plot([found.mean] * 2, [index - 0.2, index + 0.2], color=paint, linewidth=2.4, solid_capstyle="butt")
            axes.plot(values, [index] * len(values), "o", color=paint, markersize=5.5, markeredgecolor=_CARD)
        axes.set_ylim(len(rows) - 0.45, -0.75)
        axes.margins(x=0.08)
        _style(axes, x, "", across=False)
    marks = (Key("muted", "dot", "a run"), Key("muted", "tick", "mean"), Key("muted", "bar", "one sample standard deviation to each side"))
    return Picture(title, "", marks, svg[0])


def kernel_picture(title: str, layers: Sequence[LayerShapes], colour: str, caption: str) -> Picture:
    """The most frequent kernel shapes of each layer, one row a layer: kept positions filled, under each its share of all kernels."""
    row = 132
    with _drawing(title, row * len(layers) + 4) as (figure, svg):
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, _WIDTH), ylim=(row * len(layers) + 4, 0))
        axes.axis("off")
        for index, layer in enumerate(layers):
            top = row * index
            axes.text(2, top + 12, layer.layer, color=_TEXT, fontweight="bold", va="center")
            about = f"{layer.distinct:,} shapes in {layer.kernels:,} kernels" + (f", {layer.pattern}" if layer.pattern else "")
            axes.text(2, top + 30, about, color=_MUTED, va="center")
            for place, (kept, count, (i, o)) in enumerate(layer.top):
                _kernel(axes, _WIDTH * (place + 0.5) / SHOWN, top + 45, kept, _placeholder(colour))
                share = f"{100 * count / layer.kernels:.1f} %" if count < layer.kernels else "100 %"
                axes.text(_WIDTH * (place + 0.5) / SHOWN, top + 101, share, color=_TEXT, ha="center", va="center")
                axes.text(_WIDTH * (place + 0.5) / SHOWN, top + 117, f"({i}, {o})", color=_MUTED, ha="center", va="center")
    return Picture(title, caption, (Key(colour, "square", "kept"), Key("grid", "square", "pruned")), svg[0])


def _kernel(axes: Any, x: float, top: float, kept: Sequence[Sequence[bool]], colour: str) -> None:
    from matplotlib.patches import Rectangle

    cell = 45 / max(len(kept), len(kept[0]))
    left = x - cell * len(kept[0]) / 2
    for r, line in enumerate(kept):
        for c, full in enumerate(line):
            paint = colour if full else _GRID
            axes.add_patch(Rectangle((left + c * cell + 0.75, top + r * cell + 0.75), cell - 1.5, cell - 1.5, color=paint, linewidth=0))


# ---- from matplotlib to a drawing for a page ----


def _placeholder(colour: str) -> str:
    """A colour that stands for a CSS variable: s3 -> #020003, d3 -> #030003."""
    if colour == "muted":
        return _MUTED
    return colour if colour.startswith("#") else f"#{ {'s': '02', 'd': '03'}[colour[0]] }00{int(colour[1:]):02x}"


def _style(axes: Any, x: str, y: str, across: bool = True) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    axes.grid(axis="y" if across else "x", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=_MUTED, pad=5, which="both")
    axes.set_xlabel(x, color=_MUTED)
    if not across:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_yticks([])
        return
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.annotate(y, (0, 1), (0, 15), xycoords=("figure fraction", "axes fraction"), textcoords="offset points", color=_MUTED, va="center")
    if axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(plain))
        return
    log_ticks(axes)


def log_ticks(axes: Any) -> None:
    """On a logarithmic y axis, a few plain numbers; what is drawn must be there already."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    few = MaxNLocator(4) if high / low < 4 else LogLocator(subs=(1, 2, 5) if high / low < 30 else (1,), numticks=8)
    axes.yaxis.set_major_locator(few)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(plain))


def _make_room_for_labels(axes: Any) -> None:
    """Move the left edge to the right where a label of the y axis is too long for the usual margin."""
    low, high = axes.get_ylim()
    ticks = [tick for tick in axes.yaxis.get_majorticklocs() if low <= tick <= high]
    letters = max(map(len, axes.yaxis.get_major_formatter().format_ticks(ticks)), default=0)
    left, bottom, width, height = axes.get_position().bounds
    needed = max(left, (6 + _LETTER * letters) / _WIDTH)
    axes.set_position((needed, bottom, left + width - needed, height))


def plain(value: float, _: int = 0) -> str:
    """A tick label without powers: 8,000, 25k, 0.02, and 1e-4 only where nothing else would be read; no other number than the tick's."""
    value = float(f"{value:.6g}")  # 0.30000000000000004
    for limit, unit, letter in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / unit:g}{letter}"
    return f"{value:,g}" if value == 0 or abs(value) >= 1e-3 else f"{value:g}".replace("e-0", "e-")


@contextmanager
def _drawing(title: str, height: int) -> Iterator[tuple[Any, list[str]]]:
    """A figure to draw into; at the end of the block the list holds its SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": title,  # ids are unique in the page, and the same every time
        "text.parse_math": False,  # a layer may be called $x$
        "font.size": 11,
        "axes.labelsize": 11,
        "xtick.labelsize": 11,
        "ytick.labelsize": 11,
        "axes.unicode_minus": True,
        "path.simplify": True,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(_WIDTH / 72, height / 72))
        done: list[str] = []
        yield figure, done
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        done.append(_for_page(file.getvalue(), title))


def _for_page(svg: str, title: str) -> str:
    """Take out all that belongs to a file of its own, and put the page's colours and font in."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<g id=\"[^\"]*\"", "<g", svg)
    # The page sets family and size (larger type where a drawing is small); of the short form of older versions only bold is kept.
    svg = re.sub(r"font: ([^;\"]*)", lambda m: f"font-weight: {600 if re.match('bold|[67]00', m[1]) else 400}", svg)
    svg = re.sub(r"font-(size|family): [^;\"]*;? *", "", svg)
    svg = re.sub(r" transform=\"rotate\(-?0 [^\"]*\"", "", svg)
    svg = svg.replace("xlink:href", "href").replace('<style type="text/css">*{stroke-linejoin: round; stroke-linecap: butt}</style>', "")
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var({variable})")
    svg = re.sub(r"#0([23])00([0-9a-f]{2})", lambda m: f"var(--{'sd'[int(m[1]) - 2]}{int(m[2], 16)})", svg)
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None, "matplotlib writes a viewBox"
    body = svg[svg.index(">") + 1 :]
    return f'<svg viewBox="{box[1]}" role="img"><title>{html.escape(title)}</title>{re.sub(chr(10) + " *", "", body).strip()}'
