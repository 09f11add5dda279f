"""SNFS, sparse networks from scratch by sparse momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import shards, ste
from ..schedules import constant, cosine
from ..site import Site
from .base import Memory, Step
from .budget import Allocation, shares
from .options import check_share
from .rewiring import Rewiring, alive, best

__all__ = ["SNFS"]


@dataclass(frozen=True)
class SNFS(Rewiring):
    """Smoothed gradients decide which layers get the weights that all layers drop, and where in a layer they grow.

    Paper: Dettmers & Zettlemoyer, "Sparse Networks from Scratch: Faster Training without Losing Performance", 2019, arXiv:1907.04840,
    Algorithm 1.

        every step, for each layer i:          M_i <- smoothing * M_i + (1 - smoothing) * dL/dW_i
        every `every` steps:     r_i = mean of |M_i| over A_i, k_i = floor(f(t) * |A_i|)
            A_i <- A_i \\ {the k_i smallest |W_i| of A_i}
            A_i <- A_i + {the largest |M_i| outside of A_i, r_i / sum r of all k in number};  weights that are new start at 0

    A_i are the connections of layer i. f(t) = drop, or with `end_at` drop / 2 * (1 + cos(pi t / end_at)). A layer that would grow more
    than it has places for is full, and the others share the rest. A connection that is dropped and grown in the same step just stays.

    The released code drops 0.5 with the cosine, starts uniform, and rewires at the end of an epoch. It takes the optimizer's momentum for
    M; here M is kept apart, so that it is the same under every optimizer. It lets the number of connections drift and corrects it later;
    here it never changes. M is of the whole weight, and under FSDP2 every process has all of it. As for RigL, clipping sees the dense
    gradient, the optimizer that of A only.
    """

    allocation: Allocation = "uniform"
    drop: float = 0.5
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("smoothing", self.smoothing)

    def lens(self) -> ste.Lens:
        return ste.held

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        super().start(sites, memory)
        for site in sites:
            memory.tensors[_name(site)] = torch.zeros_like(shards.whole(site.weight.detach()))  # in its layout, as gradients are

    def before_step(self, step: Step) -> None:
        for owned in step.weights:
            grad = shards.whole_of(owned.grad, owned.param)
            grad = grad if step.grad_scale is None else grad / step.grad_scale
            # Kept aside until the step is done: one that a gradient scaler skips must leave no trace.
            step.carried[owned.site.key] = torch.lerp(grad, step.memory.tensors[_name(owned.site)], self.smoothing)
            owned.grad.masked_fill_(~owned.mask(), 0.0)

    def after_step(self, step: Step) -> None:
        for owned in step.weights:
            if owned.site.key in step.carried:  # not where the optimizer has not called its closure
                step.memory.tensors[_name(owned.site)].copy_(step.carried[owned.site.key])
        super().after_step(step)

    def rewire(self, step: Step) -> None:
        share = constant(step.number, self.drop) if self.end_at is None else cosine(step.number, self.end_at, self.drop)
        stays, momenta, dropped = [], [], 0
        for owned in step.weights:
            weight, before = shards.whole(owned.param.detach()), alive(owned.site)
            count = int(before.sum())
            stays.append(best(weight, before, count - int(share * count)))
            dropped += int(share * count)
            momenta.append(float(step.memory.tensors[_name(owned.site)][before].abs().mean(dtype=torch.float64)))
        room = [int((~stay).sum()) for stay in stays]
        for owned, stay, count in zip(step.weights, stays, shares(dropped, momenta, room), strict=True):
            before, grow = alive(owned.site), best(step.memory.tensors[_name(owned.site)], ~stay, count)
            self.move_(step, owned, stay | (grow & before), grow & ~before)


def _name(site: Site) -> str:
    return f"smoothed:{site.key}"
