"""How a weight is seen through its mask, and what its gradient becomes: Eq. 3 to 6 of the paper.

A *lens* turns the stored weight into the weight that a layer computes with. There are seven here, and a method chooses one:

    dense              the weight itself                              gradient g(W)
    straight_through   S(W): kept weights, +0.0 elsewhere             gradient g(S(W)), to kept and pruned alike   (Eq. 3)
    frozen             W under a stored mask, +0.0 elsewhere          gradient g(S(W)), to kept weights only
    held               W under a stored mask, +0.0 elsewhere          gradient g(S(W)), to kept and pruned alike
    Wider              as straight_through, by a pattern of its own   gradient g(S(W)), to kept and pruned alike
    RefinedBackward    as straight_through                            gradient g(S(W)) + decay * term, see below
    SoftThreshold      sign(W) * relu(|W| - sigmoid(s))               gradient g(S(W)), to kept weights only

Pruned positions are selected, not multiplied away: Inf * 0 is NaN and -1 * 0 is -0.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from . import shards
from .kernels.ops import compiled_masked, masked
from .kernels.select import is_traced
from .kernels.steps import Refinement
from .masks import Grouping

__all__ = [
    "Lens",
    "RefinedBackward",
    "Refinement",
    "SoftThreshold",
    "Wider",
    "dense",
    "frozen",
    "held",
    "refinement",
    "select",
    "straight_through",
]


class Lens(Protocol):
    """Makes the weight a layer computes with. `stored` is the layer's frozen mask, or None where it has none."""

    def __call__(self, weight: Tensor, grouping: Grouping, stored: Tensor | None) -> Tensor: ...


def dense(weight: Tensor, grouping: Grouping, stored: Tensor | None) -> Tensor:
    """The weight as it is."""
    return weight


def straight_through(weight: Tensor, grouping: Grouping, stored: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """The N:M weight S(W) with the gradient passed straight through to all of W (Eq. 2 and 3).

    `dtype` is the type that the layer is going to cast its weight to anyhow, under autocast: the mask is that of the stored
    weight, and mask and cast are one pass over it.
    """
    dtype = dtype or weight.dtype
    if not is_traced(weight):
        return _MaskedStraightThrough.apply(_away_from_leaf(weight), grouping, dtype)
    if torch.compiler.is_compiling() and (compiled := compiled_masked(weight, grouping, dtype)) is not None:
        return compiled
    return _passed_through(weight, shards.mask(weight, grouping)).to(dtype)


def _away_from_leaf(weight: Tensor) -> Tensor:
    """A view of a parameter, for an autograd function in Python.

    Such a function holds Python's lock while it asks a parameter for its place in the graph, for which it needs the parameter's own lock;
    torch's operations (`bulk` copies weights by one) have the second and may ask for the first. Two threads that do both at once wait for
    each other for ever. The view is one of torch's operations, and a view has its place.
    """
    is_plain_leaf = type(weight) is torch.nn.Parameter and weight.requires_grad and torch.is_grad_enabled()
    return weight.view_as(weight) if is_plain_leaf else weight


def frozen(weight: Tensor, grouping: Grouping, stored: Tensor | None) -> Tensor:
    """The weight under the stored mask; pruned weights get no gradient."""
    assert stored is not None, "the frozen lens needs a stored mask"
    return select(weight, shards.spread(stored, weight))


def held(weight: Tensor, grouping: Grouping, stored: Tensor | None) -> Tensor:
    """The weight under the stored mask; pruned weights get the gradient they would have if they were kept at zero.

    Methods that grow connections look at it there.
    """
    assert stored is not None, "the held lens needs a stored mask"
    return _passed_through(weight, shards.spread(stored, weight))


@dataclass(frozen=True, slots=True)
class Wider:
    """As `straight_through`, with more weights than the layer's own pattern keeps: on the way there."""

    grouping: Grouping

    def __call__(self, weight: Tensor, grouping: Grouping, stored: Tensor | None) -> Tensor:
        return straight_through(weight, self.grouping, None)


@dataclass(frozen=True, slots=True)
class RefinedBackward:
    """SR-STE with its term added in the backward pass, where the released code of the paper has it.

    The term is then added as often as the weight is used and scaled as the gradient is scaled: four micro-batches add it four
    times, a layer called twelve times adds it twelve times, a loss scale of 2^16 divides it by 2^16. It is here to repeat
    published numbers; `placement="gradient"` is exact.
    """

    decay: float
    refine: Refinement

    def __call__(self, weight: Tensor, grouping: Grouping, stored: Tensor | None) -> Tensor:
        return _RefinedStraightThrough.apply(weight, shards.mask(weight, grouping), self.decay, self.refine)


@dataclass(frozen=True, slots=True, eq=False)
class SoftThreshold:
    """Weights shrink by a threshold sigmoid(s) and those below it are zero: what STR learns with, s being a number for each layer.

    The threshold alone says what is kept. A stored mask beside it is for those who ask about the layer (SAD, cost, summary), and a
    method keeps it up to date. The gradient of s follows from that of the weight (`methods.str_`), so none is recorded here.
    """

    s: Tensor

    def __call__(self, weight: Tensor, grouping: Grouping, stored: Tensor | None) -> Tensor:
        threshold = self.s.detach().sigmoid()
        return select(weight - weight.sign() * threshold, self.kept(weight))

    def kept(self, weight: Tensor) -> Tensor:
        """The mask: True where the weight is above the threshold."""
        return weight.detach().abs() > self.s.detach().sigmoid()


def select(weight: Tensor, mask: Tensor) -> Tensor:
    """`weight` where `mask` is True, +0.0 elsewhere."""
    return torch.where(mask, weight, 0.0)


def _passed_through(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight under `mask`, with the gradient passed straight through to all of it."""
    # While exporting, no: see `compiled_masked` for the flag.
    if torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag and type(weight) in (Tensor, torch.nn.Parameter):
        return _copied_and_pruned(weight, mask)
    return _StraightThrough.apply(weight, mask)


def _copied_and_pruned(weight: Tensor, mask: Tensor) -> Tensor:
    """As `_StraightThrough`, by a copy whose gradient goes straight through, for torch.compile: it cannot follow an autograd function that
    has forward derivatives, and would leave the graph in every layer; and it keeps code that has any autograd function of somebody's own
    out of its cache, so that each process would compile anew."""
    seen = weight.clone()
    with torch.no_grad(), _set_fwd_grad_enabled(False):  # neither kind of derivative sees that anything was pruned
        seen.masked_fill_(~mask, 0.0)
    return seen


def refinement(weight: Tensor, mask: Tensor, refine: Refinement, grad: Tensor, lr: float | Tensor) -> Tensor:
    """The sparse-refined term without its lambda: zero on kept weights and on pruned ones

    weight    W             Eq. 4
    sign      sign(W)       Eq. 5
    gradient  lr * g(S(W))  Eq. 6
    """
    if refine == "weight":
        term = weight
    elif refine == "sign":
        term = weight.sign()
    else:
        term = lr * grad
    return select(term, ~mask)


class _MaskedStraightThrough(torch.autograd.Function):
    """By the fast kernels; they make masked weights without making masks."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, grouping: Grouping, dtype: torch.dtype) -> Tensor:
        ctx.dtype, ctx.seen_dtype = weight.dtype, dtype
        return masked(weight, grouping, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.to(ctx.seen_dtype)


class _StraightThrough(torch.autograd.Function):
    """By plain operations, for the compiler and other tracers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, mask: Tensor) -> Tensor:
        return select(weight, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent


class _RefinedStraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, mask: Tensor, decay: float, refine: Refinement) -> Tensor:
        return select(weight, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, mask, ctx.decay, ctx.refine = inputs
        ctx.save_for_backward(weight, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weight, mask = ctx.saved_tensors
        term = refinement(weight, mask, ctx.refine, grad, lr=1.0)
        return grad + ctx.decay * term, None, None, None
