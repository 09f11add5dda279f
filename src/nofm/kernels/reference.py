"""The oracle: masks by one stable sort, steps by plain operations, the plainest statement of the contract. Slow, and never on a
training path.

Every faster way to a mask is compared with this one, on random inputs, ties and special values. It compares magnitudes as
floats, unlike the fast ways, so that the two share no reasoning; the price is that it needs denormals not to be flushed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..masks import Grouping
from .steps import Numbers, Rule, Term

__all__ = ["mask", "step_"]


def mask(weight: Tensor, grouping: Grouping) -> Tensor:
    """True at the N weights of each group that come first by (|w| descending, index ascending); NaN goes before Inf."""
    magnitude = weight.detach().abs().double()
    size = grouping.row_size(weight.shape)
    rows = magnitude.flatten(1) if grouping.axis == "flat" else magnitude.movedim(grouping.axis, -1)
    kept = torch.zeros(rows.shape, dtype=torch.bool, device=weight.device)
    for start in range(0, size, grouping.pattern.m):
        group = rows[..., start : start + grouping.pattern.m]
        first = group.sort(dim=-1, descending=True, stable=True).indices[..., : grouping.pattern.n]
        kept[..., start : start + grouping.pattern.m].scatter_(-1, first, True)
    return kept.reshape(weight.shape) if grouping.axis == "flat" else kept.movedim(-1, grouping.axis)


def step_(
    rule: Rule,
    term: Term,
    numbers: Numbers,
    weight: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    grouping: Grouping,
    first: bool = False,
) -> None:
    """One step of one weight by plain operations, in the order of torch's single-tensor optimizers: the term, weight decay, the rule.

    `numbers` as in `steps`, with Adam's count of this step; `first`: an SGD whose momentum begins in this step.
    """
    lr, into, off, decay, sign, one, two, eps, step = numbers
    pruned = ~mask(weight, grouping)
    d = grad * sign
    r = {"weight": lambda: weight.clone(), "sign": lambda: weight.sign(), "gradient": lambda: lr * d}[term.refine]()
    r = torch.where(pruned, r, 0.0)
    if not term.decoupled:
        d = d.add(r, alpha=decay)
    if into:
        d = d.add(weight, alpha=into)
    if rule.adam:
        if off:
            weight.mul_(1 - lr * off)
        mean, square = states
        mean.lerp_(d, 1 - one)
        square.mul_(two).addcmul_(d, d, value=1 - two)
        root = (square.sqrt() / (1 - two**step) ** 0.5).add_(eps)
        weight.addcdiv_(mean, root, value=-lr / (1 - one**step))
    else:
        if rule.momentum:
            (buffer,) = states
            buffer.copy_(d) if first else buffer.mul_(one).add_(d, alpha=two)
            d = d.add(buffer, alpha=one) if rule.nesterov else buffer
        weight.add_(d, alpha=-lr)
    if term.decoupled:
        weight.sub_(r * lr, alpha=decay)
