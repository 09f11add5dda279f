"""Recipes: functions that return a full configuration. `RECIPES` lists them by name; `nofm train NAME` runs one. Needs no torch.

A recipe's docstring is its help text. To add one, write a function in a module of this package and a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from ..engine.config import ConfigError, RunConfig
from ..engine.resolve import near
from . import cifar10, detection, flow, imagenet, small, translation

__all__ = ["RECIPES", "describe", "find", "listed"]

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "digits": small.digits,
    "fashion/cnn": small.fashion_cnn,
    "cifar10/resnet18": cifar10.resnet18,
    "cifar10/resnet20": cifar10.resnet20,
    "cifar10/resnet32": cifar10.resnet32,
    "imagenet/resnet18": imagenet.resnet18,
    "imagenet/resnet50": imagenet.resnet50,
    "imagenet/resnet50x1.25": imagenet.wide_resnet50,
    **{f"imagenet/regnetx_{size}": imagenet.regnetx(size) for size in imagenet.REGNETS},
    "bccd/fasterrcnn": detection.bccd,
    "nuclei/maskrcnn": detection.nuclei,
    "coco/fasterrcnn": detection.coco_boxes,
    "coco/fasterrcnn_2x": detection.coco_boxes_2x,
    "coco/maskrcnn": detection.coco_masks,
    "coco/maskrcnn_2x": detection.coco_masks_2x,
    "multi30k/small": translation.multi30k_small,
    "wmt14/base": translation.wmt14_base,
    "flow/chairs": flow.chairs,
    "flow/stamps": flow.stamps,
}


def find(name: str) -> RunConfig:
    """The configuration of a recipe by name."""
    if name not in RECIPES:
        raise ConfigError(f"{name!r} is no recipe{near(name, RECIPES)}; there are {', '.join(RECIPES)}")
    return RECIPES[name]()


def describe(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (RECIPES[name].__doc__ or "").strip().partition("\n")[0]


def listed(glob: str = "*") -> list[str]:
    """The names that match `glob`."""
    return [name for name in RECIPES if fnmatchcase(name, glob)]
