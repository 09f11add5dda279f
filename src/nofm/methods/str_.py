"""STR, soft threshold weight reparameterization: the rival of the paper's Table 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .. import shards, ste
from ..errors import OptimizerError
from ..site import Site
from .base import Memory, Method, OwnedWeight, Step

__all__ = ["STR"]


@dataclass(frozen=True)
class STR(Method):
    """Learns a threshold for each layer; weights below it are zero, those above are smaller by it.

    Paper: Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity", ICML 2020, arXiv:2002.03231, section 3.

        S(W, s) = sign(W) * relu(|W| - sigmoid(s))                       s: one number for each layer, learned
        W <- W - lr * (g(S) * kept            + wd * W)                  kept: |W| > sigmoid(s)
        s <- s - lr * (-sigmoid'(s) * sum(sign(W) * g(S) * kept) + (wd + decay) * s)

    Sparsity is not asked for, it comes out: weight decay draws s from far below zero towards it, thresholds open layer by layer, and the
    loss pushes back. More weight decay, or an s that starts nearer to zero, leaves fewer weights.

    initial  what s starts as. The paper: -3200 for ResNet-50 over 100 epochs, -200 for MobileNet. Over n steps of SGD weight decay
             shrinks s by about exp(-n * lr * wd / (1 - momentum)); thresholds open when it comes to about -10. Shorter runs need a
             start that is nearer to zero, or more weight decay.
    decay    weight decay of s beyond the optimizer's own, added to its gradient; negative for less. Sparsity is chosen by what s decays by,
             and this leaves the weights theirs (the released code can set the two apart as well).

    For a sparsity choose E, and give decay = E * (1 - momentum) / (sum of all learning rates) - wd, by which s shrinks by exp(-E) over the
    run, and initial = -10 * exp(E / 4), by which thresholds open after a quarter of E. ResNet-20 comes to 95.0 % by E = 25, ResNet-18
    to 94.6 % by 3 (60 epochs of CIFAR-10); "STR, exponent E" in `nofm study table3` is this.

    The optimizer trains s in the group of its weight: the same learning rate, momentum and weight decay. Its gradient is made of the
    weight's, which is complete at the step (summed over micro-batches, averaged over processes, clipped), since no part of the
    loop knows that s is there.
    """

    unstructured: ClassVar[bool] = True
    has_thresholds: ClassVar[bool] = True

    initial: float = -3200.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, usual in (("initial", self.initial, "the paper starts s at -3200"), ("decay", self.decay, "0 adds none")):
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise OptimizerError(f"{name}={value!r} is no finite number; {usual}")

    def begun_with(self) -> tuple[str, ...]:
        return ("initial",)

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        for site in sites:
            before = site.lens.s.detach() if isinstance(site.lens, ste.SoftThreshold) else torch.tensor(float(self.initial))
            lens = ste.SoftThreshold(memory.learn(site, before.to(site.weight.device, copy=True)))
            site.freeze(lens.kept(shards.whole(site.weight.detach())), lens)

    def before_step(self, step: Step) -> None:
        for owned in step.resting:
            _lens(owned).s.grad = None  # of an earlier step: model.zero_grad() does not know s
        for owned in step.weights:
            s = _lens(owned).s
            # g(S) is zero where pruned already, as the weight's gradient is.
            total = shards.summed((owned.weight.sign() * owned.grad).sum(dtype=torch.float32), owned.param)
            opening = s.detach().sigmoid() * (-s.detach()).sigmoid()
            pull = s.detach() * (self.decay if owned.descends else -self.decay)
            pull = pull if step.grad_scale is None else pull * step.grad_scale
            grad = pull - opening * total
            s.grad = grad if s.grad is None else s.grad.copy_(grad)

    def after_step(self, step: Step) -> None:
        for owned in (*step.weights, *step.resting):
            lens = _lens(owned)
            owned.site.freeze(lens.kept(shards.whole(owned.param.detach())), lens)


def _lens(owned: OwnedWeight) -> ste.SoftThreshold:
    lens = owned.site.lens
    assert isinstance(lens, ste.SoftThreshold), f"{owned.site.key} is not seen through its threshold"
    return lens
