"""DEEP R, deep rewiring (Bellec et al. 2018, arXiv:1711.05136, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import shards
from ..layers import Site
from .base import Memory, Step
from .budget import check_weight
from .rewiring import Connections, alive, best, chance

__all__ = ["DeepRewiring"]


@dataclass(frozen=True)
class DeepRewiring(Connections):
    """A random walk over networks: a connection has a sign for life, dies when its weight would change sign, and another one is born.

        W_k = s_k * theta_k, with signs s_k = +-1 that never change, for all places k, pruned or not

        every step, for k in A:  theta_k <- theta_k - lr * dL/dtheta_k - lr * l1 + sqrt(2 * lr * temperature) * nu_k,   nu_k ~ N(0, 1)
                                 A <- A \\ {k : theta_k < 0}
                                 A <- A + as many of the places outside of A, at random, with theta = 0, until |A| is what it was

    A are the connections of a layer (the paper's K holds for each layer, or for all together; here for each). The signs are those of
    the starting weights, which are random as the paper's are, and are drawn where a starting weight is 0. The gradient step is the
    optimizer's, whatever it is; the other two terms are added after it, with its learning rate, and do not go through momentum.

    The released code has l1 = 1e-5 and at its learning rate of 0.5 the noise that `temperature` gives. As every step rewires, none can
    be captured in a CUDA graph.
    """

    l1: float = 1e-5
    temperature: float = 2.5e-11

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weight("l1", self.l1)
        check_weight("temperature", self.temperature)

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        for site in sites:
            weight, drawn = shards.whole(site.weight.detach()), chance(self.seed, 0, site, normal=True)
            memory.tensors[_name(site)] = torch.where(weight == 0, drawn, weight) < 0
        super().start(sites, memory)

    def phase(self, number: int) -> str | None:
        return None

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        for owned in step.weights:
            before, weight = alive(owned.site), owned.weight
            sign = 1 - 2 * shards.part_of(step.memory.tensors[_name(owned.site)], owned.param).to(weight.dtype)
            noise = shards.part_of(chance(self.seed, step.number, owned.site, normal=True), owned.param)
            weight.add_((2 * owned.lr * self.temperature) ** 0.5 * noise - owned.lr * self.l1 * sign)  # pruned ones are zeroed below
            stay = before & ~shards.whole_of(weight * sign < 0, owned.param)  # a NaN stays, to be complained about
            grow = best(chance(self.seed, step.number, owned.site), ~stay, before.sum() - stay.sum())
            self.move_(step, owned, stay, grow)


def _name(site: Site) -> str:
    return f"negative:{site.key}"
