"""Masks, masked weights and the SR-STE term, by the path that `select` chooses; and `nofm::masked`, what compiled code calls.

Everything here gives the same result whichever path serves; `reference.py` is what they are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..masks import Grouping
from ..patterns import Pattern
from . import cpu
from .layout import axis_stride, lie_alike
from .multi import Fleet, constants
from .select import MAX_M_TRITON, Path, choose, forced_path, has_triton, interpreting, is_traced
from .ways import way_for

__all__ = ["compiled_masked", "jobs_on_cpu", "mask", "masked", "refine_all_", "register_operator"]


# Of layers that are masked by themselves, by thread and by where their weights lie. A fleet is not for two threads at once: one could
# leave the plan of its view of a weight for the other, which has another view. (Thread numbers come again, as DataParallel's do in every
# forward, so that its tables are found again too.)
_FLEETS: dict[tuple[int, int, Grouping], Fleet] = {}


def _fleet_of(weight: Tensor, grouping: Grouping) -> Fleet:
    """The fleet that has served a weight at this place before. It looks itself whether anything else is new."""
    key = get_ident(), weight.data_ptr(), grouping
    fleet = _FLEETS.get(key)
    if fleet is None:
        if len(_FLEETS) >= 4096:  # weights that have gone; more than that where two threads have looked at once
            _FLEETS.clear()
        fleet = _FLEETS[key] = Fleet()
    return fleet


def mask(weight: Tensor, grouping: Grouping) -> Tensor:
    """True where kept."""
    weight = weight.detach()
    path = choose(weight, grouping)
    if path == "cpu":
        return cpu.mask(weight, grouping.pattern.n, grouping.pattern.m, _stride(weight, grouping))
    if path == "triton":
        out = torch.empty_like(weight, dtype=torch.bool)
        _fleet_of(weight, grouping).flags_into([weight], [grouping], [out])
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
        _fleet_of(weight, grouping).masked_into([weight], [grouping], [out])
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
    if weights and is_traced(weights[0]):
        return list(range(len(weights)))
    verdict = _verdict(fleet, weights, groupings, outs, scale is not None)
    if chosen := verdict.places["cpu"]:
        verdict.jobs.refine([out.data_ptr() for out in _picked(outs, chosen)], _picked(factors, chosen), sign)
    if chosen := verdict.places["triton"]:
        at = weights[chosen[0]].device
        one = fleet.numbers([1.0], at) if scale is None else scale.to(torch.float32)
        mine = fleet.numbers(_picked(factors, chosen), at)
        fleet.refine_into(_picked(weights, chosen), _picked(groupings, chosen), _picked(outs, chosen), mine, one, sign, layout=verdict)
    return verdict.places["torch"]


_T = TypeVar("_T")


def _picked(items: Sequence[_T], places: list[int]) -> Sequence[_T]:
    return items if len(places) == len(items) else [items[i] for i in places]


@dataclass(slots=True, eq=False)
class _Verdict:
    """Which weights each path serves, by place, and how those look that this was found for."""

    key: list[Any]
    places: dict[Path, list[int]] = field(default_factory=lambda: {"triton": [], "cpu": [], "torch": []})
    jobs: cpu.Jobs = field(default_factory=lambda: cpu.Jobs((), ()))


def _verdict(fleet: Fleet, weights: Sequence[Tensor], groupings: Sequence[Grouping], outs: Sequence[Tensor], scaled: bool) -> _Verdict:
    """Found once and kept for as long as weights, gradients and patterns look the same."""
    seen = [(w.data_ptr(), w.dtype, w.shape, w.stride(), o.dtype, o.stride(), type(o)) for w, o in zip(weights, outs, strict=True)]
    key = [forced_path(), scaled, torch.get_num_threads(), seen, groupings]
    verdict: _Verdict | None = fleet.verdict
    if verdict is not None and verdict.key == key:
        return verdict
    verdict = fleet.verdict = _Verdict(key)
    home: torch.device | None = None  # of a launch; weights of a model that is spread over several devices may lie elsewhere
    for i, (weight, grouping, out) in enumerate(zip(weights, groupings, outs, strict=True)):
        alike = out.dtype == weight.dtype and lie_alike(out, weight) and type(out) is Tensor
        path = choose(weight, grouping) if alike else "torch"
        if path == "triton":
            home = home or weight.device
            path = "triton" if weight.device == home else "torch"
        verdict.places["torch" if path == "cpu" and scaled else path].append(i)
    verdict.jobs = jobs_on_cpu(_picked(weights, verdict.places["cpu"]), _picked(groupings, verdict.places["cpu"]))
    return verdict


def jobs_on_cpu(weights: Sequence[Tensor], groupings: Sequence[Grouping]) -> cpu.Jobs:
    """What the C kernels do with these weights, which they serve, for as long as they lie where they lie."""
    shapes = [(w.numel() // g.pattern.m, g.pattern.n, g.pattern.m, _stride(w, g)) for w, g in zip(weights, groupings, strict=True)]
    return cpu.Jobs([weight.data_ptr() for weight in weights], shapes)


def _stride(weight: Tensor, grouping: Grouping) -> int:
    stride = axis_stride(weight, grouping)
    assert stride is not None, "select has looked at it"
    return stride


def compiled_masked(weight: Tensor, grouping: Grouping, dtype: torch.dtype) -> Tensor | None:
    """The masked weight inside compiled code, as one operator with the straight-through gradient; None where it has none to offer."""
    # Exported programs keep to plain operations, which run where nofm is not installed. Not `is_exporting()`: torch 2.11 takes it for
    # True in all that it compiles.
    exporting: bool = torch.compiler._is_exporting_flag
    if not _operator or not (weight.is_cuda or _INTERPRETING) or grouping.pattern.m > MAX_M_TRITON or exporting:
        return None
    # An operator of one's own has no forward derivative, and would drop it without a word. The level is looked at for the compiler alone:
    # code that was compiled without derivatives is then not used where there are some.
    if _differentiates_forward() or forward_ad._current_level >= 0:
        return None
    stride = axis_stride(weight, grouping)
    if stride is None:
        return None
    return torch.ops.nofm.masked(weight, grouping.pattern.n, grouping.pattern.m, stride, dtype)


def _differentiates_forward() -> bool:
    """Whether forward derivatives (`torch.func.jvp`, dual tensors) are being taken where the compiler has come to. It enters their levels
    as it reads a `jvp`, so a look at the level itself would be taken for one at the beginning of the code, when there was none yet."""
    return forward_ad._current_level >= 0


_operator: list[Any] = []
_INTERPRETING = interpreting()  # the compiler does not read the environment


def register_operator() -> None:
    """Make `nofm::masked` known to torch. Not at import, since it brings Triton along, and not while compiling."""
    if _operator or not (torch.cuda.is_available() or _INTERPRETING) or not has_triton():
        return
    from torch.library import triton_op, wrap_triton

    from .triton_masks import one_masked_kernel
    from .triton_tiles import one_in_order_masked_kernel

    @triton_op("nofm::masked", mutates_args={})
    def masked_operator(weight: Tensor, n: int, m: int, stride: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(weight, dtype=dtype)
        way = way_for(stride, m, m, weight.numel(), True, "masked")  # Triton looks at addresses itself here, and vectors where it can
        fixed = constants(Grouping(Pattern(f"{n}:{m}")), stride, way, True)
        grid, lanes = (-(-weight.numel() // way.weights(m, stride)),), weight.numel() // m
        if way.kind == "walk":
            wrap_triton(one_masked_kernel)[grid](weight, out, lanes, stride, **fixed)
        else:
            wrap_triton(one_in_order_masked_kernel)[grid](weight, out, lanes, **fixed)
        return out

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad.to(ctx.dtype), None, None, None, None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    masked_operator.register_fake(lambda weight, n, m, stride, dtype: torch.empty_like(weight, dtype=dtype))
    masked_operator.register_autograd(backward, setup_context=setup_context)
    torch.compiler.assume_constant_result(_differentiates_forward)  # marks it: the compiler calls it instead of reading it
    _operator.append(masked_operator)
