"""On which data runs were measured: test data, or training images held out to choose options by. Scores of different images are no
comparison, and a score that options were chosen by is better than that of the test data will be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .compare import Group

__all__ = ["are_held_out", "data_of", "data_of_all", "measured_alike", "measured_on"]


def measured_on(config: Mapping[str, Any]) -> str:
    """The data that a configuration measures on, in words."""
    data = _data(config)
    if data.get("held_out") is not None:  # which earlier runs do not know
        return f"{data['held_out']:,} training images held out"
    return "test data" if data.get("test") is None else f"test data, {data['test']}"


def data_of(groups: Sequence[Group]) -> list[str]:
    """The same of each group; where they have several data sets, of which."""
    configs = [group.runs[0].info["config"] for group in groups]
    names = [_data(config).get("name") for config in configs]
    said = [measured_on(config) for config in configs]
    return said if len({*names} - {None}) < 2 else [f"{name}: {words}" for name, words in zip(names, said, strict=True)]


def data_of_all(groups: Sequence[Group]) -> str:
    """The data, and where they differ which groups were measured on what."""
    found: dict[str, list[str]] = {}
    for group, words in zip(groups, data_of(groups), strict=True):
        found.setdefault(words, []).append(group.label)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{words} ({', '.join(own) if len(own) < 4 else f'{len(own)} configurations'})" for words, own in found.items())


def measured_alike(groups: Sequence[Group]) -> bool:
    """Whether all groups were measured on the same data, so that one can be better than another."""
    return len(set(data_of(groups))) == 1


def are_held_out(groups: Sequence[Group]) -> bool:
    """Whether some group was measured on training images held out."""
    return any(_data(group.runs[0].info["config"]).get("held_out") is not None for group in groups)


def _data(config: Mapping[str, Any]) -> Mapping[str, Any]:
    data = config.get("data")
    return data if isinstance(data, Mapping) else {}
