"""What `nofm evaluate` has left in a run's folder: evaluations/NAME.json, and samples in evaluations/NAME/."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ReportError

__all__ = ["Evaluated", "headlines", "named", "read_evaluations"]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation of a run. `headline` is the metric to report, of averaged weights (ema_...) where it was measured with them."""

    name: str
    step: int  # of the run, which may have gone on since
    headline: str
    metrics: Mapping[str, float]
    samples: Path

    @property
    def averaged(self) -> bool:
        return self.headline.startswith("ema_")


def read_evaluations(run: Path) -> tuple[Evaluated, ...]:
    """The evaluations of the run in this folder, by name; raises for a file that is none."""
    return tuple(_read(path) for path in sorted((run / "evaluations").glob("*.json")) if not path.name.startswith("."))


def _read(path: Path) -> Evaluated:
    again = "measure again with nofm evaluate --again, or remove it"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        step, headline, metrics = int(found["step"]), found["headline"], found["metrics"]
        numbers = {str(name): float(value) for name, value in metrics.items() if value is not None}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ReportError(path, f"no evaluation can be read from it ({type(error).__name__}: {error}); {again}") from None
    if headline not in numbers:
        raise ReportError(path, f"its headline {headline!r} is not among its metrics; {again}")
    return Evaluated(path.stem, step, headline, numbers, path.with_name(path.stem))


def named(evaluations: Iterable[Evaluated], name: str) -> Evaluated | None:
    """The one of this name."""
    return next((found for found in evaluations if found.name == name), None)


def headlines(runs: Iterable[Iterable[Evaluated]]) -> list[tuple[str, str]]:
    """The headline metrics of all evaluations of some runs: name and metric."""
    return sorted({(found.name, found.headline) for evaluations in runs for found in evaluations})
