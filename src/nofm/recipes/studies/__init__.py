"""One module for each table and figure of the paper. `nofm study NAME` trains all its rows."""

from __future__ import annotations

from collections.abc import Callable

from ...engine.config import ConfigError, RunConfig
from ...engine.resolve import near
from ..study import Study
from . import appendix, fig3, fig4, regnet, table1, table2, table3

__all__ = ["STUDIES", "find_study"]

STUDIES: dict[str, Callable[[RunConfig], Study]] = {
    "table1": table1.study,
    "table2": table2.study,
    "table3": table3.study,
    "regnet": regnet.study,
    "fig3": fig3.study,
    "fig4": fig4.study,
    "appendix": appendix.study,
}


def find_study(name: str) -> Callable[[RunConfig], Study]:
    """A study by name."""
    if name not in STUDIES:
        raise ConfigError(f"{name!r} is no study; there are {', '.join(STUDIES)}{near(name, STUDIES)}")
    return STUDIES[name]
