"""All masked weights of a model in one pass, at the start of its forward.

A layer on its own makes its masked weight when its forward begins: right whoever calls it, but on a GPU many small launches. When
the whole model is called, a hook on it makes all of them in one launch and puts them in place, and another takes them away when
the forward ends. They live no longer than that, so they cannot be stale. Layers that are called by themselves (gradient
checkpointing, a part of the model, FSDP2, whose weights are only there while their layer runs) find nothing in place and make
their own.

The copy that the kernel writes into is made by `weight.to(bfloat16)` or `weight.clone()`: torch's own operations with torch's own
gradients, which send the gradient straight through and cost the host less than an autograd function in Python would. For the host's
sake, too, what was found out about the layers is kept, and only compared in the next forward.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from . import ste
from .kernels.multi import Fleet
from .kernels.ops import register_operator
from .kernels.select import Path, choose, forced_path, is_watched
from .layers import Site, SparseModule, casts, sites, unit_of
from .masks import Grouping

__all__ = ["hang_on_", "take_off_"]

_STATE = "_nofm_bulk"


def hang_on_(model: nn.Module) -> None:
    """From now on a forward of `model` makes its masked weights all at once, where that is faster."""
    if isinstance(model, nn.TransformerEncoderLayer):  # does not use its fused kernel when it sees a hook
        return
    register_operator()
    handles = (model.register_forward_pre_hook(_before), model.register_forward_hook(_after, always_call=True))
    model.__dict__[_STATE] = _Bulk([handle.id for handle in handles])


def take_off_(model: nn.Module) -> None:
    """Undo `hang_on_`, on `model` and everything in it."""
    for module in model.modules():
        bulk = module.__dict__.pop(_STATE, None)
        if bulk is not None:
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called):
                for hook in [key for key in hooks if key in bulk.hooks]:
                    del hooks[hook]


@dataclass(slots=True)
class _Plan:
    """The weights that go together, and what must not have changed for that to hold."""

    users: list[tuple[SparseModule, str, int]]  # a module, its parameter, the place of its weight
    records: list[Any]  # what each user remembers of its weight: grouping and lens
    weights: list[nn.Parameter]
    groupings: list[Grouping]
    casts: list[bool]
    whole: list[SparseModule]  # all of whose masked weights, and those of the children they read, are here
    forced: Path | None

    def holds(self) -> bool:
        if self.forced != forced_path():
            return False
        for (module, param, place), record in zip(self.users, self.records, strict=True):
            if module._parameters.get(param) is not self.weights[place] or module.__dict__["_nofm"].get(param) is not record:
                return False
        return all(weight.is_cuda for weight in self.weights)


@dataclass(slots=True)
class _Bulk:
    """What a model remembers of this: its hooks, the plan, the modules whose masked weights are in place now."""

    hooks: list[int]
    plan: _Plan | None = None
    fleet: Fleet = field(default_factory=Fleet)
    shown: list[tuple[SparseModule, str]] = field(default_factory=list)
    ready: list[SparseModule] = field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> _Bulk:
        return _Bulk(list(self.hooks))  # modules and addresses are the original's

    def __reduce__(self) -> Any:
        return _Bulk, (self.hooks,)


def _before(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or is_watched():
        return
    bulk: _Bulk = model.__dict__[_STATE]
    if bulk.shown:  # the model calls itself
        return
    first = next(model.parameters(), None)
    if first is None or not first.is_cuda:
        return
    if bulk.plan is None or not bulk.plan.holds():
        bulk.plan = _make_plan(model)
    plan = bulk.plan
    if not plan.weights:
        return
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    outs = [
        weight.clone() if dtype is None or not cast or weight.dtype != torch.float32 else weight.to(dtype)
        for weight, cast in zip(plan.weights, plan.casts, strict=True)
    ]
    bulk.fleet.masked_into(plan.weights, plan.groupings, outs)
    _show(bulk, plan, outs)


def _show(bulk: _Bulk, plan: _Plan, outs: list[Tensor]) -> None:
    thread = threading.get_ident()
    for module, param, place in plan.users:
        if module.__dict__.setdefault("_nofm_thread", thread) != thread or "_nofm_hidden" in module.__dict__:
            continue  # another thread is in this layer; its own forward will say so
        module.__dict__["_nofm_hidden"] = {param: None}
        module.__dict__[param] = outs[place]
        bulk.shown.append((module, param))
    if len(bulk.shown) == len(plan.users):
        for module in plan.whole:
            module.__dict__["_nofm_ready"] = thread
        bulk.ready = plan.whole


def _after(model: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    bulk: _Bulk = model.__dict__[_STATE]
    for module in bulk.ready:
        module.__dict__.pop("_nofm_ready", None)
    for module, param in bulk.shown:
        module.__dict__.pop("_nofm_hidden", None)
        module.__dict__.pop(param, None)
        module.__dict__.pop("_nofm_thread", None)
    bulk.ready = []
    bulk.shown.clear()


def _make_plan(model: nn.Module) -> _Plan:
    try:
        chosen = [site for site in sites(model) if _suits(site)]
    except KeyError:  # a weight has been parametrized away; its layer's own forward says so
        chosen = []
    users = [(module, param, place) for place, site in enumerate(chosen) for module, param in site.users]
    served = {(id(module), param) for module, param, _ in users}

    def is_whole(module: SparseModule) -> bool:
        return all((id(member), param) in served for member in unit_of(module) for param in member._nofm)

    return _Plan(
        users,
        [module._nofm[param] for module, param, _ in users],
        [site.weight for site in chosen],
        [site.grouping for site in chosen],
        [casts(site.module) for site in chosen],
        [module for module in model.modules() if isinstance(module, SparseModule) and is_whole(module)],
        forced_path(),
    )


def _suits(site: Site) -> bool:
    """Whether the launch over all weights can serve this one, and all its users want it in the same type."""
    if not site.weight.is_cuda or site.lens is not ste.straight_through or choose(site.weight, site.grouping) != "triton":
        return False
    users = [module for module, _ in site.users]
    if any(len(module._nofm) > 1 or isinstance(module, nn.RNNBase) or parametrize.is_parametrized(module) for module in users):
        return False
    return len({casts(module) for module in users}) == 1 and not any(param in module.__dict__ for module, param in site.users)
