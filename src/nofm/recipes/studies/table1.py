"""Table 1: ResNet with different N:M patterns, trained by SR-STE."""

from __future__ import annotations

import dataclasses

from ...engine.config import RunConfig
from ..study import Claim, Row, Study, dense, nm, only_for

__all__ = ["study"]

# ImageNet top-1 of ResNet-50 in the paper; 1:16 is from its Table 3, STE 2:4 from its Table 2.
_PAPER = {"2:4": "77.0", "4:8": "77.4", "1:4": "75.3", "2:8": "76.2", "1:16": "71.5"}


def study(base: RunConfig) -> Study:
    """SR-STE and STE at 2:4, 4:8, 1:4, 2:8 and 1:16 beside dense."""
    only_for("classification", base)
    rows = [Row("dense", dense(base), "77.3")]
    for pattern, accuracy in _PAPER.items():
        rows.append(Row(f"SR-STE {pattern}", nm(base, pattern), accuracy))
        rows.append(Row(f"STE {pattern}", nm(base, pattern, "ste"), "76.4" if pattern == "2:4" else ""))
    if base.model.name == "torchvision/resnet50":  # the paper widens this one only
        wide = dataclasses.replace(base, model=dataclasses.replace(base.model, name="resnet50x1.25"))
        rows.append(Row("SR-STE 2:8, x1.25 as wide", nm(wide, "2:8"), "77.5"))
    above = [Claim(f"SR-STE is above STE at {p}", f"SR-STE {p}", f"STE {p}") for p in _PAPER]
    calmer = [Claim(f"SR-STE moves its masks less than STE at {p}", f"SR-STE {p}", f"STE {p}", metric="sad") for p in _PAPER]
    fitter = [
        Claim(f"SR-STE fits its training data better than STE at {p}", f"SR-STE {p}", f"STE {p}", metric="train_loss") for p in _PAPER
    ]
    return Study(
        "Patterns (Table 1)",
        tuple(rows),
        (
            *above,
            Claim("4:8 is above 2:4", "SR-STE 4:8", "SR-STE 2:4"),
            Claim("2:8 is above 1:4", "SR-STE 2:8", "SR-STE 1:4"),
            Claim("SR-STE 2:4 is level with dense", "SR-STE 2:4", "dense", level=True),
            *calmer,
            *fitter,
        ),
    )
