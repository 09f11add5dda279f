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

__all__ = ["Pulse", "Said", "alive", "follow", "forget", "forget_copy", "level_of_the_user", "note_copy", "said_of", "unfollow"]

# What a copy is told of the weights of its original: the name of each in the layer, its key in the model, and the method.
Said: TypeAlias = tuple[tuple[str, str, str], ...]


# Which lists of parameters the groups of an optimizer hold, and how long each is.
_Lists: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class Pulse:
    """Of a method in the steps of one optimizer: how often it has been called. Knows neither, so that it keeps neither alive."""

    method: str
    acts: bool = True  # whether it does anything in steps: nothing is lost without one that does not, and copies have its layers' lenses
    calls: int = 0


@dataclass(slots=True, eq=False)
class _Followed:
    key: str
    module: weakref.ref[nn.Module]
    name: str
    pulse: Pulse

    def param(self) -> nn.Parameter | None:
        module = self.module()
        return None if module is None else _param(module, self.name)


@dataclass(slots=True, eq=False)
class _Mover:
    """An optimizer, one followed weight that it has, if any, and the pulse of its method when it had last stepped."""

    epoch: int
    params: _Lists
    followed: _Followed | None
    calls: int = -1


# The weights of each layer; they stay when the old optimizer is gone, or nobody would ask after it.
_followed: weakref.WeakKeyDictionary[nn.Module, list[_Followed]] = weakref.WeakKeyDictionary()
_movers: weakref.WeakKeyDictionary[Optimizer, _Mover] = weakref.WeakKeyDictionary()
_epoch = [0]  # counts changes of what is followed
# The copies of such layers that no method has been attached to; and the optimizers that have been searched for them, with what was found.
_copies: weakref.WeakKeyDictionary[nn.Module, Said] = weakref.WeakKeyDictionary()
_searched: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, int, _Lists], list[weakref.ref[nn.Module]]]] = weakref.WeakKeyDictionary()
_copied = [0]  # counts copies
_hooks: list[Any] = []


def follow(pulse: Pulse, weights: Iterable[tuple[str, nn.Module, str]]) -> None:
    """Say that the method of `pulse` is called in the steps that move these weights: the key of each, its layer, and its name there."""
    _hang_on()
    for key, module, name in weights:
        others = [each for each in _followed.get(module, []) if each.name != name]
        _followed[module] = [*others, *([_Followed(key, weakref.ref(module), name, pulse)] if pulse.acts else [])]
        note_copy(module, tuple(said for said in _copies.get(module, ()) if said[0] != name))
    _epoch[0] += 1


def unfollow(pulse: Pulse) -> None:
    """Say that this has ended. Who shares its parameters (`copy.copy`) is then no copy that a method would be missing from."""
    free: set[int] = set()
    for module in alive(_followed):
        weights = _followed.pop(module, [])
        free |= {id(param) for each in weights if each.pulse is pulse and (param := each.param()) is not None}
        if others := [each for each in weights if each.pulse is not pulse]:
            _followed[module] = others
    for module in alive(_copies):
        note_copy(module, tuple(said for said in _copies.get(module, ()) if id(_param(module, said[0])) not in free))
    _epoch[0] += 1


def forget(module: nn.Module) -> None:
    """Say that this layer is plain again: what is made of it from now on has nothing to do with the method or the copy that it was."""
    _followed.pop(module, None)
    _copies.pop(module, None)
    _epoch[0] += 1


def alive(registry: weakref.WeakKeyDictionary[Any, Any]) -> list[Any]:
    """The keys, taken at once. Going through the registry itself is a loop of Python's, and another thread that copies a model meanwhile
    adds to it, which ends such a loop by an error: here, in somebody's `optimizer.step`."""
    return [key for ref in registry.keyrefs() if (key := ref()) is not None]


def said_of(module: nn.Module) -> Said:
    """What a copy of this layer is to be told: of a method that follows it, or followed what it is a copy of itself."""
    mine = tuple((each.name, each.key, each.pulse.method) for each in _followed.get(module, ()))
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
    mover, params = _movers.get(optimizer), _lists_of(optimizer)
    if mover is None or mover.epoch != _epoch[0] or mover.params != params:
        mover = _movers[optimizer] = _Mover(_epoch[0], params, _one_followed(optimizer))
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


def _lists_of(optimizer: Optimizer) -> _Lists:
    return tuple((id(params := group["params"]), len(params)) for group in optimizer.param_groups)


def _all_followed() -> dict[int, _Followed]:
    """By the id of the parameter."""
    return {id(each.param()): each for module in alive(_followed) for each in _followed.get(module, [])}


def _one_followed(optimizer: Optimizer) -> _Followed | None:
    by_id = _all_followed()
    return next((by_id[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in by_id), None)


def _look_for_copies(optimizer: Optimizer) -> None:
    """Warn where this step has moved weights of copies that have no method: once of each copy, so that those who go on are left alone."""
    now = (_copied[0], _epoch[0], _lists_of(optimizer))
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
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]} - _all_followed().keys()
    copies = [module for module in alive(_copies) if any(id(_param(module, name)) in mine for name, _, _ in _copies.get(module, ()))]
    return list(map(weakref.ref, copies))


def _moved(module: nn.Module) -> Said:
    """The weights of a copy that the last step has moved."""
    said = _copies.get(module, ())
    return tuple(each for each in said if (param := _param(module, each[0])) is not None and param.grad is not None)


def _param(module: nn.Module, name: str) -> nn.Parameter | None:
    return module.__dict__.get("_parameters", {}).get(name)  # none yet in a copy that is being made


def level_of_the_user() -> int:
    """The `stacklevel` of a warning from our caller that points at the first code which is neither nofm's nor torch's: a step comes
    through wrappers of both, and how many there are depends on the schedule."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("nofm", "torch"):
        level, frame = level + 1, frame.f_back
    return level
