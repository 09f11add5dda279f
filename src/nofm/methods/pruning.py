"""What methods that prune share: a budget, the strongest weights of a layer or of all layers, and masks put on.

A budget is one number for each layer ("uniform", "erk": see `budget`), or a single one where all layers compete ("global"). The
order is that of all masks: larger magnitude first, then lower index, and lower layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from .. import shards
from ..errors import OptimizerError
from ..kernels import selection
from ..site import Site
from .base import Memory, OwnedWeight, Step
from .budget import allocate

__all__ = [
    "Pool",
    "budget_of",
    "check_masks",
    "check_one_optimizer",
    "keep_all_",
    "keep_zero_",
    "keeps_more",
    "owned_of",
    "put_on_",
    "room_and_budget",
    "set_budget",
    "stored_masks",
    "strongest",
    "whole_weights",
]

Pool: TypeAlias = Literal["uniform", "erk", "global"]


def check_one_optimizer(name: str, memory: Memory) -> None:
    """Raise where the weights that must be looked at together move in the steps of several optimizers."""
    if (count := len(memory.optimizers)) > 1:
        raise OptimizerError(f"{name} looks at all sparse weights in one step, and {count} optimizers step apart; use one")


def set_budget(sites: Sequence[Site], memory: Memory, sparsity: float, allocation: Pool) -> list[int]:
    """How many weights each layer keeps, or ("global") a single number for all of them. `budget_of` a later step is the same."""
    shapes = [site.weight.shape for site in sites]
    if allocation != "global":
        budget = allocate(shapes, sparsity, allocation)
        memory.tensors |= {f"{site.key}:keep": torch.tensor(keep) for site, keep in zip(sites, budget, strict=True)}
        return budget
    check_one_optimizer('allocation="global"', memory)
    keep = round((1 - sparsity) * sum(shape.numel() for shape in shapes))
    if keep == 0:
        raise OptimizerError(f"sparsity={sparsity!r} keeps no weight of these layers; give a smaller one")
    memory.tensors["keep"] = torch.tensor(keep)  # on the host, where reading it makes no GPU wait
    return [keep]


def budget_of(step: Step) -> list[int]:
    """What `set_budget` has found, for the weights of this step."""
    held = step.memory.tensors
    return [int(held["keep"])] if "keep" in held else [int(held[f"{one.site.key}:keep"]) for one in owned_of(step)]


def check_masks(sites: Sequence[Site], memory: Memory, sparsity: float, exactly: bool = False) -> None:
    """Raise where masks that were frozen before keep fewer weights than `set_budget` has found: what is pruned stays so, and the network
    would come out sparser than it was asked for. `exactly`: or more, for a method that prunes no further."""
    if all(site.stored_mask is None for site in sites):
        return
    for name, kept, keep in _kept_and_budget(sites, memory):
        if kept < keep or (exactly and kept > keep):
            raise OptimizerError(
                f"{name} keeps {kept:,} weights by masks that were frozen before, and {keep:,} are to be kept (sparsity={sparsity}); "
                "densify_ and sparsify_ the model again to choose masks anew"
            )


def keeps_more(sites: Sequence[Site], memory: Memory) -> bool:
    """Whether more is kept of these weights than `set_budget` has found. Waits for a GPU."""
    return any(kept > keep for _, kept, keep in _kept_and_budget(sites, memory))


def _kept_and_budget(sites: Sequence[Site], memory: Memory) -> list[tuple[str, int, int]]:
    """What is kept and what is to be kept, of each layer or ("global") of all together."""
    held = memory.tensors
    if "keep" in held:
        return [("the network", sum(site.kept() for site in sites), int(held["keep"]))]
    return [(site.name, site.kept(), int(held[f"{site.key}:keep"])) for site in sites]


def room_and_budget(step: Step, weights: Sequence[Tensor]) -> list[tuple[int, int]]:
    """How many weights there are and how many `set_budget` has found to keep, of each layer or ("global") of all together."""
    budget, sizes = budget_of(step), [weight.numel() for weight in weights]
    return list(zip(sizes if len(budget) == len(sizes) else [sum(sizes)], budget, strict=True))


def keep_all_(sites: Sequence[Site]) -> None:
    """Freeze a mask of ones where there is none yet, for prunings to come to take from."""
    for site in sites:
        if site.stored_mask is None:
            site.freeze(torch.ones(site.weight.shape, dtype=torch.bool, device=site.weight.device))


def strongest(scores: Sequence[Tensor], budget: Sequence[int], among: Sequence[Tensor] | None = None) -> list[Tensor]:
    """True at the scores of largest magnitude: so many of each tensor, or of all together where the budget is a single number.

    `among`: masks, outside of which nothing is kept.
    """
    if len(budget) == len(scores):
        return selection.largest(scores, budget, among)
    joined = torch.cat([score.reshape(-1) for score in scores])
    inside = None if among is None else [torch.cat([mask.reshape(-1) for mask in among])]
    [mask] = selection.largest([joined], budget, inside)
    parts = mask.split([score.numel() for score in scores])
    return [part.view(score.shape) for part, score in zip(parts, scores, strict=True)]


# ---- in a step ----


def owned_of(step: Step) -> list[OwnedWeight]:
    """All sparse weights that follow this optimizer, those without a gradient too."""
    return [*step.weights, *step.resting]


def stored_masks(owned: Sequence[OwnedWeight]) -> list[Tensor]:
    """The stored masks of weights that all have one."""
    return [one.site.stored_mask for one in owned if one.site.stored_mask is not None]


def whole_weights(owned: Sequence[OwnedWeight]) -> list[Tensor]:
    """The weights as they are now, gathered from all processes."""
    return [shards.whole(one.param.detach()) for one in owned]


def put_on_(site: Site, param: nn.Parameter, mask: Tensor) -> None:
    """Freeze `mask`, of the whole weight; pruned weights are +0.0 from now on."""
    site.freeze(mask)
    shards.local(param.detach()).masked_fill_(~shards.part_of(mask, param), 0.0)


def keep_zero_(step: Step) -> None:
    """Undo what momentum and weight decay have done to pruned weights."""
    for owned in owned_of(step):
        if owned.site.stored_mask is not None:
            owned.weight.masked_fill_(~owned.mask(), 0.0)
