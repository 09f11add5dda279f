"""Fig. 3: how far masks move in dense and in straight-through training (SAD).

The paper's figure is of the first steps: for each layer, how many masks after 1 and after 10 steps are not those of the start, fewer in
dense training in every layer, and the difference grows. Claims here are about all sparse layers together; layers.png has each of them.
The claim about the whole run is not the paper's, but what it concludes from the figure.
"""

from __future__ import annotations

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, dense, nm, only_for

__all__ = ["study"]


def study(base: RunConfig) -> Study:
    """SAD of dense training and of STE, with the base's pattern: in the first 1 and 10 steps, and in the whole run."""
    only_for("classification", base)
    pattern = base.sparsity.pattern or "2:4"
    ste = f"STE {pattern}"
    rows = (Row("dense", dense(base)), Row(ste, nm(base, pattern, "ste")))
    claims = (
        Claim("dense training moves its masks less than STE", "dense", ste, metric="sad"),
        Claim("dense training moves its masks less than STE in the first step", "dense", ste, metric="sad_0:1"),
        Claim("dense training moves its masks less than STE in the first 10 steps", "dense", ste, metric="sad_0:10"),
        Claim("dense training and STE are farther apart in the first 10 steps than in the first", "dense", ste, metric="sad_growth"),
    )
    return Study("Mask movement of dense and straight-through training (Fig. 3)", rows, claims)
