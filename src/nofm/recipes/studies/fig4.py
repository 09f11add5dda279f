"""Fig. 4: the weight lambda of the sparse-refined term, and the curves of dense, STE and SR-STE.

What shrinks a pruned weight over a run is lambda times the sum of learning rates, over 1 - momentum: 60 for the paper's 2e-4 (120 epochs
of ImageNet), 2.3 for the same in 60 epochs of `cifar10/resnet20`. So its lambdas are there, and larger ones. Its negative one, -2e-5,
is an exponent of -6 there and of -0.2 here; -8e-4 pushes pruned weights harder than weight decay, 5e-4, draws them back.

A base of another pattern than the paper's 2:4 has a few lambdas at 2:4 beside its own, since the best one need not be the same.
"""

from __future__ import annotations

from ...engine.config import RunConfig
from ..study import RESNET18, RESNET50, Claim, Row, Study, dense, in_paper, nm, only_for

__all__ = ["study"]

_LAMBDAS = (0.0, 2e-4, 4.5e-4, -2e-5)  # the paper's
# ImageNet top-1 by lambda (None: dense), as far as the paper tells: its figure is of ResNet-18; ResNet-50's are from its tables.
_PAPER: dict[str, dict[float | None, str]] = {
    RESNET18: {0.0: "69.9", 2e-4: "71.2", -2e-5: "68.5"},
    RESNET50: {None: "77.3", 0.0: "76.4", 2e-4: "77.0"},
}
_WIDER = (8e-4, 1.6e-3, 3.2e-3, 6.4e-3, -2e-4, -8e-4)
_AT_2_4 = (0.0, 2e-4, 1.6e-3, 6.4e-3)


def _label(decay: float) -> str:
    return f"lambda {decay:g}"


def _row(base: RunConfig, pattern: str, decay: float) -> RunConfig:
    return nm(base, pattern, decay=decay) if decay else nm(base, pattern, "ste")  # without its term SR-STE is STE


def study(base: RunConfig) -> Study:
    """The paper's four lambdas, more of them, and dense, with the base's pattern; a few at 2:4."""
    only_for("classification", base)
    pattern = base.sparsity.pattern or "2:4"
    network, paper = in_paper(base, _PAPER)
    rows = [Row("dense", dense(base), paper.get(None, ""))]
    rows += [Row(_label(decay), _row(base, pattern, decay), paper.get(decay, "")) for decay in (*_LAMBDAS, *_WIDER)]
    claims = [
        Claim("lambda 2e-4 is above 0", _label(2e-4), _label(0.0)),
        Claim("0 is above a negative lambda", _label(0.0), _label(-2e-5)),
        Claim("0 is above a negative lambda ten times as large", _label(0.0), _label(-2e-4)),
        Claim("0 is above a negative lambda forty times as large", _label(0.0), _label(-8e-4)),
        Claim("lambda 2e-4 has a lower SAD than 0", _label(2e-4), _label(0.0), metric="sad"),
        Claim("lambda 4.5e-4 is above 0", _label(4.5e-4), _label(0.0)),
        Claim("lambda 4.5e-4 has a lower SAD than 0", _label(4.5e-4), _label(0.0), metric="sad"),
        Claim("lambda 0 has a lower SAD than a negative one", _label(0.0), _label(-2e-5), metric="sad"),
        Claim("lambda 0 has a lower SAD than a negative one forty times as large", _label(0.0), _label(-8e-4), metric="sad"),
    ]
    if pattern != "2:4":
        rows += [Row(f"2:4, {_label(decay)}", _row(base, "2:4", decay)) for decay in _AT_2_4]
        claims += [Claim(f"at 2:4, {_label(decay)} is above 0", f"2:4, {_label(decay)}", f"2:4, {_label(0.0)}") for decay in _AT_2_4[1:]]
    return Study(f"Lambda at {pattern} (Fig. 4)", tuple(rows), tuple(claims), paper_of=f"{network}, 2:4")
