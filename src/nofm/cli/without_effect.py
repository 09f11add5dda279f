"""Sparsity options by which no row of a study would be trained: refused, before anything is.

Rows set how they are sparse themselves, and take from the recipe what their table does not compare: at most its pattern, its layers and
SR-STE's lambda. An option of anything else would stand in every run.json and have done nothing. Which ones count is listed nowhere: a
study is made from the recipe with a value that no row has of its own, and an option counts where some row has it then. So one that a
study begins to take from its recipe is accepted from then on. Needs torch only where it refuses.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from ..engine.complaints import value_of
from ..engine.config import ConfigError, RunConfig
from ..engine.resolve import Origins, differences, explain, leaves, takes_numbers, to_dict
from ..engine.validate import METHOD_OPTIONS
from ..recipes.studies import STUDIES

__all__ = ["check_sparsity"]

_METHOD = "sparsity.method."


def check_sparsity(names: Sequence[str], base: RunConfig, recipe: RunConfig, typed: Origins) -> None:
    """Raise where one of the options `typed`, which have made `base` of the recipe, is that of no row of these studies.

    What says the same as the recipe, or as a row's method where nothing is said, changes nothing and passes.
    """
    changed = [key for key, _, _ in differences(to_dict(recipe), to_dict(base)) if key.startswith("sparsity.") and _is_among(key, typed)]
    wrong = [key for key in changed if not any(_has_effect(name, base, key) for name in names)]
    if wrong:
        why = f"no row of {', '.join(names)} would be trained by it, since rows set how they are sparse themselves; leave it out"
        counting = [key for key in leaves() if key.startswith("sparsity.") and any(_counts(name, base, key) for name in names)]
        said = [explain(typed, key, value_of(base, key), why) for key in wrong]
        raise ConfigError("\n".join([*said, f"sparsity options that count there: {', '.join(counting)}"]))


def _is_among(key: str, typed: Origins) -> bool:
    """By itself, or in a group that a file has."""
    return any(key == name or key.startswith(f"{name}.") for name in typed)


def _has_effect(study: str, base: RunConfig, key: str) -> bool:
    rows, value = [row.config for row in STUDIES[study](base).rows], value_of(base, key)
    if _counts(study, base, key) and any(value_of(config, key) == value for config in rows):
        return True
    return any(_does_so_anyway(config, key, value) for config in rows)


def _counts(study: str, base: RunConfig, key: str) -> bool:
    """Whether some row of the study has the value of the base. It is one that none of them has of its own."""
    kind = leaves()[key]
    is_list = any(typing.get_origin(each) is tuple for each in (kind, *typing.get_args(kind)))
    value: Any = 0.0123456789 if takes_numbers(kind) else ("nobody's",) if is_list else "nobody's"
    return any(value_of(row.config, key) == value for row in STUDIES[study](_with(base, key, value)).rows)


def _does_so_anyway(config: RunConfig, key: str, value: Any) -> bool:
    """Whether the method of a row that says nothing of this option has this value where nothing is said."""
    name, method = key.removeprefix(_METHOD), config.sparsity.method
    if name == key or name not in METHOD_OPTIONS[method.kind] or getattr(method, name) is not None:
        return False
    from ..engine.build import make_method

    try:  # by two seeds, since a method that draws has that of the run where nothing is said
        return all(make_method(seeded) == make_method(_with(seeded, key, value)) for seeded in (_with(config, "seed", s) for s in (0, 1)))
    except ConfigError:
        return False  # a value that no method can have


def _with(config: Any, key: str, value: Any) -> Any:
    """A configuration with this value of a dotted key."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(config, **{name: _with(getattr(config, name), rest, value) if rest else value})
