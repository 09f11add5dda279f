"""SET, sparse evolutionary training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import shards
from .base import Step
from .rewiring import Rewiring, alive, best, chance

__all__ = ["SET"]


@dataclass(frozen=True)
class SET(Rewiring):
    """Drops the weights nearest to zero and grows as many at random places, layer by layer.

    Paper: Mocanu et al., "Scalable Training of Artificial Neural Networks with Adaptive Sparse Connectivity inspired by Network Science",
    Nature Communications 2018, arXiv:1707.04780, Algorithm 1.

        every `every` steps, for each layer:  A <- A \\ {the drop * |A+| smallest of A+, the drop * |A-| largest of A-}
                                              A <- A + |dropped| of the places outside of A, at random; their weights start at 0

    A are the layer's connections, A+ and A- those with a positive and a negative weight; a weight of exactly 0 counts as positive and
    goes first. The numbers of both signs are rounded down. A place that has just been dropped can be drawn again and starts anew.

    The paper rewires once an epoch, drops 0.3 and starts from an Erdos-Renyi graph, which `allocation="erk"` is for linear layers. It
    lets the last epoch drop without growing; here the number of connections never changes. With which weight a connection begins its
    Algorithm 1 does not say, and the authors' code has two answers: 0 in Keras, as here, and randn() / 10 in their own sparse matrices.
    """

    def rewire(self, step: Step) -> None:
        for owned in step.weights:
            weight, before = shards.whole(owned.param.detach()), alive(owned.site)
            stay = torch.zeros_like(before)
            for side in (before & ~(weight < 0), before & (weight < 0)):  # a NaN is on one of them too, and will be complained about
                count = int(side.sum())
                stay |= best(weight, side, count - int(self.drop * count))
            grow = best(chance(self.seed, step.number, owned.site), ~stay, before.sum() - stay.sum())
            self.move_(step, owned, stay, grow)
