"""DEEP R, deep rewiring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import shards
from ..kernels import selection
from ..site import Site
from .base import Memory, Step
from .draws import draw
from .options import check_weight
from .rewiring import Connections, alive

__all__ = ["DeepRewiring"]


@dataclass(frozen=True)
class DeepRewiring(Connections):
    """A random walk over networks: a connection has a sign for life, dies when its weight would change sign, and another one is born.

    Paper: Bellec et al., "Deep Rewiring: Training very sparse deep networks", ICLR 2018, arXiv:1711.05136, Algorithm 1.

        W_k = s_k * theta_k, with signs s_k = +-1 that never change, for all places k, pruned or not

        every step, for k in A:  theta_k <- theta_k - lr * dL/dtheta_k - lr * l1 + sqrt(2 * lr * temperature) * nu_k,   nu_k ~ N(0, 1)
                                 A <- A \\ {k : theta_k < 0}
                                 A <- A + as many of the places outside of A, at random, with theta = 0, until |A| is what it was

    A are the connections of a layer (the paper's K holds for each layer, or for all together; here for each). The signs are those of
    the starting weights, which are random as the paper's are, and are drawn where a starting weight is 0. The gradient step is the
    optimizer's, whatever it is; the other two terms are added after it, with its learning rate, and do not go through momentum.

    The released code has l1 = 1e-5 and at its learning rate of 0.5 the noise that `temperature` gives. Every step rewires, and all are
    alike to the device, which counts them and draws by their number (`draws`): a CUDA graph can hold them.
    """

    l1: float = 1e-5
    temperature: float = 2.5e-11

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weight("l1", self.l1)
        check_weight("temperature", self.temperature)

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        for site in sites:
            weight = shards.whole(site.weight.detach())
            number = memory.tensors[_number(site)] = torch.zeros((), dtype=torch.int64, device=weight.device)
            drawn = draw(self.seed, site.key, number, weight.shape).normal
            memory.tensors[_negative(site)] = torch.where(weight == 0, drawn, weight) < 0
        super().start(sites, memory)

    def after_step(self, step: Step) -> None:
        super().after_step(step)
        held = step.memory.tensors
        for owned in (*step.weights, *step.resting):
            held[_number(owned.site)].add_(1)
        stays, scores, counts = [], [], []
        for owned in step.weights:
            before, weight = alive(owned.site), owned.weight
            drawn = draw(self.seed, owned.site.key, held[_number(owned.site)], before.shape)
            sign = 1 - 2 * shards.part_of(held[_negative(owned.site)], owned.param).to(weight.dtype)
            # A tensor in any case, so that its square root is rounded alike whether or not a graph keeps it on the device.
            lr = owned.lr if isinstance(owned.lr, Tensor) else torch.full((), owned.lr, device=weight.device)
            noise = shards.part_of(drawn.normal, owned.param)
            weight.add_((2 * self.temperature * lr).sqrt() * noise - self.l1 * lr * sign)  # pruned ones are zeroed below
            stay = before & ~shards.whole_of(weight * sign < 0, owned.param)  # a NaN stays, to be complained about
            stays.append(stay)
            scores.append(drawn.uniform)
            counts.append(before.sum() - stay.sum())
        grows = selection.largest(scores, counts, [~stay for stay in stays])
        for owned, stay, grow in zip(step.weights, stays, grows, strict=True):
            self.move_(step, owned, stay, grow)


def _negative(site: Site) -> str:
    return f"negative:{site.key}"


def _number(site: Site) -> str:
    return f"number:{site.key}"
