"""The paper's other tasks: detection, instance segmentation, optical flow and translation, dense and N:M, in the same steps.

Flow and translation train by Adam, which divides the gradient by its own size: SR-STE's term, added to it, loses its scale, and with it
the meaning of lambda. So both rows of placements are there, each with lambdas a factor of ten apart:

    gradient     the term counts where lambda * |w| comes near the gradient's size. Weights are about 0.03, and gradients with a norm of
                 about 1 over some 10^7 weights about 3e-4: near lambda 1e-2. The paper's 2e-4 makes a fiftieth of the gradient. Far
                 above, the pull is the learning rate itself, whatever the weight.
    decoupled    a pruned weight shrinks by lr * lambda in a step, by exp(-lambda * sum of lr) over the run. The sum is 0.6 for
                 flow/stamps and 4 for multi30k/small; the paper's 600,000 steps of SGD come to an exponent of 60, cifar10/resnet20 to
                 19 or more. So lambda is to be between 1 and 10, and 0.1 should do next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, dense, nm, only_for

__all__ = ["detection", "flow", "segmentation", "translation"]

_LAMBDAS = {"gradient": (2e-4, 2e-3, 2e-2), "decoupled": (0.1, 1.0, 10.0)}


def detection(base: RunConfig) -> Study:
    """Faster R-CNN: dense, STE and SR-STE at 2:4, SR-STE at 2:8; box mAP."""
    once, twice = ("37.4", "38.2", "37.2"), ("38.4", "39.2", "38.9")
    return _study(base, "detection", _of_coco(base, once, twice), "Faster R-CNN R50-FPN", f"COCO, {_schedule(base)}")


def segmentation(base: RunConfig) -> Study:
    """Mask R-CNN: dense, STE and SR-STE at 2:4, SR-STE at 2:8; mask mAP, and box mAP in runs.csv."""
    once, twice = ("34.7", "35.3", "33.9"), ("35.4", "35.9", "35.4")
    return _study(base, "segmentation", _of_coco(base, once, twice), "Mask R-CNN R50-FPN", f"COCO, {_schedule(base)}")


def flow(base: RunConfig) -> Study:
    """RAFT: dense, STE and SR-STE at 2:4, SR-STE at 2:8, and where and how strongly the term is added under Adam; EPE."""
    return _study(base, "flow", {"dense": "0.86", "SR-STE 2:4": "0.88"}, "RAFT", "FlyingChairs", placements=True)


def translation(base: RunConfig) -> Study:
    """Transformer: dense, STE and SR-STE at 2:4, SR-STE at 2:8 and 1:4, and where and how strongly the term is added; BLEU."""
    paper = {"dense": "27.31", "SR-STE 2:4": "27.23"}
    return _study(base, "translation", paper, "Transformer base", "WMT14", placements=True, patterns=("2:8", "1:4"))


def _schedule(base: RunConfig) -> str:
    """Detectors are compared by schedules of 12 epochs (1x) and 24 (2x), and the paper has both."""
    return "2x" if base.engine.epochs == 24 else "1x"


def _of_coco(base: RunConfig, once: Sequence[str], twice: Sequence[str]) -> dict[str, str]:
    return dict(zip(("dense", "SR-STE 2:4", "SR-STE 2:8"), twice if _schedule(base) == "2x" else once, strict=True))


def _study(
    base: RunConfig,
    kind: str,
    paper: dict[str, str],
    network: str,
    where: str,
    *,
    placements: bool = False,
    patterns: tuple[str, ...] = ("2:8",),
) -> Study:
    only_for(kind, base)
    rows = [Row("dense", dense(base)), Row("STE 2:4", nm(base, "2:4", "ste"))]
    rows += [Row(f"SR-STE {pattern}", nm(base, pattern)) for pattern in ("2:4", *patterns)]
    claims = [
        Claim("SR-STE is better than STE at 2:4", "SR-STE 2:4", "STE 2:4"),
        Claim("SR-STE 2:4 is level with dense", "SR-STE 2:4", "dense", level=True),
        Claim("SR-STE 2:4 is better than dense", "SR-STE 2:4", "dense"),
        Claim("SR-STE 2:8 is level with dense", "SR-STE 2:8", "dense", level=True),
        Claim("SR-STE moves its masks less than STE at 2:4", "SR-STE 2:4", "STE 2:4", metric="sad"),
        Claim("SR-STE fits its training data better than STE at 2:4", "SR-STE 2:4", "STE 2:4", metric="train_loss"),
    ]
    if "1:4" in patterns:
        claims.append(Claim("2:8 is better than 1:4", "SR-STE 2:8", "SR-STE 1:4"))
    for placement, lambdas in _LAMBDAS.items() if placements else ():
        for decay in lambdas:
            label = f"2:4, {placement}, lambda {decay:g}"
            rows.append(Row(label, nm(base, "2:4", placement=placement, decay=decay)))
            claims.append(Claim(f"{placement}, lambda {decay:g}, is better than STE at 2:4", label, "STE 2:4"))
            if placement == "decoupled":
                claims.append(Claim(f"decoupled, lambda {decay:g}, is better than SR-STE as the paper has it", label, "SR-STE 2:4"))
    rows = [Row(row.label, row.config, paper.get(row.label, "")) for row in rows]
    return Study(f"{kind.capitalize()} (the paper: {where})", tuple(rows), tuple(claims), paper_of=f"{network}, {where}")
