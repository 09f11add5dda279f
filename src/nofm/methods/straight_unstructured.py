"""The straight-through estimator without groups: the k largest weights of a layer, or of the network, at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .. import shards, ste
from ..site import Site
from .base import Memory, Method, Step
from .options import check_one_of, check_share
from .pruning import Pool, budget_of, owned_of, set_budget, strongest, whole_weights

__all__ = ["UnstructuredSTE"]


@dataclass(frozen=True)
class UnstructuredSTE(Method):
    """Layers compute with the largest weights only; the gradient goes to all of them, kept and pruned alike.

    Paper: Bengio, Leonard & Courville, "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation", 2013,
    arXiv:1308.3432; Eq. 3 of Zhou et al., ICLR 2021, arXiv:2102.04010, with the N:M constraint taken away.

        S(W) = W where |W| is among the k largest, 0 elsewhere
        W <- W - lr * g(S(W))

    sparsity    share of all sparse weights that is pruned.
    allocation  "uniform": the same share of every layer. "erk": see `budget`. "global": the largest of the whole network.

    Masks are made after every step and stored until the next, since no layer sees the others.
    """

    unstructured: ClassVar[bool] = True

    sparsity: float = 0.9
    allocation: Pool = "uniform"

    def counts_steps(self) -> bool:
        return False  # masks follow from the weights

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("sparsity", self.sparsity)
        check_one_of("allocation", self.allocation, Pool)

    def begun_with(self) -> tuple[str, ...]:
        return ("sparsity", "allocation")

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        budget = set_budget(sites, memory, self.sparsity, self.allocation)
        masks = strongest([shards.whole(site.weight.detach()) for site in sites], budget)
        for site, mask in zip(sites, masks, strict=True):
            site.freeze(mask, ste.held)

    def after_step(self, step: Step) -> None:
        owned = owned_of(step)
        for one, mask in zip(owned, strongest(whole_weights(owned), budget_of(step)), strict=True):
            one.site.freeze(mask, ste.held)
