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
from .kernels import SHOWN, crowded, last_masks, read_masks, shapes_of
from .read import Run
from .study import Facts, Rows, as_csv
from .study_drawing import SMALL, TEXT, TITLE, WIDTH, plain_axes, write_png
from .study_looks import looks_of

__all__ = ["KnownShapes", "Layer", "draw_shapes", "known_shapes", "layers_of", "shapes_csv"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One convolution of a run: how many kernels it has, how many shapes they have, how many kernels are empty, how many have a shape
    that the finer pattern could not give them beside their neighbours, and the fullest of these, or else of all."""

    layer: str
    pattern: str
    kernels: int
    shapes: int
    empty: int
    beyond: int
    fullest: tuple[tuple[str, int, int], ...]  # rows, as in "..#/+.#/...", where # is what the finer pattern had not kept; input, output


KnownShapes: TypeAlias = dict[tuple[str, int], list[Layer]]  # by configuration and seed
_FIELDS = ("config", "seed", "layer", "pattern", "kernels", "shapes", "empty", "beyond", "fullest")


def layers_of(run: Run, finer: str) -> list[Layer]:
    """What the last masks of a run tell; nothing of a run that has none any more."""
    import numpy as np

    path = last_masks(run)
    if path is None:
        return []
    n, m = map(int, finer.split(":"))
    found = []
    for name, pattern, bits_OIKK in read_masks(path):
        counts = shapes_of(name, pattern, bits_OIKK)
        crowded_OIKK = crowded(bits_OIKK, n, m) if bits_OIKK.shape[1] % m == 0 else np.zeros(bits_OIKK.shape, bool)
        beyond_OI = crowded_OIKK.any(axis=(2, 3))
        size_OI = bits_OIKK.sum(axis=(2, 3), dtype=int)
        places = np.argwhere(beyond_OI if beyond_OI.any() else size_OI >= 0)
        places = places[np.argsort(-size_OI[tuple(places.T)], kind="stable")][:SHOWN]
        fullest = tuple((_drawn(bits_OIKK[o, i], crowded_OIKK[o, i]), int(i), int(o)) for o, i in places)
        found.append(Layer(name, pattern, counts.kernels, counts.distinct, counts.empty, int(beyond_OI.sum()), fullest))
    return found


def _drawn(bits: Any, too_many: Any) -> str:
    return "/".join("".join(".+#"[kept + more] for kept, more in zip(*rows, strict=True)) for rows in zip(bits, too_many, strict=True))


def shapes_csv(known: KnownShapes) -> str:
    """The file's text, a line a layer."""
    lines = []
    for (config, seed), layers in known.items():
        for layer in layers:
            fullest = " ".join(":".join(map(str, kernel)) for kernel in layer.fullest)
            values = (config, seed, layer.layer, layer.pattern, layer.kernels, layer.shapes, layer.empty, layer.beyond, fullest)
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
            fullest = tuple((rows, int(i), int(o)) for rows, i, o in (kernel.split(":") for kernel in line["fullest"].split()))
            layer = Layer(line["layer"], line["pattern"], kernels, distinct, empty, over, fullest)
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
    """The picture as matplotlib has it: above, of the row and the layer with most kernels that `finer` could not have, the fullest of
    these; below, by layer, how many shapes there are and how many kernels are such."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure: Any = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    label = max(rows, key=lambda label: sum(layer.beyond for layer in rows[label]))
    picked = max(rows[label], key=lambda layer: layer.beyond)
    why = f"\nred: more than {finer} keeps of {finer.partition(':')[2]} neighbours" if picked.beyond else ""
    figure.suptitle(f"{title}\nabove: the fullest kernels of {label}, {picked.layer} (input, output channel){why}", fontsize=TITLE)
    above, below = figure.subfigures(2, 1, height_ratios=[1, 2.2])
    for axes, kernel in zip(above.subplots(1, SHOWN), (*picked.fullest, *[None] * SHOWN), strict=False):
        axes.axis("off")
        if kernel is not None:
            _draw_kernel(axes, *kernel)
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


_COLOURS = {".": "#e3e7ee", "+": "#1f5fd0", "#": "#c8372d"}


def _draw_kernel(axes: Any, rows: str, i: int, o: int) -> None:
    """One kernel, its kept positions dark."""
    from matplotlib.patches import Rectangle

    lines = rows.split("/")
    for y, line in enumerate(lines):
        for x, cell in enumerate(line):
            axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, color=_COLOURS[cell], linewidth=0))
    axes.set(xlim=(0, len(lines[0])), ylim=(len(lines), 0), aspect="equal")
    axes.set_title(f"({i}, {o})", fontsize=SMALL)
