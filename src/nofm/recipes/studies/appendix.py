"""The appendix: other forms of the refined term (Eq. 5 and 6) beside Eq. 4."""

from __future__ import annotations

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, nm, only_for

__all__ = ["study"]


def _number(base: RunConfig) -> float | None:
    decay = base.sparsity.method.decay
    return None if isinstance(decay, str) else decay


def study(base: RunConfig) -> Study:
    """Eq. 4, 5 and 6 and plain STE, with the base's pattern."""
    only_for("classification", base)
    pattern = base.sparsity.pattern or "2:4"
    rows = (
        Row("STE", nm(base, pattern, "ste"), "69.9"),
        Row("Eq. 4: weight", nm(base, pattern), "71.2"),
        # The paper gives no lambdas for these two. A sign is some fifty times as large as a weight, so its lambda is that much
        # smaller; the gradient's damps pruned weights by half where the learning rate is largest (less SAD early on, as it reports).
        Row("Eq. 5: sign", nm(base, pattern, refine="sign", decay=(_number(base) or 2e-4) / 50), "70.8"),
        Row("Eq. 6: gradient", nm(base, pattern, refine="gradient", decay=-0.5 / base.optim.lr), "69.4"),
        Row("Eq. 4, decoupled", nm(base, pattern, placement="decoupled")),
    )
    claims = (
        Claim("Eq. 4 is above STE", "Eq. 4: weight", "STE"),
        Claim("Eq. 5 is above STE", "Eq. 5: sign", "STE"),
        Claim("STE is above Eq. 6", "STE", "Eq. 6: gradient"),
    )
    return Study(f"Forms of the refined term at {pattern} (appendix)", rows, claims)
