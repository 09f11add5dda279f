"""The appendix's kernel shapes: what 2:8 can keep of a 3x3 kernel that 1:4, as dense and finer, cannot.

Its rows are two of Table 1, so that its runs are too. Where run folders are at hand the study also writes shapes.csv, the shapes that
each layer's kernels have, and shapes.png, some of them and how many there are.
"""

from __future__ import annotations

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, nm, only_for
from .table1 import in_table

__all__ = ["study"]


def study(base: RunConfig) -> Study:
    """The shapes that kernels have at 2:8 and at 1:4 by SR-STE."""
    only_for("classification", base)
    network, paper = in_table(base)
    rows = tuple(Row(f"SR-STE {pattern}", nm(base, pattern), paper.get(f"SR-STE {pattern}", "")) for pattern in ("2:8", "1:4"))
    claims = (Claim("2:8 is above 1:4", "SR-STE 2:8", "SR-STE 1:4"),)
    return Study("Kernel shapes (appendix)", rows, claims, paper_of=network, shapes_beyond="1:4")
