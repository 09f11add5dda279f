"""A study's run folders -> its table, its figure, and what became of the paper's claims. Files in, files out, no torch.

A claim is looked at by the difference of two means and its 95 % interval (Welch's t): "holds" where all of the interval is on the
claimed side, "fails" where all of it is on the other, "open" where it holds zero. Two rows are level where the interval lies within
half a point of zero on both sides.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .compare import Stat, stat
from .errors import ReportError
from .read import Run, load

__all__ = ["Interval", "Measured", "difference", "measured", "write_study"]

_LEVEL = 0.5  # percentage points within which two rows count as level
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One finished run in numbers. `sad` is the movement of masks over the whole run, in changes for each sparse weight."""

    label: str
    seed: int
    accuracy: float
    sad: float
    kept: float  # share of the weights of sparse layers that is kept
    params: int  # of the whole network, pruned ones left out
    epochs: float
    seconds: float | None
    commit: str | None
    torch: str
    hardware: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference of means and its 95 % interval."""

    mean: float
    low: float
    high: float


def measured(label: str, run: Run) -> Measured:
    """The numbers of a finished run."""
    final = run.of("end")[-1].data["metrics"]
    changes = [sum(event.data["changed"].values()) / event.data["weights"] for event in run.of("sad")]
    sparse = [layer for layer in run.layers if layer.pattern]
    weights = sum(layer.weights for layer in sparse)
    end = run.of("end")[-1].data
    kept = end.get("kept", sum(layer.kept for layer in sparse))
    cost = run.info["cost"] or {}
    dense = run.info["config"]["sparsity"]["method"]["kind"] == "dense"
    params = int(cost.get("params", 0)) - (0 if dense else weights - int(kept))
    epoch = run.of("train")[-1].data.get("epoch", math.nan)
    return Measured(
        label=label,
        seed=run.seed,
        accuracy=float(final["accuracy"]),
        sad=math.fsum(changes),
        kept=1.0 if dense else kept / weights,
        params=params,
        epochs=float(epoch),
        seconds=max(event.data["seconds"] for event in run.of("end")),  # a finished run that is resumed ends again at once
        commit=run.info["commit"],
        torch=str(run.info["versions"].get("torch")),
        hardware=str(run.info["hardware"].get("name")),
    )


def difference(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """mean(first) - mean(second) by Welch's t; None where one of them has a single value."""
    a, b = stat(first), stat(second)
    if a is None or b is None or a.spread is None or b.spread is None:
        return None
    va, vb = a.spread**2 / a.n, b.spread**2 / b.n
    mean = a.mean - b.mean
    if va + vb == 0:
        return Interval(mean, mean, mean)
    freedom = (va + vb) ** 2 / (va**2 / (a.n - 1) + vb**2 / (b.n - 1))
    half = _quantile(freedom) * math.sqrt(va + vb)
    return Interval(mean, mean - half, mean + half)


def _quantile(freedom: float) -> float:
    """Of the next lower whole number of degrees of freedom, which makes the interval wider rather than narrower."""
    return _T[int(freedom) - 1] if freedom < len(_T) + 1 else 1.96 + 2.5 / freedom


def verdict(claim: Mapping[str, Any], interval: Interval | None) -> str:
    """ "holds", "fails", "open", or "" where there are too few runs."""
    if interval is None:
        return ""
    if claim["level"]:
        return "holds" if interval.low >= -_LEVEL and interval.high <= _LEVEL else "fails" if interval.high < -_LEVEL else "open"
    low, high = (interval.low, interval.high) if claim["metric"] == "accuracy" else (-interval.high, -interval.low)
    return "holds" if low > 0 else "fails" if high < 0 else "open"


def write_study(out: Path) -> list[Path]:
    """Write runs.csv, table.csv, table.md, claims.csv and figure.png in `out`; returns what was written."""
    facts = _facts(out / "study.json")
    runs = {row["label"]: _runs(out / row["folder"]) for row in facts["rows"]}
    rows = {label: [measured(label, run) for run in found] for label, found in runs.items()}
    if not any(rows.values()):
        raise ReportError(out, "no run of this study is finished yet")
    files = [out / "runs.csv", out / "table.csv", out / "table.md", out / "claims.csv"]
    _csv(files[0], [_fields(run) for found in rows.values() for run in found])
    _csv(files[1], [_row(row, rows[row["label"]]) for row in facts["rows"] if rows[row["label"]]])
    claims = [_claim(claim, rows) for claim in facts["claims"]]
    _csv(files[3], claims)
    files[2].write_text(_markdown(facts, rows, claims))
    from .study_figure import draw

    draw(facts["title"], {label: found for label, found in runs.items() if found}, out / "figure.png")
    return [*files, out / "figure.png"]


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(path, f"cannot be read ({error}); `nofm study` writes it") from None
    return facts


def _runs(folder: Path) -> list[Run]:
    found = [load(run) for run in sorted(folder.glob("seed-*")) if (run / "events.jsonl").is_file() and (run / "run.json").is_file()]
    return sorted((run for run in found if run.status == "finished"), key=lambda run: run.seed)


def _fields(run: Measured) -> dict[str, Any]:
    return {name: getattr(run, name) for name in Measured.__dataclass_fields__}


def _row(row: Mapping[str, Any], found: Sequence[Measured]) -> dict[str, Any]:
    accuracy, sad = stat(run.accuracy for run in found), stat(run.sad for run in found)
    assert accuracy is not None
    assert sad is not None
    return {
        "row": row["label"],
        "n": accuracy.n,
        "accuracy": accuracy.mean,
        "accuracy_sd": accuracy.spread,
        "sad": sad.mean,
        "sad_sd": sad.spread,
        "kept": stat(run.kept for run in found).mean,  # type: ignore[union-attr]
        "params": stat(run.params for run in found).mean,  # type: ignore[union-attr]
        "epochs": found[0].epochs,
        "paper": row["paper"],
    }


def _claim(claim: Mapping[str, Any], rows: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    values = [[float(getattr(run, claim["metric"])) for run in rows[claim[side]]] for side in ("first", "second")]
    interval = difference(*values)
    numbers = {"difference": None, "low": None, "high": None} if interval is None else {
        "difference": interval.mean, "low": interval.low, "high": interval.high,
    }  # fmt: skip
    return {"claim": claim["text"], "metric": claim["metric"], **numbers, "verdict": verdict(claim, interval)}


def _csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        if rows:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _text(value: Stat | None, digits: int) -> str:
    if value is None:
        return ""
    spread = "" if value.spread is None else f" ± {value.spread:.{digits}f}"
    return f"{value.mean:.{digits}f}{spread}"


def _markdown(facts: Mapping[str, Any], rows: Mapping[str, Sequence[Measured]], claims: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"# {facts['title']}", "", "| | accuracy % | weights kept | SAD for each weight | epochs | seeds | paper (ImageNet) |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in facts["rows"]:
        found = rows[row["label"]]
        if found:
            accuracy, sad = stat(run.accuracy for run in found), stat(run.sad for run in found)
            kept = _text(stat(100 * run.kept for run in found[:1]), 1)
            cells = (row["label"], _text(accuracy, 2), f"{kept} %", _text(sad, 2), f"{found[0].epochs:g}", str(len(found)), row["paper"])
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| claim of the paper | difference | 95 % interval | here |", "|---|---|---|---|"]
    for claim in claims:
        if claim["difference"] is not None:
            span = f"{claim['low']:+.2f} to {claim['high']:+.2f}"
            unit = "" if claim["metric"] == "accuracy" else " SAD"
            lines.append(f"| {claim['claim']} | {claim['difference']:+.2f}{unit} | {span} | {claim['verdict']} |")
    one = next(found[0] for found in rows.values() if found)
    lines += ["", f"{one.hardware}, torch {one.torch}, commit {one.commit}. Mean ± sample standard deviation over seeds.", ""]
    return "\n".join([*lines, *(f"- {note}" for note in facts["notes"]), ""])
