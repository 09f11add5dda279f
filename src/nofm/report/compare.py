"""Several runs side by side: groups of runs that differ in nothing but the seed, and mean and spread over each.

The spread is the sample standard deviation (n - 1); of one run there is none. Only finished runs count in a final number: the
last value of a run that was stopped is the value of a shorter training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .curves import Curve
from .read import Run

__all__ = ["Band", "Group", "Stat", "band", "differing", "flatten", "group_runs", "stat", "stretches", "thin", "thin_band"]

# Settings that do not change what is trained: the seed, and where and how the run was started.
_METHOD = "sparsity.method.kind"
_NOT_COMPARED = ("seed", "out", "resume")
# What a reader of a table takes for equal unless a name says otherwise; all else is named only as far as it tells groups apart.
_NAMED = (
    "model.name", "model.width", "model.weights", "model.backbone", "model.pretrained",
    "data.name", "sparsity.pattern", "sparsity.budget", "sparsity.method.begin_at", "sparsity.method.ramp_at",
    "optim.kind", "optim.lr", "optim.weight_decay", "engine.batch_size", "engine.epochs", "engine.steps",
)  # fmt: skip


# Of options that an earlier version did not know zero is as good as none, but for this one: from the first step on.
_ZERO_IS_ON = ("sparsity.method.ramp_at",)


@dataclass(frozen=True, slots=True)
class Stat:
    """A number over several runs. `spread` is None where there is only one."""

    mean: float
    spread: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over several runs, at the steps that all of them have."""

    steps: tuple[int, ...]
    stats: tuple[Stat, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Runs with one configuration, by seed."""

    label: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.status == "finished")

    def stat(self, value: Callable[[Run], float | None]) -> Stat | None:
        """A final number over the finished runs that have it."""
        return stat(v for run in self.finished if (v := value(run)) is not None)

    def band(self, curve: Callable[[Run], Curve]) -> Band:
        return band([c for run in self.runs if (c := curve(run))])


def stat(values: Iterable[float]) -> Stat | None:
    """Mean and sample standard deviation, None of nothing."""
    found = list(values)
    n = len(found)
    if n == 0:
        return None
    if not all(map(math.isfinite, found)):
        return Stat(math.nan, None, n)
    mean = math.fsum(found) / n
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in found) / (n - 1)) if n > 1 else None
    return Stat(mean, spread, n)


def band(curves: Sequence[Curve]) -> Band:
    """Mean and spread at each step that every curve has."""
    common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return Band(tuple(common), tuple(s for step in common if (s := stat(curve[step] for curve in curves)) is not None))


def thin(curve: Curve, most: int) -> Curve:
    """At most `most` points, each the mean over as many neighbours as needed, at the step of the last of them."""
    steps = list(curve)
    width = -(-len(steps) // most)
    if width <= 1:
        return curve
    chunks = [steps[i : i + width] for i in range(0, len(steps), width)]
    return {chunk[-1]: math.fsum(curve[step] for step in chunk) / len(chunk) for chunk in chunks}


def thin_band(found: Band, most: int) -> Band:
    """`thin`, of mean and spread alike."""
    means = thin({step: s.mean for step, s in zip(found.steps, found.stats, strict=True)}, most)
    spreads = thin({step: s.spread or 0.0 for step, s in zip(found.steps, found.stats, strict=True)}, most)
    return Band(tuple(means), tuple(Stat(means[step], spreads[step], found.stats[0].n) for step in means))


def stretches(found: Band, positive: bool) -> list[Band]:
    """The parts of a band that can be drawn, between values that cannot: not finite or, where they must be `positive` for a logarithmic
    axis, zero. One line through all that is left would show numbers where there are none."""
    parts: list[list[tuple[int, Stat]]] = [[]]
    for step, s in zip(found.steps, found.stats, strict=True):
        if math.isfinite(s.mean) and (s.mean > 0 or not positive):
            parts[-1].append((step, s))
        elif parts[-1]:
            parts.append([])
    return [Band(*map(tuple, zip(*part, strict=True))) for part in parts if part]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name: {"optim": {"lr": 0.1}} -> {"optim.lr": 0.1}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def settings_of(run: Run) -> dict[str, Any]:
    """What defines the training of a run, apart from its seed."""
    flat = flatten(run.info["config"])
    return {"recipe": run.info["recipe"]} | {key: value for key, value in flat.items() if key.rpartition(".")[2] not in _NOT_COMPARED}


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by configuration, in the order given; each group's runs in the order of their seeds."""
    found: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run, each in zip(runs, _known_to_all(list(map(settings_of, runs))), strict=True):
        found.setdefault(json.dumps(each, sort_keys=True, default=str), (each, []))[1].append(run)
    settings = [each for each, _ in found.values()]
    labels = _labels(settings)
    members = [tuple(sorted(group, key=lambda run: run.seed)) for _, group in found.values()]
    return [Group(*row) for row in zip(labels, settings, members, strict=True)]


def _known_to_all(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings without those that only some of them know and the others have switched off: an earlier version, which did not know
    them, was the same training."""
    known = set(settings[0]).intersection(*settings) if settings else set()
    return [{key: value for key, value in each.items() if key in known or not _is_off(key, value)} for each in settings]


def _is_off(key: str, value: Any) -> bool:
    return value is None if key in _ZERO_IS_ON else value in (None, False, [], {})  # 0 == False


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which these differ, in the order in which they come."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [key for key in keys if len({json.dumps(each.get(key), default=str) for each in settings}) > 1]


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short names that tell the groups apart: the method if it differs, then what must be named (`_NAMED`), then other words and numbers
    as far as needed."""
    if len(settings) == 1:
        return [str(settings[0]["recipe"])]
    keys = differing(settings)
    words = {key for key in keys if any(isinstance(each.get(key), str) for each in settings)}
    keys.sort(key=lambda key: (key != _METHOD, key not in _NAMED, key not in words))  # stable
    parts: list[list[str]] = [[] for _ in settings]
    for key in keys:
        longer = [[*before, *_part(key, _told(each, key))] for before, each in zip(parts, settings, strict=True)]
        if _must_be_named(key, settings) or len({tuple(p) for p in longer}) > len({tuple(p) for p in parts}):
            parts = longer
    for part, each in zip(parts, settings, strict=True):  # what only the others have does not name a group
        part += next((more for key in keys if not part and (more := _part(key, _told(each, key)))), [])
    labels = [" ".join(p) or "default" for p in parts]
    return [label if labels.count(label) == 1 else f"{label} #{labels[: i + 1].count(label)}" for i, label in enumerate(labels)]


def _must_be_named(key: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a reader would take it for equal, and it differs between groups that it says something about."""
    return key in _NAMED and len({str(each.get(key)) for each in settings if not _is_idle(each, key)}) > 1


def _told(settings: Mapping[str, Any], key: str) -> Any:
    """A setting as a name may use it."""
    return None if _is_idle(settings, key) else settings.get(key)


def _is_idle(settings: Mapping[str, Any], key: str) -> bool:
    """A dense network has no pattern, though its masks are watched by one."""
    return key == "sparsity.pattern" and settings.get(_METHOD) == "dense"


def _part(key: str, value: Any) -> list[str]:
    if value is None:
        return []
    if value == "1:1":
        return ["unstructured"]
    if isinstance(value, str):
        return [f"from {value}" if key in ("model.weights", "model.backbone") else value]
    return [f"{key.rpartition('.')[2]}={f'{value:g}' if isinstance(value, float) else value}"]
