"""How numbers are written on the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .compare import Stat

__all__ = ["Unit", "big", "duration", "plus_minus", "rate", "unit_of", "unit_of_evaluation"]

_SHARES = ("accuracy", "top", "precision", "recall", "miou", "iou", "f1", "outliers", "fl_all")
_UNITS = {"epe": "px"}
_SPELLED = {"bleu": "BLEU", "epe": "EPE", "map": "mAP"}
NONE = "\N{EM DASH}"


@dataclass(frozen=True, slots=True)
class Unit:
    """A metric on the page: its words and its unit ("" for none)."""

    words: str
    unit: str

    @property
    def title(self) -> str:
        """The words at the head of a picture."""
        return self.words if any(map(str.isupper, self.words.partition(" ")[0])) else self.words.capitalize()

    @property
    def axis(self) -> str:
        return f"{self.words} ({self.unit or 'unitless'})"

    def number(self, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return NONE
        return f"{value:.2f}" if self.unit == "%" or "BLEU" in self.words else f"{value:.4g}"

    def stat(self, found: Stat | None) -> str:
        """mean ± spread, without the unit."""
        return NONE if found is None else plus_minus(found, self.number)


def unit_of(metric: str) -> Unit:
    """Metrics that are shares are in percent (the tasks of nofm measure them so); others have no unit."""
    name = metric.lower()
    words = " ".join(_SPELLED.get(word, word) for word in metric.split("_"))
    return Unit(words, "%" if name.startswith(_SHARES) else _UNITS.get(name, ""))


def unit_of_evaluation(name: str, metric: str) -> Unit:
    """As `unit_of`, of a metric of the evaluation `name`, with whose weights it was measured."""
    plain = unit_of(metric.removeprefix("ema_"))
    return Unit(f"{name}: {plain.words}{', moving average' if metric.startswith('ema_') else ''}", plain.unit)


def plus_minus(found: Stat, alone: Callable[[float], str]) -> str:
    """The spread in two figures and the mean to the same place: 98.70 ± 0.16, 0.0524 ± 0.0071; without a spread as `alone` does."""
    if found.spread is None or not math.isfinite(found.mean):
        return alone(found.mean)
    if found.spread <= 1e-9 * abs(found.mean):  # equal values, but for rounding
        return f"{alone(found.mean)} ± 0"
    places = min(9, max(0, 1 - math.floor(math.log10(found.spread))))
    return f"{found.mean:,.{places}f} ± {found.spread:,.{places}f}"


def big(value: float | None) -> str:
    """A count in three figures: 1.23 k, 45.6 M, 7.89 G; small ones as they are."""
    if value is None or not math.isfinite(value):
        return NONE
    if abs(value) < 1e4:
        return f"{value:,.0f}"
    rounded = float(f"{value:.3g}")  # before the unit is chosen: 999,999 is 1 M
    unit, letter = next((unit, letter) for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(rounded) >= unit)
    return f"{rounded / unit:.3g} {letter}" if abs(rounded) < 1000 * unit else f"{value / unit:,.0f} {letter}"


def rate(share: float | None) -> str:
    """A share of weights a step, in percent with two figures."""
    if share is None or not math.isfinite(share):
        return NONE
    percent = 100 * share
    return f"{percent:.1e}".replace("e-0", "e-") if 0 < percent < 1e-3 else f"{percent:#.2g}".rstrip(".")


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours and minutes."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
