"""SNIP, single-shot network pruning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import shards, ste
from ..errors import OptimizerError
from ..site import Site
from .base import Memory, Method, OwnedWeight, Step
from .inside import clear_, states_of
from .options import check_share, check_whole
from .pruning import budget_of, check_masks, keep_zero_, owned_of, put_on_, set_budget, strongest, whole_weights

__all__ = ["SNIP"]


@dataclass(frozen=True)
class SNIP(Method):
    """Prunes once, by the gradients of the first batches, and then trains what is left.

    Paper: Lee, Ajanthan & Torr, "SNIP: Single-shot Network Pruning based on Connection Sensitivity", ICLR 2019, arXiv:1810.02340,
    Algorithm 1.

        c_j = |g_j * w_j| / sum_k |g_k * w_k|           connection sensitivity: how much the loss would feel it if w_j went away
        mask <- the (1 - sparsity) * n largest of c, over all layers together

    Before training, from one batch. The mask never changes. The sum in the denominator is the same for all, so it is left out.

    sparsity  share of all sparse weights that is pruned.
    batches   over how many steps' gradients the sensitivity is taken: the first ones. The paper takes one batch of about 100 images.

    In those steps no sparse weight moves, and what the optimizer remembers of them is cleared at the end, so that training starts
    from the initial weights, as in the paper. Other parameters (biases, norms) do take the step.
    """

    unstructured: ClassVar[bool] = True

    sparsity: float = 0.9
    batches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("sparsity", self.sparsity)
        check_whole("batches", self.batches, least=1)

    def begun_with(self) -> tuple[str, ...]:
        return ("sparsity", "batches")

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        set_budget(sites, memory, self.sparsity, "global")
        check_masks(sites, memory, self.sparsity, exactly=True)
        for site in sites:
            if site.stored_mask is None:
                site.look_through(ste.dense)

    def phase(self, number: int) -> str | None:
        return None if number <= self.batches else "frozen"

    def unfinished(self, sites: Sequence[Site], memory: Memory, number: int) -> str:
        return f"it prunes at step {self.batches} (batches)" if any(site.stored_mask is None for site in sites) else ""

    def before_step(self, step: Step) -> None:
        for owned in self._measured(step):
            step.carried[f"{owned.site.key}:weight"] = owned.weight.clone()
            step.carried[owned.site.key] = owned.grad.clone() if step.grad_scale is None else owned.grad / step.grad_scale
            owned.grad.zero_()

    def after_step(self, step: Step) -> None:
        # Not before the step: a fused optimizer may skip one whose gradients are not finite.
        for owned in self._measured(step):
            owned.weight.copy_(step.carried[f"{owned.site.key}:weight"])
            name = f"{owned.site.key}:grad"
            grad = shards.whole_of(step.carried[owned.site.key], owned.param)
            step.memory.tensors[name] = step.memory.tensors[name] + grad if name in step.memory.tensors else grad
        if step.number == self.batches and any(owned.site.stored_mask is None for owned in owned_of(step)):
            _prune(step)
        keep_zero_(step)

    def _measured(self, step: Step) -> list[OwnedWeight]:
        return [owned for owned in step.weights if step.number <= self.batches and owned.site.stored_mask is None]


def _prune(step: Step) -> None:
    owned, held = owned_of(step), step.memory.tensors
    for one in owned:
        if f"{one.site.key}:grad" not in held:
            raise OptimizerError(f"{one.site.key} had no gradient in the first batches, so nothing is known of it; add it to skip")
    scores: list[Tensor] = [held.pop(f"{one.site.key}:grad") * weight for one, weight in zip(owned, whole_weights(owned), strict=True)]
    for one, mask in zip(owned, strongest(scores, budget_of(step)), strict=True):
        put_on_(one.site, one.param, mask)
        for optimizer in step.memory.optimizers:
            for inside, state in states_of(optimizer, one.param):
                clear_(state, inside)
