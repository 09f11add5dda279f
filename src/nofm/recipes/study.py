"""A study: the rows of one table or figure, each a configuration, and what is claimed of them. Needs no torch.

A study is made from a recipe, its *base*: the same rows on ImageNet (`imagenet/resnet50`) or, smaller, on CIFAR-10
(`cifar10/resnet20`). Everything that is not the row's own subject (data, epochs, learning rate, batch) is the base's, so that rows
differ in nothing but what the table compares. Rows of several studies that are the same configuration are the same runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..engine.config import ConfigError, MethodConfig, RunConfig
from ..engine.resolve import telling, to_dict

__all__ = [
    "RESNET18",
    "RESNET50",
    "WIDER_RESNET50",
    "Claim",
    "Row",
    "Study",
    "dense",
    "in_paper",
    "lasting",
    "nm",
    "only_for",
    "restarting",
    "run_name",
    "share",
    "unstructured",
]

_Numbers = TypeVar("_Numbers")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table. `paper` is what the paper reports for it, on the study's `paper_of`."""

    label: str
    config: RunConfig
    paper: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Something said of two rows: `first` is better than `second` in `metric`: "score", the headline metric of the task, or one where
    less is better: "sad", "sad:first half", "sad:second half" and "train_loss"; "sad_0:1" and "sad_0:10", how far masks are from their
    start after so many steps, and "sad_growth", how much farther after 10 than after 1."""

    text: str
    first: str
    second: str
    metric: str = "score"
    level: bool = False  # the two are level rather than first above second


@dataclass(frozen=True)
class Study:
    """Rows to train, each with several seeds, and claims to look at."""

    title: str
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)
    paper_of: str = ""  # the network and data that the paper's numbers are of, whatever the rows are trained on
    shapes_beyond: str = ""  # where it is about kernel shapes: the pattern that could not give all of them

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        assert len(set(labels)) == len(labels), "labels tell rows apart"
        for claim in self.claims:
            assert {claim.first, claim.second} <= set(labels), f"{claim.text}: no such row"


# What the paper's numbers of classification are of.
RESNET18, RESNET50, WIDER_RESNET50 = "ResNet-18, ImageNet", "ResNet-50, ImageNet", "ResNet-50 x1.25, ImageNet"
_NETWORKS = {"torchvision/resnet18": RESNET18, "torchvision/resnet50": RESNET50, "resnet50x1.25": WIDER_RESNET50}


def in_paper(base: RunConfig, numbers: Mapping[str, _Numbers]) -> tuple[str, _Numbers]:
    """Of which network to show the paper's numbers, and these: of the one that is trained, where the paper has it, or else of the first."""
    trained = _NETWORKS.get(base.model.name, "")
    network = trained if trained in numbers else next(iter(numbers))
    return network, numbers[network]


# ---- configurations made from a base ----


def nm(base: RunConfig, pattern: str, kind: str = "srste", **options: Any) -> RunConfig:
    """`base` with an N:M pattern and a method. SR-STE keeps the base's decay and where it is added where nothing is said, and of a search
    what it goes by."""
    if kind == "srste":
        own = base.sparsity.method
        options = {"decay": own.decay, "placement": own.placement, **options}
        if options["decay"] == "auto":
            options = {"target": own.target, "probe": own.probe, **options}
    mixed: dict[str, Any] = {"rules": (), "budget": None, "allocation": None, "candidates": ()}  # none of these beside a pattern
    sparsity = dataclasses.replace(base.sparsity, pattern=pattern, method=MethodConfig(kind=kind, **options), **mixed)
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


def only_for(kind: str, base: RunConfig) -> None:
    """Raise where the base learns something else than `kind`."""
    if base.task.kind != kind:
        raise ConfigError(f"task.kind = {base.task.kind}: this study is of {kind}")


def restarting(base: RunConfig, length: int, at: Sequence[int], what: str, *, warmup: bool) -> RunConfig:
    """`base` made `length` long, with the learning rate's schedule again `at` these times: from its start, or from the end of `warmup`."""
    if base.schedule.kind not in ("cosine", "onecycle"):
        raise ConfigError(
            f"schedule.kind = {base.schedule.kind}: {what} begins the learning rate anew in the middle of the run, which only cosine and "
            "onecycle can; add --schedule.kind cosine, for all rows alike"
        )
    schedule = dataclasses.replace(base.schedule, restarts=tuple(at), restart_warmup=warmup)
    return dataclasses.replace(lasting(base, length), schedule=schedule)


# ---- names of runs ----


def run_name(config: RunConfig, base: RunConfig) -> str:
    """A folder's name for the runs of a configuration, such as srste-2of4-decay0.0002: its method, its pattern, the method's options,
    and whatever else is not the base's. No colons, which some file systems refuse."""
    s, own, usual = config.sparsity, telling(to_dict(config)), telling(to_dict(base))
    words = [s.method.kind, *([] if s.pattern is None else [s.pattern])]
    for key, value in sorted(own.items(), key=lambda item: not item[0].startswith("sparsity.")):  # stable: how it is sparse comes first
        of_method = key.startswith("sparsity.method.")
        if key not in ("sparsity.method.kind", "sparsity.pattern") and (of_method or usual.get(key) != value):
            words.append(value if isinstance(value, str) else f"{key.rpartition('.')[2]}{_word(value)}")
    words += [f"no-{key.rpartition('.')[2]}" for key in usual if key not in own and not key.startswith("sparsity.")]
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", "-".join(words).replace(":", "of")).strip("-")


def _word(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_word, value))
    return "" if value is True else f"{value:.10g}" if isinstance(value, float) else str(value)
