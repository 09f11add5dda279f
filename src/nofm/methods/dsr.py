"""DSR, dynamic sparse reparameterization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import shards
from ..errors import OptimizerError
from ..site import Site
from .base import Memory, Step
from .budget import Allocation, shares
from .options import check_share, check_weight
from .rewiring import Rewiring, alive, best, chance

__all__ = ["DSR"]


@dataclass(frozen=True)
class DSR(Rewiring):
    """One threshold for all layers, which finds its own height; what it prunes grows at random where most weights survive.

    Paper: Mostafa & Wang, "Parameter Efficient Training of Deep Convolutional Neural Networks by Dynamic Sparse Reparameterization",
    ICML 2019, arXiv:1902.05967, Algorithm 1.

        every `every` steps:     A_i <- {k in A_i : |W_ik| >= H}  for each layer i;   K = how many that pruned
            H <- 2 H  if K < (1 - tolerance) * N_p,   H / 2  if K > (1 + tolerance) * N_p,   else H
            A_i <- A_i + K * |A_i| / sum |A| of the places outside of A_i, at random; their weights start at 0

    A_i are the connections of layer i. N_p = drop * (number of all sparse weights, pruned ones too) is what a rewiring is meant to
    prune. A layer that is full leaves its share to the others, so that the sum over the layers never changes, while theirs do.

    threshold  H at the start.
    tolerance  how far from N_p is near enough.

    The released code starts uniform with H = 1e-3 and tolerance 0.1, aims at 1 % of the network's parameters and rewires every few hundred
    steps. One thing is added: a layer keeps its largest weight, for one that lost all could not grow again.
    """

    allocation: Allocation = "uniform"
    drop: float = 0.01
    threshold: float = 1e-3
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weight("threshold", self.threshold)
        check_share("tolerance", self.tolerance)
        if self.threshold == 0:
            raise OptimizerError("threshold=0 would stay 0 however often it is doubled; the paper starts from 1e-3")
        if self.drop >= 1 - self.sparsity:
            raise OptimizerError(
                f"drop={self.drop} of all weights is no part of the {1 - self.sparsity:.4g} that sparsity={self.sparsity} keeps; give less"
            )

    def begun_with(self) -> tuple[str, ...]:
        return (*super().begun_with(), "threshold")

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        super().start(sites, memory)
        memory.tensors["threshold"] = torch.tensor(self.threshold, dtype=torch.float64)

    def rewire(self, step: Step) -> None:
        threshold, stays, pruned = step.memory.tensors["threshold"], [], 0
        for owned in step.weights:
            weight, before = shards.whole(owned.param.detach()), alive(owned.site)
            stay = before & (weight.abs() >= threshold.item())
            stay |= best(weight, before, 1)
            stays.append(stay)
            pruned += int(before.sum()) - int(stay.sum())
        aim = self.drop * sum(stay.numel() for stay in stays)
        if pruned < (1 - self.tolerance) * aim:
            threshold.mul_(2)
        elif pruned > (1 + self.tolerance) * aim:
            threshold.div_(2)
        survived, room = [int(stay.sum()) for stay in stays], [int((~stay).sum()) for stay in stays]
        for owned, stay, count in zip(step.weights, stays, shares(pruned, survived, room), strict=True):
            self.move_(step, owned, stay, best(chance(self.seed, step.number, owned.site), ~stay, count))
