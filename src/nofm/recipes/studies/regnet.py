"""The RegNet table of the appendix: does 2:4 pay on networks that are compact already?

RegNets halve an image five times; for small images there are those of `tasks.models`, which halve it three times.
"""

from __future__ import annotations

import dataclasses

from ...engine.config import ConfigError, RunConfig
from ..study import Claim, Row, Study, dense, nm, only_for

__all__ = ["study"]

# timm's names; ImageNet top-1 in the paper, 2:4 and dense, where it gives one.
_MODELS = {
    "002": ("66.7", "68.3"),
    "004": ("71.4", "72.3"),
    "006": ("72.8", "73.8"),
    "008": ("74.1", "74.9"),
    "016": ("76.7", "76.8"),
    "032": ("77.8", ""),
}


def study(base: RunConfig) -> Study:
    """RegNetX 002 to 032, dense and at 2:4 by SR-STE and (the smallest) STE."""
    only_for("classification", base)
    if base.data.name == "digits":
        raise ConfigError(
            "data.name = digits: RegNets halve an image three times at least, and 8 pixels are too few; use --on cifar10/resnet18, or a "
            "folder of images: --on imagenet/resnet50"
        )
    home = "timm" if base.data.name == "folder" else "cifar"
    rows, claims = [], []
    for size, (sparse, plain) in _MODELS.items():
        model = dataclasses.replace(base.model, name=f"{home}/regnetx_{size}", width=None)  # which belongs to the base's own network
        own = dataclasses.replace(base, model=model)
        rows += [Row(f"RegNetX{size} dense", dense(own), plain), Row(f"RegNetX{size} SR-STE 2:4", nm(own, "2:4"), sparse)]
        if size == "002":
            rows.append(Row("RegNetX002 STE 2:4", nm(own, "2:4", "ste")))
            claims.append(Claim("SR-STE is above STE on RegNetX002", "RegNetX002 SR-STE 2:4", "RegNetX002 STE 2:4"))
    # A 2:4 network computes half of its dense self: compare it with the dense one of half its size.
    for small, large in (("002", "004"), ("004", "008"), ("008", "016"), ("016", "032")):
        claims.append(Claim(f"RegNetX{large} at 2:4 is above dense RegNetX{small}", f"RegNetX{large} SR-STE 2:4", f"RegNetX{small} dense"))
    return Study("RegNet (appendix)", tuple(rows), tuple(claims), paper_of="each row's network, ImageNet")
