"""SR-STE, the sparse-refined straight-through estimator: where and when its term is added.

The term is added once for each step that the optimizer takes, after the gradient has been reduced, accumulated and unscaled, so
`decay` means the same on one GPU and on eight, in fp32 and under a loss scale, and for a layer that a forward uses twelve times.
It is added after gradient clipping, which happens before the step, and is not clipped itself. `.grad` holds it after the step: a
loop that steps twice without zeroing gradients in between has the first step's term in the second too. (With `attach(fused=True)` it
does not: the term then is added in the optimizer's own pass over the weights, see `one_pass`.)

What is beyond the paper has files of its own: a dense or gradual start (`starts`), and the search for lambda (`flips`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from .. import ste
from ..errors import OptimizerError, swings
from ..kernels import ops
from ..kernels.steps import Term
from ..site import Site
from . import flips
from .base import Memory, Method, OwnedWeight, Step
from .flips import Search
from .options import check_one_of
from .starts import STAGES, Start

__all__ = ["SRSTE"]

Placement = Literal["gradient", "decoupled", "backward"]


@dataclass(frozen=True)
class SRSTE(Method):
    """Straight-through training with a decay on the pruned weights: SR-STE, the sparse-refined straight-through estimator.

    Paper: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", ICLR 2021, arXiv:2102.04010, Algorithm 1
    with Eq. 4, and Eq. 5 and 6 of its appendix.

        W <- W - lr * (g(S(W)) + decay * pruned * r)

        r = W                 refine="weight"      Eq. 4
        r = sign(W)           refine="sign"        Eq. 5
        r = lr * g(S(W))      refine="gradient"    Eq. 6, where the paper writes g(W) for "approximated gradients", which are these

    S(W) is the N:M weight, `pruned` is 1 where S(W) is zero. The term pulls pruned weights towards zero, so that fewer of them come
    back: the mask settles (lower SAD) and the straight-through gradient is wrong less often.

    decay="auto" is not of the paper: it looks for the lambda that calms masks, after Hu et al., "Accelerating Transformer Pre-training with
    2:4 Sparsity", ICML 2024, arXiv:2404.01847, who choose it by the flip rate r of masks. In each step of its probe, at the end of which
    log lambda is its mean over the second half:

        log lambda <- log lambda + 20 / probe * clip(3 * log(r with the term / (0.6 * r without)), -1, 1)

    decay      lambda_W of the paper; 0 is STE, and a negative one (the paper's ablation) pushes pruned weights back in. "auto": found
               in the first `probe` steps (1000) as the one at which the flip rate, the share of sparse weights whose mask bit
               changes in a step, comes to `target` (0.6 of STE's own), and kept from then on. After a dense or
               gradual start: in the first `probe` steps with the pattern; before, a gradual one has 2e-4. See `flips`.
    refine     "weight" (Eq. 4), "sign" (Eq. 5) or "gradient" (Eq. 6).
    placement  "gradient": added to the gradient, so it goes through momentum and Adam's normalisation (the paper).
               "decoupled": W <- W - lr * decay * term beside the optimizer's own update, as AdamW does with weight decay. Worth
               a try under Adam, with decay * (sum of learning rates) at 3 to 4, and from trained weights at 0.25 to 1. Holds the
               term, as large as the weights, while the optimizer steps.
               "backward": inside backward, as in the code released with the paper: the term then grows with micro-batches,
               with uses of the weight in a forward and with summed all-reduces, and shrinks under a loss scale. Only to repeat
               numbers made with that code.
    begin_at   a dense start: up to this step layers compute with all their weights, and there is no term.
    ramp_at    a gradual start instead: from this step on layers compute with fewer and fewer weights, and the others have the term. N
               falls from M in four times, the last of them at `begin_at`, by about the same factor: 8, 4, 2 and 1 at 1:16. Where M
               is small some of them are the same: 3, 3, 3 and 2 at 2:4. A compiled model is compiled for each of them, training and
               evaluation apart, and torch gives up after eight (`torch._dynamo.config.recompile_limit`).
    """

    decay: float | Literal["auto"] = 2e-4
    refine: ste.Refinement = "weight"
    placement: Placement = "gradient"
    target: float | None = None
    probe: int | None = None
    begin_at: int = 0
    ramp_at: int | None = None

    # ---- the two moments of a step ----

    def before_step(self, step: Step) -> None:
        if self._start.stage(step.number - 1) == 0 or self.placement == "backward" or self._decay(step) == 0:
            return
        spares = self._probes(step.number) and self.target is None
        left = step.weights
        if self.placement == "gradient" and not spares:
            left = self._add_by_kernels(step)
        for owned in left:
            term = self._term(owned, step.grad_scale)
            term = flips.spare_control_(term, owned) if spares else term
            if self.placement == "decoupled":
                step.carried[owned.site.key] = term * owned.lr
            else:
                scaled = term if step.grad_scale is None else term * step.grad_scale
                owned.grad.add_(scaled, alpha=self._factor(step, owned))

    def after_step(self, step: Step) -> None:
        for owned in step.weights:
            if owned.site.key in step.carried:
                owned.weight.sub_(step.carried[owned.site.key], alpha=self._decay(step))
        if self._search is not None and self._search.probes(step.number):
            self._search.look(step)
        if self._start.changes_in(step.number):
            all_weights = (*step.weights, *step.resting)
            for owned in all_weights:
                self._look(owned.site, step.number)
            if self._probes(step.number + 1):
                flips.remember(all_weights, step.memory)

    def _term(self, owned: OwnedWeight, grad_scale: Tensor | None) -> Tensor:
        grad = owned.grad if grad_scale is None else owned.grad / grad_scale
        descent = grad if owned.descends else -grad
        return ste.refinement(owned.weight, owned.mask(), self.refine, descent, owned.lr)

    def _add_by_kernels(self, step: Step) -> Sequence[OwnedWeight]:
        """Add the term to all gradients that a kernel serves, in one pass over weights and gradients; returns the others."""
        if self.refine == "gradient":
            return step.weights
        weights: list[Tensor] = [o.param if type(o.param) is nn.Parameter else o.weight for o in step.weights]
        grads, groupings = [owned.grad for owned in step.weights], [owned.site.seen_grouping for owned in step.weights]
        factors = [self._factor(step, owned) for owned in step.weights]
        rest = ops.refine_all_(step.fleet, weights, groupings, grads, factors, step.grad_scale, sign=self.refine == "sign")
        return [step.weights[i] for i in rest]

    def _factor(self, step: Step, owned: OwnedWeight) -> float:
        return self._decay(step) if owned.descends else -self._decay(step)

    def _decay(self, step: Step) -> float:
        return flips.decay_of(step.memory) if self.decay == "auto" else self.decay

    def acts_in_steps(self) -> bool:
        return self.begin_at > 0 or (self.decay != 0 and self.placement != "backward")  # else it is STE, or all in the lens

    def too_strong(self, lr: float, is_plain: bool, number: int) -> str:
        if self.decay == "auto" or self._start.stage(number - 1) == 0:
            return ""
        if not (swinging := swings(self.decay, lr, self.refine, self.placement, is_plain)):
            return ""
        return (
            f"SRSTE's decay times the learning rate is {self.decay:g} * {lr:g} = {self.decay * lr:g} and must be below 1, or {swinging}; "
            "clipping gradients does not help, since the term is added after it"
        )

    def fusible(self) -> bool:
        return self.placement != "backward"

    def term(self, step: Step) -> Term | None:
        is_dense = self._start.stage(step.number - 1) == 0
        if is_dense or self._probes(step.number):  # a probe has a control without the term, and looks at flips
            return None
        return Term(self._decay(step), self.refine, self.placement == "decoupled")

    # ---- how layers see their weights ----

    def begin(self, site: Site) -> None:
        self._look(site, 0)

    def go_on(self, sites: Sequence[Site], number: int) -> None:
        for site in sites:
            self._look(site, number)

    def _look(self, site: Site, number: int) -> None:
        if (lens := self._start.lens(site, number)) is None:
            is_released = self.decay != "auto" and self.placement == "backward"
            lens = ste.RefinedBackward(float(self.decay), self.refine) if is_released else ste.straight_through
        site.look_through(lens)

    # ---- options: what they mean, and when what they ask for is done ----

    @property
    def _start(self) -> Start:
        return Start(self.begin_at, self.ramp_at)

    @property
    def _search(self) -> Search | None:
        return Search(self.begin_at, self.meant("probe", self.probe), self.target) if self.decay == "auto" else None

    def _probes(self, number: int) -> bool:
        return self._search is not None and self._search.probes(number)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("refine", self.refine, ste.Refinement)
        check_one_of("placement", self.placement, Placement)
        is_number = isinstance(self.decay, int | float) and not isinstance(self.decay, bool) and math.isfinite(self.decay)
        if not is_number and not (isinstance(self.decay, str) and self.decay == "auto"):
            raise OptimizerError(f'decay={self.decay!r} is no finite number and not "auto"; the paper uses 2e-4')
        flips.check_options(self.decay, self.target, self.probe)
        self._start.check()
        if self.placement == "backward":
            self._check_backward()

    def _check_backward(self) -> None:
        for is_given, why in (
            (self.refine == "gradient", 'refine="gradient" needs the learning rate, which backward does not know'),
            (self.decay == "auto", 'decay="auto" changes from step to step, which backward does not know'),
            (self.ramp_at is not None, 'ramp_at is not in the released code, which placement="backward" repeats'),
        ):
            if is_given:
                raise OptimizerError(f'{why}; use placement="gradient"')

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        super().start(sites, memory)
        if self.decay == "auto":
            flips.watch(sites, memory, self.meant("probe", self.probe))

    def remembers(self) -> tuple[str, ...]:
        return ("decay",) if self.decay == "auto" else ()

    def begun_with(self) -> tuple[str, ...]:
        return ("decay",) if self.decay == "auto" else ()

    def meant(self, option: str, value: Any) -> Any:
        return flips.PROBE if option == "probe" and value is None else value

    def takes_back(self, options: Mapping[str, Any], sites: Sequence[Site], number: int) -> str:
        begin_at, ramp_at, probe, target = (options.get(name, getattr(self, name)) for name in ("begin_at", "ramp_at", "probe", "target"))
        gone = self._start.gives_back(Start(begin_at, ramp_at), sites, number)
        return gone or ("" if self._search is None else self._search.spoils(Search(begin_at, self.meant("probe", probe), target), number))

    def counts_steps(self) -> bool:
        return self.decay == "auto" or self.begin_at > 0

    def phase(self, number: int) -> str | None:
        if self._probes(number) or self._start.changes_in(number):
            return None
        stage = self._start.stage(number)
        return "dense" if stage == 0 else "train" if stage == STAGES else f"narrowing {stage}"

    def found(self, number: int, memory: Memory) -> dict[str, float]:
        return {"decay": flips.decay_of(memory)} if self._search is not None and self._search.is_over(number) else {}

    def unfinished(self, sites: Sequence[Site], memory: Memory, number: int) -> str:
        return self._start.unfinished(number) or ("" if self._search is None else self._search.unfinished(number))
