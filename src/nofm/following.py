"""Which weights a method follows, and a word when an optimizer that it does not hang on moves them, or those of a copy.

A loop may get a new optimizer half way: for a second stage, with other groups, or out of somebody's `configure_optimizers`. A method that
was attached to the old one then takes no part in any step, and nothing would tell: SR-STE has become STE, and a schedule of pruning stands
still. So a hook that torch calls after the steps of all optimizers looks whether the method has been called since the last step of the same
optimizer. That is right for wrappers, too, inside whose steps those of another optimizer are taken.

A copy of a model (`copy.deepcopy`, pickle, `torch.save` of the whole) has no method, which hangs on the old optimizer. Most copies are only
looked at or averaged, so that a word is due when an optimizer moves one. What a layer tells its copy, when that is made
(`layers.SparseModule.__reduce_ex__`), lies here and not in the layer, whose attributes, state and graphs stay as they are.

What is followed is known by the layers, to which there may be weak references: a parameter that has one cannot be swapped, which is how
torch converts a model (`model.double()`) under `torch.__future__.set_swap_module_params_on_conversion(True)`.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Pulse", "Said", "follow", "forget_copy", "level_of_the_user", "note_copy", "said_of", "unfollow"]

# What a copy is told of the weights of its original: the name of each in the layer, its key in the model, and the method.
Said: TypeAlias = tuple[tuple[str, str, str], ...]


@dataclass(slots=True, eq=False)
class Pulse:
    """Of a method in the steps of one optimizer: how often it has been called. Knows neither, so that it keeps neither alive."""

    method: str
    acts: bool = True  # whether it does anything in steps; what it does to layers, copies have too
    calls: int = 0


@dataclass(slots=True, eq=False)
class _Followed:
    key: str
    module: weakref.ref[nn.Module]
    name: str
    pulse: Pulse

    def param(self) -> nn.Parameter | None:
        module = self.module()
        return None if module is None or not _is_sparse(module) else module._parameters.get(self.name)


@dataclass(slots=True, eq=False)
class _Mover:
    """An optimizer, one followed weight that it has, if any, and the pulse of its method when it had last stepped."""

    epoch: int
    groups: int
    followed: _Followed | None
    calls: int = -1


# The weights of each layer; they stay when the old optimizer is gone, or nobody would ask after it.
_followed: weakref.WeakKeyDictionary[nn.Module, list[_Followed]] = weakref.WeakKeyDictionary()
_movers: weakref.WeakKeyDictionary[Optimizer, _Mover] = weakref.WeakKeyDictionary()
_epoch = [0]  # counts changes of what is followed
# The copies of such layers that no method has been attached to; and the optimizers that have been searched for them, with what was found.
_copies: weakref.WeakKeyDictionary[nn.Module, Said] = weakref.WeakKeyDictionary()
_searched: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, int, int], list[weakref.ref[nn.Module]]]] = weakref.WeakKeyDictionary()
_copied = [0]  # counts copies
_hooks: list[Any] = []


def follow(pulse: Pulse, weights: Iterable[tuple[str, nn.Module, str]]) -> None:
    """Say that the method of `pulse` is called in the steps that move these weights: the key of each, its layer, and its name there."""
    _hang_on()
    for key, module, name in weights:
        others = [each for each in _followed.get(module, []) if each.name != name]
        _followed[module] = [*others, _Followed(key, weakref.ref(module), name, pulse)]
        note_copy(module, tuple(said for said in _copies.get(module, ()) if said[0] != name))
    _epoch[0] += 1


def unfollow(pulse: Pulse) -> None:
    """Say that this has ended."""
    for module in list(_followed):
        if not (others := [each for each in _followed[module] if each.pulse is not pulse]):
            del _followed[module]
        else:
            _followed[module] = others
    _epoch[0] += 1


def said_of(module: nn.Module) -> Said:
    """What a copy of this layer is to be told: of a method that follows it, or followed what it is a copy of itself."""
    mine = tuple((each.name, each.key, each.pulse.method) for each in _followed.get(module, ()) if each.pulse.acts)
    return mine + _copies.get(module, ())


def note_copy(module: nn.Module, said: Said) -> None:
    """Remember that this layer is a copy, and what was said to it; nothing, where it is one no more."""
    if said:
        _hang_on()
        _copies[module] = said
        _copied[0] += 1
    else:
        _copies.pop(module, None)


def forget_copy(model: nn.Module) -> None:
    """Say of a copy that it is to be trained without a method."""
    for module in model.modules():
        note_copy(module, ())


def _hang_on() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_any_step))


def _after_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _copies:
        _look_for_copies(optimizer)
    mover = _movers.get(optimizer)
    if mover is None or mover.epoch != _epoch[0] or mover.groups != len(optimizer.param_groups):
        mover = _movers[optimizer] = _Mover(_epoch[0], len(optimizer.param_groups), _one_followed(optimizer))
    if mover.followed is None:
        return
    param, pulse = mover.followed.param(), mover.followed.pulse
    if pulse.calls == mover.calls and param is not None and param.grad is not None:
        warnings.warn(
            f"this {type(optimizer).__name__} moves {mover.followed.key}, but {pulse.method} was attached to another optimizer and takes "
            "no part in its steps; detach() the old handle and attach to this one",
            stacklevel=level_of_the_user(),
        )
        mover.followed = None  # once is enough
    mover.calls = pulse.calls


def _one_followed(optimizer: Optimizer) -> _Followed | None:
    by_id = {id(each.param()): each for weights in _followed.values() for each in weights}
    return next((by_id[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in by_id), None)


def _look_for_copies(optimizer: Optimizer) -> None:
    """Warn where this step has moved weights of copies that have no method: once of each copy, so that those who go on are left alone."""
    now = (_copied[0], _epoch[0], len(optimizer.param_groups))
    if optimizer not in _searched or _searched[optimizer][0] != now:
        _searched[optimizer] = now, _copies_in(optimizer)
    copies = [module for ref in _searched[optimizer][1] if (module := ref()) is not None]
    if not (moved := [said for module in copies for said in _moved(module)]):
        return
    _, key, method = moved[0]
    for module in copies:  # those too that are frozen as yet
        note_copy(module, ())
    warnings.warn(
        f"this {type(optimizer).__name__} moves {key} of a copy of a model that {method} was attached to. A copy has no method, so none "
        f"takes part in these steps: attach {method}(...) to the copy and to this optimizer; load_state_dict of the new handle, with the "
        "state of the old one, takes over masks and steps",
        stacklevel=level_of_the_user(),
    )


def _copies_in(optimizer: Optimizer) -> list[weakref.ref[nn.Module]]:
    """The copies of which this optimizer has weights. One that shares its parameters with what is followed (`copy.copy`) is none."""
    followed = {id(each.param()) for weights in _followed.values() for each in weights}
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]} - followed
    return [weakref.ref(module) for module, said in list(_copies.items()) if any(id(_param(module, name)) in mine for name, _, _ in said)]


def _moved(module: nn.Module) -> Said:
    """The weights of a copy that the last step has moved."""
    said = _copies.get(module, ()) if _is_sparse(module) else ()
    return tuple(each for each in said if (param := _param(module, each[0])) is not None and param.grad is not None)


def _param(module: nn.Module, name: str) -> nn.Parameter | None:
    return module.__dict__.get("_parameters", {}).get(name)  # none yet in a copy that is being made


def _is_sparse(module: nn.Module) -> bool:
    return "_nofm" in module.__dict__  # no more after fold_ and densify_


def level_of_the_user() -> int:
    """The `stacklevel` of a warning from our caller that points at the first code which is neither nofm's nor torch's: a step comes
    through wrappers of both, and how many there are depends on the schedule."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("nofm", "torch"):
        level, frame = level + 1, frame.f_back
    return level
