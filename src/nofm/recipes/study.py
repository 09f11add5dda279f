"""A study: the rows of one table or figure, each a configuration, and what the paper claims about them. Needs no torch.

A study is made from a recipe, its *base*: the same rows on ImageNet (`imagenet/resnet50`) or, smaller, on CIFAR-10
(`cifar10/resnet20`). Everything that is not the row's own subject (data, epochs, learning rate, batch) is the base's, so that rows
differ in nothing but what the table compares.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..engine.config import MethodConfig, RunConfig

__all__ = ["Claim", "Row", "Study", "dense", "lasting", "nm", "share", "unstructured"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. `paper` is what the paper reports for it, in its own setting."""

    label: str
    config: RunConfig
    paper: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Something the paper says of two rows: `first` is above `second` in `metric` ("accuracy", or "sad", where lower is meant)."""

    text: str
    first: str
    second: str
    metric: str = "accuracy"
    level: bool = False  # the two are level rather than first above second


@dataclass(frozen=True)
class Study:
    """Rows to train, each with several seeds, and claims to look at."""

    title: str
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        assert len(set(labels)) == len(labels), "labels tell rows apart"
        for claim in self.claims:
            assert {claim.first, claim.second} <= set(labels), f"{claim.text}: no such row"


def nm(base: RunConfig, pattern: str, kind: str = "srste", **options: Any) -> RunConfig:
    """`base` with an N:M pattern and a method. SR-STE keeps the base's decay where none is given."""
    if kind == "srste":
        options = {"decay": base.sparsity.method.decay, **options}
    sparsity = dataclasses.replace(base.sparsity, pattern=pattern, rules=(), method=MethodConfig(kind=kind, **options))
    return dataclasses.replace(base, sparsity=sparsity)


def dense(base: RunConfig) -> RunConfig:
    """`base` trained dense; SAD then tells how the masks of its pattern would move."""
    return nm(base, base.sparsity.pattern or "2:4", "dense")


def unstructured(base: RunConfig, kind: str, sparsity: float, **options: Any) -> RunConfig:
    """`base` with a method that prunes anywhere in the same layers."""
    return nm(base, "1:1", kind, sparsity=sparsity, **options)


def share(base: RunConfig, part: float) -> float:
    """A part of the run, in the run's own unit of epochs or steps."""
    e = base.engine
    return part * e.epochs if e.epochs is not None else round(part * (e.steps or 1))


def lasting(base: RunConfig, length: int) -> RunConfig:
    """`base` made so long, in its own unit."""
    e = base.engine
    return dataclasses.replace(
        base, engine=dataclasses.replace(e, epochs=length) if e.epochs is not None else dataclasses.replace(e, steps=length)
    )
