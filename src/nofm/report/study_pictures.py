"""All pictures of a study, from its study.json, its runs and their curves; that is, from files that last longer than run folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .measures import MEASURES
from .study import Facts, Rows, method_of, read_facts, read_rows, watched_alone
from .study_curves import KnownCurves, known_curves

__all__ = ["draw_again", "draw_pictures"]


def draw_pictures(folder: Path, facts: Facts, rows: Rows, curves: KnownCurves) -> list[str]:
    """Write figure.png, where methods come at several sparsities kept.png, where rows are lambdas lambda.png, of claims about the first
    steps layers.png, and of a study about kernel shapes shapes.png; returns which."""
    from .study_figure import draw
    from .study_kept import draw_kept
    from .study_lambda import draw_lambda
    from .study_layers import draw_layers
    from .study_shapes import draw_shapes

    shown = {label: ([curves[key] for run in own if (key := (run.config, run.seed)) in curves], own) for label, own in rows.items() if own}
    where = facts.get("measured_on", "")
    title = ": ".join([facts["title"], *([facts["on"]] if facts.get("on") else [])])  # earlier versions did not write it down
    title += f", {where}" if where else ""
    measure, methods, patterns = MEASURES[facts["task"]], _methods(facts), _patterns(facts)
    alone = watched_alone([row for row in facts["rows"] if row["label"] in shown])
    draw(title, measure, shown, folder / "figure.png", alone, methods, patterns, where or "test")
    drawn = {
        "figure.png": True,
        "kept.png": draw_kept(title, measure, rows, folder / "kept.png", methods),
        "lambda.png": draw_lambda(title, measure, rows, folder / "lambda.png", patterns),
        "layers.png": draw_layers(title, facts, {label: own for label, (own, _) in shown.items()}, folder / "layers.png", methods),
        "shapes.png": draw_shapes(title, facts, rows, folder, methods),
    }
    return [name for name, is_there in drawn.items() if is_there]


def draw_again(folder: Path) -> list[Path]:
    """The pictures of a study's folder anew, from what stands in it and beside it; none of a study without runs or curves."""
    facts = read_facts(folder / "study.json")
    rows, curves = read_rows(folder / "runs.csv", facts), known_curves(folder.parent)
    known = {key: curves[key] for own in rows.values() for run in own if (key := (run.config, run.seed)) in curves}
    return [folder / name for name in draw_pictures(folder, facts, rows, known)] if known else []


def _methods(facts: Facts) -> Mapping[str, str]:
    return {row["label"]: method_of(row["runs"]) for row in facts["rows"]}


def _patterns(facts: Facts) -> Mapping[str, str]:
    """Of the rows' masks; those of dense rows are only watched by one."""
    return {row["label"]: row.get("pattern") or row.get("watched") or "" for row in facts["rows"]}
