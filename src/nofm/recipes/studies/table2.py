"""Table 2: ways to train a 2:4 network. ASP trains dense, prunes once and trains again, which takes more epochs."""

from __future__ import annotations

from ...engine.config import RunConfig
from ..study import RESNET18, RESNET50, Claim, Row, Study, dense, in_paper, lasting, nm, only_for, restarting, share

__all__ = ["study"]

_LONGER = 5 / 3  # the paper's 200 epochs of ASP beside its 120
# ImageNet top-1 in the paper, whose table has both networks; dense is from its Table 1, which has ResNet-50 only.
_PAPER = {
    RESNET50: {"dense": "77.3", "ASP, 1.67x epochs": "76.8", "STE 2:4": "76.4", "SR-STE 2:4": "77.0"},
    RESNET18: {"ASP, 1.67x epochs": "70.7", "STE 2:4": "69.9", "SR-STE 2:4": "71.2"},
}


def _asp(base: RunConfig, times: float) -> RunConfig:
    """ASP over `times` the base's length: half of it dense, then pruned, and the learning rate's schedule again from its start.

    With its warm-up: the full rate at once throws a network with small weights out of what it has learned, the more so the longer it was
    trained (ResNet-20 on CIFAR-10, rate 0.4: 90.0 % with 60 epochs in all, 89.3 with 100).
    """
    half = _half(base, times)
    return nm(restarting(base, 2 * half, (half,), "ASP", warmup=True), "2:4", "asp", prune_at=half)


def _half(base: RunConfig, times: float) -> int:
    """Half of `times` the base's length, whole, so that both trainings end with an epoch."""
    return round(share(base, times / 2))


def study(base: RunConfig) -> Study:
    """ASP, STE and SR-STE at 2:4, and SR-STE as long as the longer ASP."""
    only_for("classification", base)
    network, paper = in_paper(base, _PAPER)
    configs = {
        "dense": dense(base),
        "ASP, same epochs": _asp(base, 1),
        "ASP, 1.67x epochs": _asp(base, _LONGER),
        "STE 2:4": nm(base, "2:4", "ste"),
        "SR-STE 2:4": nm(base, "2:4"),
        "SR-STE 2:4, 1.67x epochs": nm(lasting(base, 2 * _half(base, _LONGER)), "2:4"),  # what ASP's longer training gives to others
    }
    return Study(
        "Methods (Table 2)",
        tuple(Row(label, config, paper.get(label, "")) for label, config in configs.items()),
        (
            Claim("SR-STE is above STE", "SR-STE 2:4", "STE 2:4"),
            Claim("SR-STE is above ASP of the same epochs", "SR-STE 2:4", "ASP, same epochs"),
            Claim("SR-STE is above ASP of 1.67x the epochs", "SR-STE 2:4", "ASP, 1.67x epochs"),
            Claim("SR-STE is level with ASP of 1.67x the epochs", "SR-STE 2:4", "ASP, 1.67x epochs", level=True),
            Claim("SR-STE is above ASP, both of 1.67x the epochs", "SR-STE 2:4, 1.67x epochs", "ASP, 1.67x epochs"),
            Claim("SR-STE is level with dense", "SR-STE 2:4", "dense", level=True),
        ),
        paper_of=network,
    )
