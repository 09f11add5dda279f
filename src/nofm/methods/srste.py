"""SR-STE, the sparse-refined straight-through estimator (paper section 3.3, Eq. 4; Appendix, Eq. 5 and 6).

    W <- W - lr * (g(S(W)) + decay * pruned * r)      r = W (Eq. 4) | sign(W) (Eq. 5) | lr * g(S(W)) (Eq. 6)

S(W) is the N:M weight, `pruned` is 1 where S(W) is zero. The term pulls pruned weights towards zero, so that fewer of them come
back: the mask settles (lower SAD) and the straight-through gradient is wrong less often.

The term is added once for each step that the optimizer takes, after the gradient has been reduced, accumulated and unscaled, so
`decay` means the same on one GPU and on eight, in fp32 and under a loss scale, and for a layer that a forward uses twelve times.
It is added after gradient clipping, which happens before the step, and is not clipped itself. `.grad` holds it after the step: a
loop that steps twice without zeroing gradients in between has the first step's term in the second too. (With `attach(fused=True)` it
does not: the term then is added in the optimizer's own pass over the weights, see `one_pass`.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from .. import ste
from ..errors import OptimizerError
from ..kernels import ops
from ..kernels.steps import Term
from ..site import Site
from . import flips
from .base import Memory, Method, OwnedWeight, Step
from .budget import check_whole

__all__ = ["SRSTE"]

Placement = Literal["gradient", "decoupled", "backward"]


@dataclass(frozen=True)
class SRSTE(Method):
    """Straight-through training with a decay on the pruned weights.

    decay      lambda_W of the paper; 0 is STE, and a negative one (the paper's ablation) pushes pruned weights back in. "auto": found
               in the first `probe` steps (1000) as the one at which the flip rate, the share of sparse weights whose mask bit
               changes in a step, comes to `target` (0.6 of STE's own), and kept from then on. See `flips`.
    refine     "weight" (Eq. 4), "sign" (Eq. 5) or "gradient" (Eq. 6).
    placement  "gradient": added to the gradient, so it goes through momentum and Adam's normalisation (the paper).
               "decoupled": W <- W - lr * decay * term beside the optimizer's own update, as AdamW does with weight decay. Try it
               first under Adam, with decay * (sum of learning rates) at 3 to 5. Holds the term, as large as the weights, while the
               optimizer steps.
               "backward": inside backward, as in the code released with the paper: the term then grows with micro-batches,
               with uses of the weight in a forward and with summed all-reduces, and shrinks under a loss scale. Only to repeat
               numbers made with that code.
    begin_at   a dense start: up to this step layers compute with all their weights, and there is no term.
    """

    decay: float | Literal["auto"] = 2e-4
    refine: ste.Refinement = "weight"
    placement: Placement = "gradient"
    target: float | None = None
    probe: int | None = None
    begin_at: int = 0

    def __post_init__(self) -> None:
        for field, value, allowed in (("refine", self.refine, ste.Refinement), ("placement", self.placement, Placement)):
            if value not in get_args(allowed):
                raise OptimizerError(f"{field}={value!r} is not one of {', '.join(map(repr, get_args(allowed)))}")
        is_number = isinstance(self.decay, int | float) and not isinstance(self.decay, bool) and math.isfinite(self.decay)
        if self.decay != "auto" and not is_number:
            raise OptimizerError(f'decay={self.decay!r} is no finite number and not "auto"; the paper uses 2e-4')
        if self.placement == "backward" and self.refine == "gradient":
            raise OptimizerError('refine="gradient" needs the learning rate, which backward does not know; use placement="gradient"')
        if self.placement == "backward" and self.decay == "auto":
            raise OptimizerError('decay="auto" changes from step to step, which backward does not know; use placement="gradient"')
        flips.check_options(self.decay, self.target, self.probe)
        check_whole("begin_at", self.begin_at)
        if self.begin_at and self.decay == "auto":
            raise OptimizerError('begin_at has no effect with decay="auto", which looks at masks from the first step on; give one of them')

    def begin(self, site: Site) -> None:
        if self.begin_at:
            site.look_through(ste.dense)
        else:
            self._mask(site)

    def go_on(self, sites: Sequence[Site], number: int) -> None:
        for site in sites:
            if number >= self.begin_at:
                self._mask(site)
            else:
                site.look_through(ste.dense)

    def _mask(self, site: Site) -> None:
        fixed = self.decay != "auto" and self.placement == "backward"
        site.look_through(ste.RefinedBackward(float(self.decay), self.refine) if fixed else ste.straight_through)

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        super().start(sites, memory)
        if self.decay == "auto":
            flips.watch(sites, memory)

    def phase(self, number: int) -> str | None:
        if self._probes(number) or 0 < number == self.begin_at:
            return None
        return "dense" if number < self.begin_at else "train"

    def found(self, number: int, memory: Memory) -> dict[str, float]:
        return {"decay": flips.decay_of(memory)} if self.decay == "auto" and not self._probes(number + 1) else {}

    def _probes(self, number: int) -> bool:
        return self.decay == "auto" and number <= (self.probe or flips.PROBE)

    def _decay(self, step: Step) -> float:
        return flips.decay_of(step.memory) if self.decay == "auto" else self.decay

    def counts_steps(self) -> bool:
        return self.decay == "auto" or self.begin_at > 0

    def fusible(self) -> bool:
        return self.placement != "backward"

    def term(self, step: Step) -> Term | None:
        starts_dense = step.number <= self.begin_at
        if starts_dense or self._probes(step.number):  # a probe has a control without the term, and looks at flips
            return None
        return Term(self._decay(step), self.refine, self.placement == "decoupled")

    def before_step(self, step: Step) -> None:
        if step.number <= self.begin_at or self.placement == "backward" or self._decay(step) == 0:
            return
        spares = self._probes(step.number) and self.target is None
        for owned in step.weights if spares or self.placement == "decoupled" else self._by_kernels(step):
            term = self._term(owned, step.grad_scale)
            term = flips.spare_control_(term, owned) if spares else term
            if self.placement == "decoupled":
                step.carried[owned.site.key] = term * owned.lr
            else:
                scaled = term if step.grad_scale is None else term * step.grad_scale
                owned.grad.add_(scaled, alpha=self._factor(step, owned))

    def _factor(self, step: Step, owned: OwnedWeight) -> float:
        return self._decay(step) if owned.descends else -self._decay(step)

    def _by_kernels(self, step: Step) -> Sequence[OwnedWeight]:
        """Add the term to all gradients that a kernel serves, in one pass over weights and gradients; returns the others."""
        if self.refine == "gradient":
            return step.weights
        decay = self._decay(step)
        weights: list[Tensor] = [o.param if type(o.param) is nn.Parameter else o.weight for o in step.weights]
        grads, groupings = [owned.grad for owned in step.weights], [owned.site.grouping for owned in step.weights]
        factors = [decay if owned.descends else -decay for owned in step.weights]
        rest = ops.refine_all_(step.fleet, weights, groupings, grads, factors, step.grad_scale, sign=self.refine == "sign")
        return [step.weights[i] for i in rest]

    def after_step(self, step: Step) -> None:
        for owned in step.weights:
            if owned.site.key in step.carried:
                owned.weight.sub_(step.carried[owned.site.key], alpha=self._decay(step))
        if self._probes(step.number):
            flips.search(step, self.target, self.probe or flips.PROBE)
        if step.number == self.begin_at:
            for owned in (*step.weights, *step.resting):
                self._mask(owned.site)

    def _term(self, owned: OwnedWeight, grad_scale: Tensor | None) -> Tensor:
        grad = owned.grad if grad_scale is None else owned.grad / grad_scale
        descent = grad if owned.descends else -grad
        return ste.refinement(owned.weight, owned.mask(), self.refine, descent, owned.lr)
