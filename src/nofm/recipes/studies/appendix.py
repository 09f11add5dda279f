"""The appendix: other forms of the refined term (Eq. 5 and 6) beside Eq. 4."""

from __future__ import annotations

from ...engine.config import RunConfig
from ..study import RESNET18, RESNET50, Claim, Row, Study, in_paper, nm, only_for

__all__ = ["study"]

# ImageNet top-1 in the paper, which has all three forms of ResNet-18 only; ResNet-50's are from its Table 2.
_PAPER = {
    RESNET18: {"STE": "69.9", "Eq. 4: weight": "71.2", "Eq. 5: sign": "about 70.8", "Eq. 6: gradient": "69.4"},
    RESNET50: {"STE": "76.4", "Eq. 4: weight": "77.0"},
}


def _number(base: RunConfig) -> float | None:
    decay = base.sparsity.method.decay
    return None if isinstance(decay, str) else decay


def study(base: RunConfig) -> Study:
    """Eq. 4, 5 and 6 and plain STE, with the base's pattern."""
    only_for("classification", base)
    pattern = base.sparsity.pattern or "2:4"
    network, paper = in_paper(base, _PAPER)
    configs = {
        "STE": nm(base, pattern, "ste"),
        "Eq. 4: weight": nm(base, pattern),
        # The paper gives no lambdas for these two. A sign is some fifty times as large as a weight, so its lambda is that much
        # smaller; the gradient's damps pruned weights by half where the learning rate is largest (less SAD early on, as it reports).
        "Eq. 5: sign": nm(base, pattern, refine="sign", decay=(_number(base) or 2e-4) / 50),
        "Eq. 6: gradient": nm(base, pattern, refine="gradient", decay=-0.5 / base.optim.lr),
        "Eq. 4, decoupled": nm(base, pattern, placement="decoupled"),
    }
    rows = tuple(Row(label, config, paper.get(label, "")) for label, config in configs.items())
    claims = (
        Claim("Eq. 4 is above STE", "Eq. 4: weight", "STE"),
        Claim("Eq. 5 is above STE", "Eq. 5: sign", "STE"),
        Claim("STE is above Eq. 6", "STE", "Eq. 6: gradient"),
        Claim("Eq. 4 has a lower SAD than STE", "Eq. 4: weight", "STE", metric="sad"),
        Claim("Eq. 5 has a lower SAD than STE", "Eq. 5: sign", "STE", metric="sad"),
        Claim("STE has a lower SAD than Eq. 6", "STE", "Eq. 6: gradient", metric="sad"),  # the paper's is about parts of the run:
        Claim("Eq. 6 has a lower SAD than STE in the first half", "Eq. 6: gradient", "STE", metric="sad:first half"),
        Claim("STE has a lower SAD than Eq. 6 in the second half", "STE", "Eq. 6: gradient", metric="sad:second half"),
    )
    return Study(f"Forms of the refined term at {pattern} (appendix)", rows, claims, paper_of=f"{network}, 2:4")
