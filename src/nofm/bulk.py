"""All masked weights of a model in one pass, at the start of its forward.

A layer on its own makes its masked weight when its forward begins: right whoever calls it, but on a GPU many small launches, and in a
small network on the CPU more Python than arithmetic. When the whole model is called, a hook on it makes all of them in one launch
(on the CPU: one call into C) and hands each layer its own, and another takes them back when the forward ends. They live no longer than
that, so they cannot be stale. Layers that are called by themselves (gradient checkpointing, a part of the model, FSDP2, whose
weights are only there while their layer runs) have been handed nothing and make their own.

A layer puts what it was handed in front of its weight in its own forward only, so that everybody else, hooks too, finds the dense weight.
Hooks may also change weights before a layer begins: modules that have hooks, and all below them, are left to themselves, unless a hook says
that it does not (`hooks.leaves_weights`).

The copy that the kernel writes into is made by `weight.to(bfloat16)` or `weight.clone()`: torch's own operations with torch's own
gradients, which send the gradient straight through and cost the host less than an autograd function in Python would. In a CUDA graph,
and for large weights, they copy nothing (`_EmptyCopies`), since the kernel writes all of it: a masked weight then costs the memory traffic
of autocast's cast, which it takes the place of. For the host's sake, too, what was found out about the layers is kept, and only
compared in the next forward.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from . import ste
from .errors import LayerError
from .hooks import is_harmless
from .kernels import cpu
from .kernels.multi import Fleet
from .kernels.ops import jobs_on_cpu, register_operator
from .kernels.select import Path, choose, forced_path, is_watched
from .layers import SparseModule, casts
from .masks import Grouping
from .site import Site, sites

__all__ = ["hang_on_", "take_off_"]

_STATE = "_nofm_bulk"
# The number of both hooks, the same on every model. Compiled code is used again only where the numbers of hooks are those it was compiled
# with, and torch gives each hook a new one: a study would compile each of its networks. Its own numbers begin at 0, so this one is free.
_HOOK = -1
_DEVICES: dict[str, Path] = {"cuda": "triton", "cpu": "cpu"}  # and the path that serves many weights there
# Weights of all layers together. Above, arithmetic counts more than Python on the CPU, and the copy is made for nothing.
_SMALL = 1 << 20
# Weights of a layer, on average. Above, an H200 takes longer to copy them in vain (6 bytes each) than the host to step into the dispatcher
# (4 us a layer), which is lost where the GPU waits for the host.
_LARGE = 3 << 20


def hang_on_(model: nn.Module) -> None:
    """From now on a forward of `model` makes its masked weights all at once, where that is faster."""
    if isinstance(model, nn.TransformerEncoderLayer):  # does not use its fused kernel when it sees a hook
        return
    register_operator()
    model._forward_pre_hooks[_HOOK] = _before
    model._forward_hooks[_HOOK] = _after
    model._forward_hooks_always_called[_HOOK] = True
    model.__dict__[_STATE] = _Bulk()


def take_off_(model: nn.Module) -> None:
    """Undo `hang_on_`, on `model` and everything in it."""
    for module in model.modules():
        if module.__dict__.pop(_STATE, None) is not None:
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called):
                hooks.pop(_HOOK, None)


class _EmptyCopies(TorchDispatchMode):
    """Inside, `to` and `clone` of a parameter give a tensor of the right type, layout and derivative with nothing written into it.

    Only of parameters: forward-mode derivatives copy tangents by the same operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(args[0]) is nn.Parameter and func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
            return torch.empty_like(args[0], dtype=kwargs.get("dtype"))
        return func(*args, **kwargs)


@dataclass(slots=True)
class _Plan:
    """The weights that go together, and what must not have changed for that to hold."""

    users: list[tuple[SparseModule, str, int]]  # a module, its parameter, the place of its weight
    records: list[Any]  # what each user remembers of its weight: grouping and lens
    apart: list[tuple[SparseModule, str, Any]]  # those that are masked by themselves, and what they remember: that may change too
    weights: list[nn.Parameter]
    groupings: list[Grouping]
    casts: list[bool]
    jobs: cpu.Jobs | None  # what the CPU does; None on a GPU
    device: torch.device
    forced: Path | None
    lay: list[Any]  # on the CPU: where the weights lay and how; a fleet looks for itself
    hooks: list[Any]  # where hooks are kept
    hooked: list[tuple[int, ...]]  # and which there were, by the numbers that torch gives them
    handles: int  # torch's count of all hooks ever registered, which says at once that none are new

    def writes_once(self) -> bool:
        """Whether it pays that copies are made without being written."""
        if self.jobs is not None:
            return False
        is_large = sum(weight.numel() for weight in self.weights) > _LARGE * len(self.weights)
        return is_large or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def holds(self) -> bool:
        if self.forced != forced_path() or not self._has_the_same_hooks():
            return False
        for (module, param, place), record in zip(self.users, self.records, strict=True):
            if module._parameters.get(param) is not self.weights[place] or _record_of(module, param) is not record:
                return False
        if any(_record_of(module, param) is not record for module, param, record in self.apart):
            return False
        if self.jobs is not None:
            return [(w.data_ptr(), w.shape, w.stride()) for w in self.weights] == self.lay
        return all(weight.device == self.device for weight in self.weights)

    def _has_the_same_hooks(self) -> bool:
        if self.handles != RemovableHandle.next_id:
            if list(map(tuple, self.hooks)) != self.hooked:
                return False
            self.handles = RemovableHandle.next_id
        return True


def _record_of(module: SparseModule, param: str) -> Any:
    """What a module remembers of its weight; None where it is plain again."""
    return module.__dict__.get("_nofm", {}).get(param)


@dataclass(slots=True)
class _Call:
    """A forward of the model: whose it is, where it began, and how many times it has called the model again."""

    thread: int
    frame: FrameType
    inner: int = 0

    def is_running(self) -> bool:
        """False if it has ended without a word: torch calls no hook after Ctrl-C.

        Python refuses to clear the frame of a function that is running. (It could also list the frames of all threads, but while it does,
        it may collect garbage and with that wait for another thread, which waits for the list.)
        """
        try:
            self.frame.clear()
        except RuntimeError:
            return True
        return False


@dataclass(slots=True)
class _Bulk:
    """What a model remembers of this: the plan, the modules that have been handed masked weights, and for which forward."""

    plan: _Plan | None = None
    fleet: Fleet = field(default_factory=Fleet)
    served: list[tuple[SparseModule, str, int]] = field(default_factory=list)
    call: dict[str, _Call] = field(default_factory=dict)  # the forward that is running, if one is

    def __deepcopy__(self, memo: Any) -> _Bulk:
        return _Bulk()  # modules and addresses are the original's

    def __reduce__(self) -> Any:
        return _Bulk, ()


def _before(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    bulk: _Bulk = model.__dict__[_STATE]
    call = bulk.call.get("now")
    if call is not None and not call.is_running():
        _take_back(bulk)
    mine = _Call(threading.get_ident(), sys._getframe(1))
    call = bulk.call.setdefault("now", mine)  # one step, so that two threads cannot both pass
    if call is not mine:  # another thread's forward, or the model calls itself
        call.inner += call.thread == mine.thread
    elif not is_watched():
        _make_masked(model, bulk)


def _make_masked(model: nn.Module, bulk: _Bulk) -> None:
    plan = bulk.plan
    if plan is None or not plan.weights or not plan.holds():
        first = next(model.parameters(), None)
        if first is None or first.device.type not in _DEVICES:
            return
        if plan is None or plan.device != first.device or not plan.holds():
            plan = bulk.plan = _make_plan(model, first.device)
        if not plan.weights:
            return
    casting = torch.is_autocast_enabled(plan.device.type)
    if plan.jobs is not None and casting:  # the C kernels write fp32
        return
    dtype = torch.get_autocast_dtype(plan.device.type) if casting else None
    with _EmptyCopies() if plan.writes_once() else nullcontext():
        outs = [
            weight.clone() if dtype is None or not cast or weight.dtype != torch.float32 else weight.to(dtype)
            for weight, cast in zip(plan.weights, plan.casts, strict=True)
        ]
    if plan.jobs is None:
        bulk.fleet.masked_into(plan.weights, plan.groupings, outs)
    else:
        plan.jobs.masked([out.data_ptr() for out in outs])
    thread, bulk.served = threading.get_ident(), plan.users
    for module, param, place in plan.users:
        module.__dict__["_nofm_made"] = (thread, param, outs[place])


def _after(model: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    bulk: _Bulk = model.__dict__[_STATE]
    call = bulk.call.get("now")
    if call is None or call.thread != threading.get_ident():
        return
    if call.inner:
        call.inner -= 1
    else:
        _take_back(bulk)


def _take_back(bulk: _Bulk) -> None:
    for module, _, _ in bulk.served:
        module.__dict__.pop("_nofm_made", None)
    bulk.served = []
    bulk.call.clear()


def _make_plan(model: nn.Module, device: torch.device) -> _Plan:
    forced = forced_path()
    path = forced or _DEVICES[device.type]
    observed = _observed(model)
    try:
        found = list(sites(model))
        chosen = [site for site in found if _suits(site, device, path, observed)]
    except LayerError:  # a weight has been parametrized away; its layer's own forward says so
        found = chosen = []
    if path == "cpu" and sum(site.weight.numel() for site in chosen) > _SMALL:
        chosen = []
    together = {site.key for site in chosen}
    alone = [user for site in found if site.key not in together for user in site.users]
    users = [(module, param, place) for place, site in enumerate(chosen) for module, param in site.users]
    weights, groupings = [site.weight for site in chosen], [site.seen_grouping for site in chosen]
    hooks = _places_for_hooks(model)
    return _Plan(
        users=users,
        records=[module._nofm[param] for module, param, _ in users],
        apart=[(module, param, module._nofm[param]) for module, param in alone],
        weights=weights,
        groupings=groupings,
        casts=[casts(site.module) for site in chosen],
        jobs=jobs_on_cpu(weights, groupings) if path == "cpu" else None,
        device=device,
        forced=forced,
        lay=[(weight.data_ptr(), weight.shape, weight.stride()) for weight in weights] if path == "cpu" else [],
        hooks=hooks,
        hooked=list(map(tuple, hooks)),
        handles=RemovableHandle.next_id,
    )


def _places_for_hooks(model: nn.Module) -> list[Any]:
    """Where hooks that run during a forward of `model` are kept."""
    places = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    return [*places, modules._global_forward_pre_hooks, modules._global_forward_hooks]


def _observed(model: nn.Module) -> set[int]:
    """The ids of all modules that a hook may change during a forward of `model`: those that have one, and all below them. On `model`
    itself, hooks before ours and after the forward have no part in it."""
    last = next(reversed(model._forward_pre_hooks), None)
    if modules._global_forward_pre_hooks or modules._global_forward_hooks or last != _HOOK:
        return {id(module) for module in model.modules()}
    hooked = [m for m in model.modules() if m is not model and not _has_only_harmless_hooks(m)]
    return {id(module) for top in hooked for module in top.modules()}


def _has_only_harmless_hooks(module: nn.Module) -> bool:
    return all(map(is_harmless, (*module._forward_pre_hooks.values(), *module._forward_hooks.values())))


def _suits(site: Site, device: torch.device, path: Path, observed: set[int]) -> bool:
    """Whether the launch over all weights can serve this one, and all its users want it in the same type."""
    if site.weight.device != device or not (site.lens is ste.straight_through or isinstance(site.lens, ste.Wider)):
        return False
    if path == "torch" or choose(site.weight, site.seen_grouping) != path:
        return False
    users = [module for module, _ in site.users]
    if any(id(module) in observed for module in users):
        return False
    if any(len(module._nofm) > 1 or isinstance(module, nn.RNNBase) or parametrize.is_parametrized(module) for module in users):
        return False
    return len({casts(module) for module in users}) == 1 and not any(param in module.__dict__ for module, param in site.users)
