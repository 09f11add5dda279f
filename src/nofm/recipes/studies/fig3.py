"""Fig. 3: how far masks move in dense and in straight-through training (SAD), step by step."""

from __future__ import annotations

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, dense, nm, only_for

__all__ = ["study"]


def study(base: RunConfig) -> Study:
    """SAD of dense training and of STE, with the base's pattern."""
    only_for("classification", base)
    pattern = base.sparsity.pattern or "2:4"
    rows = (Row("dense", dense(base)), Row(f"STE {pattern}", nm(base, pattern, "ste")))
    return Study(
        "Mask movement of dense and straight-through training (Fig. 3)",
        rows,
        (Claim("dense training moves its masks less than STE", "dense", f"STE {pattern}", metric="sad"),),
    )
