"""One module for each table and figure of the paper, and what goes beyond it. `nofm study NAME` trains all rows of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...engine.config import ConfigError, RunConfig
from ...engine.resolve import near
from ..study import Study
from . import appendix, beyond, fig3, fig4, kernels, regnet, table1, table2, table3, tasks

__all__ = ["STUDIES", "check_names", "find_studies"]

STUDIES: dict[str, Callable[[RunConfig], Study]] = {
    "table1": table1.study,
    "table2": table2.study,
    "fig3": fig3.study,
    "fig4": fig4.study,
    "appendix": appendix.study,
    "kernels": kernels.study,
    "table3": table3.study,
    "beyond": beyond.study,
    "regnet": regnet.study,
    "detection": tasks.detection,
    "segmentation": tasks.segmentation,
    "flow": tasks.flow,
    "translation": tasks.translation,
}


def check_names(names: Sequence[str]) -> None:
    """Raise for a name that no study has, or where there is none."""
    if not names:
        raise ConfigError(f"study: say which; there are {', '.join(STUDIES)}, all")
    for name in names:
        if name not in (*STUDIES, "all"):
            raise ConfigError(f"{name!r} is no study; there are {', '.join(STUDIES)}, all{near(name, STUDIES)}")


def find_studies(names: Sequence[str], base: RunConfig) -> dict[str, Study]:
    """Studies by name, made from `base`; "all" are those that can be."""
    check_names(names)
    if "all" not in names:
        return {name: STUDIES[name](base) for name in dict.fromkeys(names)}
    found = {}
    for name, make in STUDIES.items():
        try:
            found[name] = make(base)
        except ConfigError:
            if name in names:
                raise
    return found
