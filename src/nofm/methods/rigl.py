"""RigL, the rigged lottery."""

from __future__ import annotations

from dataclasses import dataclass

from .. import shards, ste
from ..schedules import cosine
from .base import Step
from .options import check_given
from .rewiring import Rewiring, alive, best

__all__ = ["RigL"]


@dataclass(frozen=True)
class RigL(Rewiring):
    """Drops the smallest weights and grows where the gradient of the loss is largest, layer by layer.

    Paper: Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020, arXiv:1911.11134, Algorithm 1.

        every `every` steps, while t < end_at, for each layer:      k = floor(f(t) * |A|),  f(t) = drop / 2 * (1 + cos(pi t / end_at))
            A <- A \\ {the k smallest |W| of A}
            A <- A + {the k largest |dL/dW| outside of A};  weights that are new start at 0

    A are the layer's connections; one that is dropped and grown in the same step just stays. New connections have no momentum.

    The paper's numbers: every 100 steps, drop 0.3, erk or uniform; give `end_at` as about three quarters of the run. The paper rewires
    *instead* of a step of the optimizer, here the optimizer steps first: the loop is not ours. The gradient is that of the whole weight
    in every step, so a loop that clips its norm clips by the dense one; the optimizer sees that of A only.
    """

    end_at: int = 0  # must be given

    def __post_init__(self) -> None:
        check_given(self, "end_at", "the step from which on its masks stay, about three quarters of the steps that you train")
        super().__post_init__()

    def lens(self) -> ste.Lens:
        return ste.held

    def before_step(self, step: Step) -> None:
        for owned in step.weights:
            if self.rewires(step.number):
                step.carried[owned.site.key] = shards.whole_of(owned.grad, owned.param).clone()  # optimizers may write into theirs
            owned.grad.masked_fill_(~owned.mask(), 0.0)

    def rewire(self, step: Step) -> None:
        share = cosine(step.number, self.end_at, self.drop)
        for owned in step.weights:
            if owned.site.key not in step.carried:
                continue  # the optimizer has not called the closure that computes its gradients
            weight, before = shards.whole(owned.param.detach()), alive(owned.site)
            dropped = int(share * int(before.sum()))
            stay = best(weight, before, before.sum() - dropped)
            grow = best(step.carried[owned.site.key], ~stay, dropped)
            self.move_(step, owned, stay | (grow & before), grow & ~before)
