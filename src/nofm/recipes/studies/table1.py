"""Table 1: ResNet with different N:M patterns, trained by SR-STE. Its figure has the curves of the appendix's, accuracy by epoch."""

from __future__ import annotations

import dataclasses

from ...engine.config import RunConfig
from ..study import RESNET18, RESNET50, WIDER_RESNET50, Claim, Row, Study, dense, in_paper, nm, only_for

__all__ = ["in_table", "study"]

_PATTERNS = ("2:4", "4:8", "1:4", "2:8", "1:16")
# ImageNet top-1 in the paper; of ResNet-50 1:16 is from its Table 3 and STE from its Table 2, of ResNet-18 both.
_PAPER = {
    RESNET50: {
        "dense": "77.3",
        "SR-STE 2:4": "77.0",
        "STE 2:4": "76.4",
        "SR-STE 4:8": "77.4",
        "SR-STE 1:4": "75.3",
        "SR-STE 2:8": "76.2",
        "SR-STE 1:16": "71.5",
    },
    WIDER_RESNET50: {"SR-STE 2:8": "77.5"},
    RESNET18: {"SR-STE 2:4": "71.2", "STE 2:4": "69.9"},
}


def in_table(base: RunConfig) -> tuple[str, dict[str, str]]:
    """Of which network to show the paper's numbers, and these by the label of a row."""
    return in_paper(base, _PAPER)


def study(base: RunConfig) -> Study:
    """SR-STE and STE at 2:4, 4:8, 1:4, 2:8 and 1:16 beside dense."""
    only_for("classification", base)
    network, paper = in_table(base)
    configs = {"dense": dense(base)}
    for pattern in _PATTERNS:
        configs |= {f"SR-STE {pattern}": nm(base, pattern), f"STE {pattern}": nm(base, pattern, "ste")}
    rows = [Row(label, config, paper.get(label, "")) for label, config in configs.items()]
    if base.model.name == "torchvision/resnet50":  # the paper widens this one only
        wide = dataclasses.replace(base, model=dataclasses.replace(base.model, name="resnet50x1.25"))
        rows.append(Row("SR-STE 2:8, x1.25 as wide", nm(wide, "2:8"), _PAPER[WIDER_RESNET50]["SR-STE 2:8"]))
    above = [Claim(f"SR-STE is above STE at {p}", f"SR-STE {p}", f"STE {p}") for p in _PATTERNS]
    calmer = [Claim(f"SR-STE moves its masks less than STE at {p}", f"SR-STE {p}", f"STE {p}", metric="sad") for p in _PATTERNS]
    fitter = [
        Claim(f"SR-STE fits its training data better than STE at {p}", f"SR-STE {p}", f"STE {p}", metric="train_loss") for p in _PATTERNS
    ]
    fitter += [
        Claim(f"{larger} fits its training data better than {smaller}", f"SR-STE {larger}", f"SR-STE {smaller}", metric="train_loss")
        for larger, smaller in (("4:8", "2:4"), ("2:8", "1:4"))
    ]
    return Study(
        "Patterns (Table 1)",
        tuple(rows),
        (
            *above,
            Claim("4:8 is above 2:4", "SR-STE 4:8", "SR-STE 2:4"),
            Claim("2:8 is above 1:4", "SR-STE 2:8", "SR-STE 1:4"),
            Claim("SR-STE 2:4 is level with dense", "SR-STE 2:4", "dense", level=True),
            Claim("dense is above STE at 2:4", "dense", "STE 2:4"),
            *calmer,
            *fitter,
        ),
        paper_of=network,
    )
