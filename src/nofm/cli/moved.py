"""How far the masks of a run have moved between two steps at which it has saved them, layer by layer: what `nofm analyse` prints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from ..engine.config import ConfigError
from .folders import started_with

__all__ = ["moved"]


def moved(run: Path, steps: Sequence[int]) -> str:
    """The table for two steps, or for the first and the last that were saved where none are named."""
    files = {int(m[1]): p for p in sorted((run / "masks").glob("*.safetensors")) if (m := re.fullmatch(r"step-(\d+)\.safetensors", p.name))}
    if not files:
        raise ConfigError(f"{run}: no masks are saved there yet")
    saved = ", ".join(map(str, sorted(files)))
    if len(steps) not in (0, 2):
        raise ConfigError(f"--steps {' '.join(map(str, steps))}: must be two steps; masks are saved of {saved}")
    first, last = steps or (min(files), max(files))
    for step in (first, last):
        if step not in files:
            raise ConfigError(f"--steps {step}: no masks of that step; there are {saved}")
    rows = [("layer", "weights changed", "of its weights"), *_rows(files[first], files[last])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{layer:{widths[0]}}  {changed:>{widths[1]}}  {share:>{widths[2]}}" for layer, changed, share in rows]
    head = f"SAD between step {first} and step {last}: weights that changed between kept and pruned"
    return "\n".join([head, *lines, _beside_the_report(run, first, last), *_of_what(run)])


def _rows(before: Path, after: Path) -> list[tuple[str, str, str]]:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    from ..masks import differing

    try:
        old, new = load_file(before), load_file(after)
        with safe_open(after, framework="pt") as file:
            shapes = json.loads(file.metadata()["shapes"])
    except SafetensorError as error:
        raise ConfigError(f"{after.parent}: not readable ({error})") from None
    sizes = {layer: math.prod(shape) for layer, shape in shapes.items()}
    changed = {layer: int(differing(old[layer], bits)) for layer, bits in new.items()}
    rows = [(layer, count, sizes[layer]) for layer, count in changed.items()]
    rows.append(("all", sum(changed.values()), sum(sizes[layer] for layer in changed)))
    return [(layer, f"{count:,}", f"{count / size:.3%}") for layer, count, size in rows]


def _beside_the_report(run: Path, first: int, last: int) -> str:
    """Why the report has a larger number for the same run, and which, where the run has told it."""
    from ..report import curves
    from ..report.errors import ReportError
    from ..report.read import load

    try:
        added = {0: 0.0, **curves.sad(load(run))}
        there = f": {abs(added[last] - added[first]):,.0f}" if first in added and last in added else ""
    except ReportError:
        there = ""
    return f"What changed and changed back counts 0; nofm report adds up all changes{there}"


def _of_what(run: Path) -> list[str]:
    """A dense network has no masks."""
    _, config = started_with(run)
    return ["This run is dense: the masks are those that pruning would give."] if config.sparsity.method.kind == "dense" else []
