"""ASP: train dense, prune once by magnitude, freeze the mask, train again: the rival of the paper's Table 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .. import shards, ste
from ..errors import OptimizerError
from ..masks import check_finite
from ..site import Site
from .base import Memory, Method, Step
from .pruning import put_on_

__all__ = ["ASP"]


@dataclass(frozen=True)
class ASP(Method):
    """Two stages. Up to step `prune_at` layers are dense; then the mask of each weight is made and never changes again.

    Paper: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021, arXiv:2104.08378, and NVIDIA's ASP (automatic sparsity), which
    is it in code; the three steps listed in section 1 of Zhou et al., ICLR 2021, arXiv:2102.04010.

        t < prune_at:   W <- W - lr * g(W)
        t = prune_at:   W <- W - lr * g(W),  then  E = 1 for the N largest |W| of every M, 0 for the others,  W <- E * W
        t > prune_at:   W <- E * (W - lr * (E * g(W)))

    Pruned weights are zero from then on: they get no gradient, and whatever momentum or weight decay does to them in a step is
    undone after it. `prune_at=0` prunes at once, for a model that is trained already. The second stage "repeats the training",
    so the learning-rate schedule should start anew at `prune_at`.
    """

    prune_at: int = 0

    def counts_steps(self) -> bool:
        return self.prune_at > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.prune_at, bool) or not isinstance(self.prune_at, int) or self.prune_at < 0:
            raise OptimizerError(f"prune_at={self.prune_at!r} is no step; give a whole number, 0 to prune at once")

    def begin(self, site: Site) -> None:
        if site.stored_mask is not None:
            return  # frozen already, by an ASP that was detached
        if self.prune_at == 0:
            _prune(site, site.weight, step=0)
        else:
            site.look_through(ste.dense)

    def phase(self, number: int) -> str | None:
        return None if number == self.prune_at else "dense" if number < self.prune_at else "frozen"

    def is_late(self, sites: Sequence[Site], memory: Memory, number: int) -> bool:
        return number >= self.prune_at and _has_dense(sites)

    def unfinished(self, sites: Sequence[Site], memory: Memory, number: int) -> str:
        when = f"at step {self.prune_at} (prune_at)" if number < self.prune_at else f"in the next step (prune_at={self.prune_at} is past)"
        return f"it prunes {when}" if _has_dense(sites) else ""

    def after_step(self, step: Step) -> None:
        for owned in (*step.weights, *step.resting):
            if owned.site.stored_mask is not None:
                owned.weight.masked_fill_(~owned.mask(), 0.0)
            elif step.number >= self.prune_at:
                _prune(owned.site, owned.param, step.number)


def _has_dense(sites: Sequence[Site]) -> bool:
    return any(site.stored_mask is None for site in sites)


def _prune(site: Site, param: nn.Parameter, step: int) -> None:
    weight = shards.whole(param.detach())
    check_finite(weight, site.key, step)
    put_on_(site, param, site.grouping.mask(weight))
