"""Masks, masked weights and the SR-STE term, by the path that `select` chooses; and `nofm::masked`, what compiled code calls.

Everything here gives the same result whichever path serves; `reference.py` is what they are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..masks import Grouping
from ..patterns import Pattern
from . import cpu
from .multi import Fleet, axis_stride, constants
from .select import MAX_M_TRITON, choose, forced_path, has_triton, interpreting, is_traced

__all__ = ["compiled_masked", "mask", "masked", "refine_all_", "register_operator"]


def mask(weight: Tensor, grouping: Grouping) -> Tensor:
    """True where kept."""
    weight = weight.detach()
    path = choose(weight, grouping)
    if path == "cpu":
        return cpu.mask(weight, grouping.pattern.n, grouping.pattern.m, _stride(weight, grouping))
    if path == "triton":
        out = torch.empty_like(weight, dtype=torch.bool)
        Fleet().flags_into([weight], [grouping], [out])
        return out
    return grouping.mask(weight)


def masked(weight: Tensor, grouping: Grouping, dtype: torch.dtype | None = None) -> Tensor:
    """The weight where kept and +0.0 elsewhere, in `dtype` if one is given. No gradient."""
    weight = weight.detach()
    path, dtype = choose(weight, grouping), dtype or weight.dtype
    if path == "cpu":
        return cpu.masked(weight, grouping.pattern.n, grouping.pattern.m, _stride(weight, grouping)).to(dtype)
    if path == "triton":
        out = torch.empty_like(weight, dtype=dtype)
        Fleet().masked_into([weight], [grouping], [out])
        return out
    return torch.where(grouping.mask(weight), weight, 0.0).to(dtype)


def refine_all_(
    fleet: Fleet,
    weights: Sequence[Tensor],
    groupings: Sequence[Grouping],
    outs: Sequence[Tensor],
    factors: Sequence[float],
    scale: Tensor | None,
    sign: bool,
) -> list[int]:
    """out += factor * scale * (w, or sign(w)) where pruned, for the weights that a kernel serves; returns the places of the others."""
    by_path = _paths_of(fleet, weights, groupings, outs, scale is not None)
    for i in by_path["cpu"]:
        n, m = groupings[i].pattern.n, groupings[i].pattern.m
        cpu.refine_(weights[i], outs[i], factors[i], sign, n, m, _stride(weights[i], groupings[i]))
    if chosen := by_path["triton"]:
        at = weights[chosen[0]].device
        one = fleet.numbers([1.0], at) if scale is None else scale.to(torch.float32)
        mine = fleet.numbers([factors[i] for i in chosen], at)
        if len(chosen) < len(weights):
            weights, groupings, outs = [weights[i] for i in chosen], [groupings[i] for i in chosen], [outs[i] for i in chosen]
        fleet.refine_into(weights, groupings, outs, mine, one, sign)
    return by_path["torch"]


def _paths_of(
    fleet: Fleet, weights: Sequence[Tensor], groupings: Sequence[Grouping], outs: Sequence[Tensor], scaled: bool
) -> dict[str, list[int]]:
    """Which weights each path serves. Found once and kept for as long as the weights lie where they are."""
    if any(is_traced(weight) for weight in weights[:1]):
        return {"triton": [], "cpu": [], "torch": list(range(len(weights)))}
    key = [forced_path(), scaled, *[(w.data_ptr(), w.stride(), o.stride(), o.dtype) for w, o in zip(weights, outs, strict=True)]]
    if fleet.verdicts[0] != key:
        by_path: dict[str, list[int]] = {"triton": [], "cpu": [], "torch": []}
        for i, (weight, grouping, out) in enumerate(zip(weights, groupings, outs, strict=True)):
            alike = out.dtype == weight.dtype and out.stride() == weight.stride() and type(out) is Tensor
            path = choose(weight, grouping) if alike else "torch"
            by_path["torch" if path == "cpu" and scaled else path].append(i)
        fleet.verdicts = key, by_path
    verdict: dict[str, list[int]] = fleet.verdicts[1]
    return verdict


def _stride(weight: Tensor, grouping: Grouping) -> int:
    stride = axis_stride(weight, grouping)
    assert stride is not None, "select has looked at it"
    return stride


def compiled_masked(weight: Tensor, grouping: Grouping, dtype: torch.dtype) -> Tensor | None:
    """The masked weight inside compiled code, as one operator with the straight-through gradient; None where it has none to offer."""
    if not _operator or not (weight.is_cuda or _INTERPRETING) or grouping.pattern.m > MAX_M_TRITON or torch.compiler.is_exporting():
        return None  # exported programs keep to plain operations, which run where nofm is not installed
    stride = axis_stride(weight, grouping)
    if stride is None:
        return None
    result: Tensor = torch.ops.nofm.masked(weight, grouping.pattern.n, grouping.pattern.m, stride, dtype)
    return result


_operator: list[Any] = []
_INTERPRETING = interpreting()  # the compiler does not read the environment


def register_operator() -> None:
    """Make `nofm::masked` known to torch. Not at import, since it brings Triton along, and not while compiling."""
    if _operator or not (torch.cuda.is_available() or _INTERPRETING) or not has_triton():
        return
    from torch.library import triton_op, wrap_triton

    from .triton_masks import one_masked_kernel

    @triton_op("nofm::masked", mutates_args={})
    def masked_operator(weight: Tensor, n: int, m: int, stride: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(weight, dtype=dtype)
        lanes = weight.numel() // m
        fixed = constants(Grouping(Pattern(f"{n}:{m}")), stride, m)
        vector = stride == 1 and m % 4 == 0
        wrap_triton(one_masked_kernel)[(-(-lanes // fixed["B"]),)](weight, out, lanes, stride, VECTOR=vector, **fixed)
        return out

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad.to(ctx.dtype), None, None, None, None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    masked_operator.register_fake(lambda weight, n, m, stride, dtype: torch.empty_like(weight, dtype=dtype))
    masked_operator.register_autograd(backward, setup_context=setup_context)
    _operator.append(masked_operator)
