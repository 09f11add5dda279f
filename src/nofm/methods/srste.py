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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn

from .. import ste
from ..errors import OptimizerError
from ..kernels import ops
from ..kernels.steps import Term
from ..masks import Grouping
from ..patterns import Pattern
from ..site import Site
from . import flips
from .base import Memory, Method, OwnedWeight, Step
from .budget import check_whole

__all__ = ["SRSTE"]

Placement = Literal["gradient", "decoupled", "backward"]
_OF_SEARCHES = ("begin_at", "probe", "target")  # options that a search for lambda goes by
_STAGES = 4  # of a gradual start, the last being the pattern


@dataclass(frozen=True)
class SRSTE(Method):
    """Straight-through training with a decay on the pruned weights.

    decay      lambda_W of the paper; 0 is STE, and a negative one (the paper's ablation) pushes pruned weights back in. "auto": found
               in the first `probe` steps (1000) as the one at which the flip rate, the share of sparse weights whose mask bit
               changes in a step, comes to `target` (0.6 of STE's own), and kept from then on. After a dense or
               gradual start: in the first `probe` steps with the pattern; before, a gradual one has 2e-4. See `flips`.
    refine     "weight" (Eq. 4), "sign" (Eq. 5) or "gradient" (Eq. 6).
    placement  "gradient": added to the gradient, so it goes through momentum and Adam's normalisation (the paper).
               "decoupled": W <- W - lr * decay * term beside the optimizer's own update, as AdamW does with weight decay. Try it
               first under Adam, with decay * (sum of learning rates) at 3 to 5. Holds the term, as large as the weights, while the
               optimizer steps.
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
        if self.ramp_at is not None:
            check_whole("ramp_at", self.ramp_at)
            if self.ramp_at >= self.begin_at:
                needs = f"must be below begin_at, {self.begin_at}," if self.begin_at else "needs a later begin_at,"
                raise OptimizerError(f"ramp_at={self.ramp_at}: {needs} where the pattern is reached")
            if self.placement == "backward":
                raise OptimizerError('ramp_at is not in the released code, which placement="backward" repeats; use placement="gradient"')

    def begin(self, site: Site) -> None:
        self._look(site, self._stage(0))

    def go_on(self, sites: Sequence[Site], number: int) -> None:
        for site in sites:
            self._look(site, self._stage(number))

    def takes_back(self, options: Mapping[str, Any], sites: Sequence[Site], number: int) -> str:
        return self._gives_back(options, sites, number) or self._searches_otherwise(options, number)

    def _searches_otherwise(self, options: Mapping[str, Any], number: int) -> str:
        """What a search for lambda that the state was made by would come to; "" where it is as it was, or over."""
        mine = {name: getattr(self, name) for name in _OF_SEARCHES}
        was, now = ([self.meant(name, of.get(name, mine[name])) for name in _OF_SEARCHES] for of in (options, mine))
        ended, ends = was[0] + was[1], now[0] + now[1]
        if self.decay != "auto" or was == now or number >= max(ended, ends):
            return ""
        return f"its search for lambda would {'be cut off' if number >= ends else 'go on otherwise' if number < ended else 'begin again'}"

    def _gives_back(self, options: Mapping[str, Any], sites: Sequence[Site], number: int) -> str:
        """Which layers would have more weights again."""
        was = _stage(number, options.get("begin_at", self.begin_at), options.get("ramp_at", self.ramp_at))
        seen = [(site, _seen(site, was), _seen(site, self._stage(number))) for site in sites]
        wider = [each for each in seen if each[2].n > each[1].n]
        if number == 0 or not wider:
            return ""
        site, before, after = wider[0]
        others = f" and {len(wider) - 1} more go" if len(wider) > 1 else " goes"
        harmless = f", which up to step {number} changes nothing" if was == _STAGES else ""
        return (
            f"{site.name}{others} from {before} back to {'dense' if after.n == after.m else after} at step {number}, until step "
            f"{self.begin_at} (begin_at{harmless})"
        )

    def _stage(self, number: int) -> int:
        return _stage(number, self.begin_at, self.ramp_at)

    def _look(self, site: Site, stage: int) -> None:
        if stage == 0:
            site.look_through(ste.dense)
        elif (seen := _between(site.grouping, stage / _STAGES)) != site.grouping:
            site.look_through(ste.Wider(seen))
        elif self.decay != "auto" and self.placement == "backward":
            site.look_through(ste.RefinedBackward(float(self.decay), self.refine))
        else:
            site.look_through(ste.straight_through)

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        super().start(sites, memory)
        if self.decay == "auto":
            flips.watch(sites, memory)

    def remembers(self) -> tuple[str, ...]:
        return ("decay",) if self.decay == "auto" else ()

    def begun_with(self) -> tuple[str, ...]:
        return ("decay",) if self.decay == "auto" else ()

    def meant(self, option: str, value: Any) -> Any:
        return flips.PROBE if option == "probe" and value is None else value

    def phase(self, number: int) -> str | None:
        stage = self._stage(number - 1)
        if self._probes(number) or stage != self._stage(number):
            return None
        return "dense" if stage == 0 else "train" if stage == _STAGES else f"narrowing {stage}"

    def found(self, number: int, memory: Memory) -> dict[str, float]:
        is_over = self.decay == "auto" and number >= self.begin_at + self._probe_steps
        return {"decay": flips.decay_of(memory)} if is_over else {}

    def unfinished(self, sites: Sequence[Site], memory: Memory, number: int) -> str:
        if number < self.begin_at:
            start = "dense start lasts until" if self.ramp_at is None else f"gradual start (ramp_at={self.ramp_at}) comes to the pattern at"
            return f"its {start} step {self.begin_at} (begin_at)"
        if self.decay != "auto" or number >= self.begin_at + self._probe_steps:
            return ""
        spared = "" if self.target else ", and every other output of each layer has none"
        return (
            f'its search for lambda (decay="auto") ends at step {self.begin_at + self._probe_steps} (probe={self._probe_steps}; give a '
            f"tenth of the steps that you train): until then lambda is not settled{spared}"
        )

    def _probes(self, number: int) -> bool:
        return self.decay == "auto" and 0 < number - self.begin_at <= self._probe_steps

    @property
    def _probe_steps(self) -> int:
        return self.probe or flips.PROBE

    def _decay(self, step: Step) -> float:
        return flips.decay_of(step.memory) if self.decay == "auto" else self.decay

    def counts_steps(self) -> bool:
        return self.decay == "auto" or self.begin_at > 0

    def fusible(self) -> bool:
        return self.placement != "backward"

    def term(self, step: Step) -> Term | None:
        is_dense = self._stage(step.number - 1) == 0
        if is_dense or self._probes(step.number):  # a probe has a control without the term, and looks at flips
            return None
        return Term(self._decay(step), self.refine, self.placement == "decoupled")

    def before_step(self, step: Step) -> None:
        if self._stage(step.number - 1) == 0 or self.placement == "backward" or self._decay(step) == 0:
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
        grads, groupings = [owned.grad for owned in step.weights], [owned.site.seen_grouping for owned in step.weights]
        factors = [decay if owned.descends else -decay for owned in step.weights]
        rest = ops.refine_all_(step.fleet, weights, groupings, grads, factors, step.grad_scale, sign=self.refine == "sign")
        return [step.weights[i] for i in rest]

    def after_step(self, step: Step) -> None:
        for owned in step.weights:
            if owned.site.key in step.carried:
                owned.weight.sub_(step.carried[owned.site.key], alpha=self._decay(step))
        if self._probes(step.number):
            flips.search(step, step.number - self.begin_at, self.target, self._probe_steps)
        if (stage := self._stage(step.number)) != self._stage(step.number - 1):
            all_weights = (*step.weights, *step.resting)
            for owned in all_weights:
                self._look(owned.site, stage)
            if self._probes(step.number + 1):
                flips.remember(all_weights, step.memory)

    def _term(self, owned: OwnedWeight, grad_scale: Tensor | None) -> Tensor:
        grad = owned.grad if grad_scale is None else owned.grad / grad_scale
        descent = grad if owned.descends else -grad
        return ste.refinement(owned.weight, owned.mask(), self.refine, descent, owned.lr)


def _stage(number: int, begin_at: int, ramp_at: int | None) -> int:
    """How far layers have come after `number` steps: 0, all weights; up to _STAGES, those of the pattern."""
    if number >= begin_at:
        return _STAGES
    if ramp_at is None or number < ramp_at:
        return 0
    return 1 + (number - ramp_at) * (_STAGES - 1) // (begin_at - ramp_at)


def _seen(site: Site, stage: int) -> Pattern:
    """What the layer keeps then: M of M in a dense start."""
    return _between(site.grouping, stage / _STAGES).pattern


def _between(grouping: Grouping, part: float) -> Grouping:
    """`part` of the way from all M weights of a group to N, in equal factors; N itself at the end of the way only."""
    n, m = grouping.pattern.n, grouping.pattern.m
    kept = n if part == 1 else min(m, max(n + 1, round(m ** (1 - part) * n**part)))
    return replace(grouping, pattern=Pattern(f"{kept}:{m}"))
