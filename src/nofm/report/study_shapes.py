"""The paper's appendix A.2 of a study that is about kernel shapes: shapes.csv, what its runs' last masks tell, and shapes.png.

Masks are large and lie in run folders, which do not last; a line of shapes.csv has what is counted of one layer, and the shapes that the
picture shows. Runs are known by configuration and seed, as in runs.csv.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .errors import ReportError
from .kernels import SHOWN, beyond, last_masks, read_masks, shapes_of
from .read import Run
from .study import Facts, Rows, as_csv
from .study_drawing import SMALL, TEXT, TITLE, WIDTH, plain_axes, write_png
from .study_looks import looks_of

__all__ = ["KnownShapes", "Layer", "draw_shapes", "known_shapes", "layers_of", "shapes_csv"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution of a run: how many kernels it has, how many shapes they have, how many kernels are empty, how many have a shape
    that the finer pattern could not give them beside their neighbours, and the most frequent shapes of these, or else of all."""

    layer: str
    pattern: str
    kernels: int
    shapes: int
    empty: int
    beyond: int
    top: tuple[tuple[str, int, int, int], ...]  # rows of kept positions, as in ".#./##./...", how many, input and output channel


KnownShapes: TypeAlias = dict[tuple[str, int], list[Layer]]  # by configuration and seed
_FIELDS = ("config", "seed", "layer", "pattern", "kernels", "shapes", "empty", "beyond", "top")


def layers_of(run: Run, finer: str) -> list[Layer]:
    """What the last masks of a run tell; nothing of a run that has none any more."""
    path = last_masks(run)
    if path is None:
        return []
    n, m = map(int, finer.split(":"))
    found = []
    for name, pattern, bits_OIKK in read_masks(path):
        crowded_OI = beyond(bits_OIKK, n, m) if bits_OIKK.shape[1] % m == 0 else bits_OIKK.any(axis=(2, 3)) & False
        every = shapes_of(name, pattern, bits_OIKK)
        shown = shapes_of(name, pattern, bits_OIKK, crowded_OI) if crowded_OI.any() else every
        top = tuple(("/".join("".join(".#"[bit] for bit in row) for row in kept), count, i, o) for kept, count, (i, o) in shown.top)
        found.append(Layer(name, pattern, every.kernels, every.distinct, every.empty, int(crowded_OI.sum()), top))
    return found


def shapes_csv(known: KnownShapes) -> str:
    """The file's text, a line a layer."""
    lines = []
    for (config, seed), layers in known.items():
        for layer in layers:
            top = " ".join(":".join(map(str, shape)) for shape in layer.top)
            values = (config, seed, layer.layer, layer.pattern, layer.kernels, layer.shapes, layer.empty, layer.beyond, top)
            lines.append(dict(zip(_FIELDS, values, strict=True)))
    return as_csv(lines)


def known_shapes(path: Path) -> KnownShapes:
    """What a shapes.csv of before tells; nothing where there is none."""
    found: KnownShapes = {}
    if not path.is_file():
        return found
    for number, line in enumerate(csv.DictReader(path.read_text().splitlines()), start=2):
        try:
            kernels, distinct, empty, over = (int(line[name]) for name in ("kernels", "shapes", "empty", "beyond"))
            parts = [shape.split(":") for shape in line["top"].split()]
            top = tuple((rows, int(count), int(i), int(o)) for rows, count, i, o in parts)
            layer = Layer(line["layer"], line["pattern"], kernels, distinct, empty, over, top)
            found.setdefault((line["config"], int(line["seed"])), []).append(layer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReportError(path, f"is not as `nofm study` writes it: {error}", number) from None
    return found


# ---- the picture ----


def draw_shapes(title: str, facts: Facts, rows: Rows, folder: Path, methods: Mapping[str, str]) -> bool:
    """Write shapes.png, of the first seed of each row that shapes.csv in the same folder knows; whether there is one."""
    known = known_shapes(folder / "shapes.csv")
    shown = {
        label: own for label, runs in rows.items() if (own := next((known[k] for r in runs if (k := (r.config, r.seed)) in known), None))
    }
    if not (facts.get("shapes_beyond") and shown):
        (folder / "shapes.png").unlink(missing_ok=True)  # of runs that told it
        return False
    write_png(figure_of(title, facts["shapes_beyond"], shown, methods), folder / "shapes.png")
    return True


def figure_of(title: str, finer: str, rows: Mapping[str, Sequence[Layer]], methods: Mapping[str, str]) -> Any:
    """The picture as matplotlib has it: above, of the row with most kernels that `finer` could not have, some of these; below, by layer,
    how many shapes there are and how many kernels are such."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure: Any = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    label = max(rows, key=lambda label: sum(layer.beyond for layer in rows[label]))
    picked = max(rows[label], key=lambda layer: (len(layer.top), layer.beyond))
    why = f", those that {finer} could not have beside their neighbours" if picked.beyond else ""
    figure.suptitle(f"{title}\nabove: the most frequent kernels of {label}, {picked.layer}{why}", fontsize=TITLE)
    above, below = figure.subfigures(2, 1, height_ratios=[1, 2.2])
    for axes, shape in zip(above.subplots(1, SHOWN), (*picked.top, *[None] * SHOWN), strict=False):
        axes.axis("off")
        if shape is not None:
            _draw_kernel(axes, *shape)
    looks = looks_of({label: methods.get(label, label) for label in rows})
    counted = (("different shapes", _distinct), (f"kernels that {finer} could not have (%)", _share))
    width = 0.8 / len(rows)
    for axes, (words, value) in zip(below.subplots(1, 2), counted, strict=True):
        for number, (name, layers) in enumerate(rows.items()):
            places = [place + (number - (len(rows) - 1) / 2) * width for place in range(1, len(layers) + 1)]
            fill = {"color": looks[name].colour, "alpha": 1.0 - 0.55 * number / len(rows)}
            axes.bar(places, [value(layer) for layer in layers], width, label=name, **fill)
        axes.set(xlabel="sparse convolution, in the order of the network", ylabel=words, ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        plain_axes(axes)
        axes.grid(visible=False, axis="x")
    below.legend(*below.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=TEXT, frameon=False)
    return figure


def _distinct(layer: Layer) -> float:
    return layer.shapes


def _share(layer: Layer) -> float:
    return 100 * layer.beyond / layer.kernels


def _draw_kernel(axes: Any, rows: str, count: int, i: int, o: int) -> None:
    """One shape, its kept positions dark, and under it how many kernels have it and where the first is: (input, output channel)."""
    from matplotlib.patches import Rectangle

    lines = rows.split("/")
    for y, line in enumerate(lines):
        for x, cell in enumerate(line):
            axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, color="#1f5fd0" if cell == "#" else "#e3e7ee", linewidth=0))
    axes.set(xlim=(0, len(lines[0])), ylim=(len(lines), 0), aspect="equal")
    axes.set_title(f"({i}, {o})\n{count} such", fontsize=SMALL)
