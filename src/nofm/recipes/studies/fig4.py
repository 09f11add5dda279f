"""Fig. 4: the weight lambda of the sparse-refined term, and the curves of dense, STE and SR-STE."""

from __future__ import annotations

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, dense, nm, only_for

__all__ = ["study"]

# ImageNet top-1 of ResNet-18 at the paper's lambdas, as far as it tells.
_PAPER = {0.0: "69.9", 2e-4: "71.2", 4.5e-4: "", -2e-5: "68.5"}
# A shorter run at another learning rate wants another scale: lambda times the sum of learning rates is what shrinks a pruned weight.
_WIDER = (8e-4, 1.6e-3, 3.2e-3, 6.4e-3, -2e-4)


def _label(decay: float) -> str:
    return f"lambda {decay:g}"


def study(base: RunConfig) -> Study:
    """The paper's four lambdas, more of them, and dense, with the base's pattern."""
    only_for("classification", base)
    pattern = base.sparsity.pattern or "2:4"
    rows = [Row("dense", dense(base))]
    for decay in (*_PAPER, *_WIDER):
        config = nm(base, pattern, decay=decay) if decay else nm(base, pattern, "ste")  # without its term SR-STE is STE
        rows.append(Row(_label(decay), config, _PAPER.get(decay, "")))
    claims = (
        Claim("lambda 2e-4 is above 0", _label(2e-4), _label(0.0)),
        Claim("a negative lambda is below 0", _label(0.0), _label(-2e-5)),
        Claim("a negative lambda ten times as large is below 0", _label(0.0), _label(-2e-4)),
        Claim("lambda 2e-4 has a lower SAD than 0", _label(2e-4), _label(0.0), metric="sad"),
        Claim("lambda 0 has a lower SAD than a negative one", _label(0.0), _label(-2e-5), metric="sad"),
    )
    return Study(f"Lambda at {pattern} (Fig. 4)", tuple(rows), claims)
