"""Which weights a method follows, and a word when an optimizer that it does not hang on moves them.

A loop may get a new optimizer half way: for a second stage, with other groups, or out of somebody's `configure_optimizers`. A method that
was attached to the old one then takes no part in any step, and nothing would tell: SR-STE has become STE, and a schedule of pruning stands
still. So a hook that torch calls after the steps of all optimizers looks whether the method has been called since the last step of the same
optimizer. That is right for wrappers, too, inside whose steps those of another optimizer are taken.

What is followed is known by the layers, to which there may be weak references: a parameter that has one cannot be swapped, which is how
torch converts a model (`model.double()`) under `torch.__future__.set_swap_module_params_on_conversion(True)`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Pulse", "follow", "unfollow"]


@dataclass(slots=True, eq=False)
class Pulse:
    """Of a method in the steps of one optimizer: how often it has been called. Knows neither, so that it keeps neither alive."""

    method: str
    calls: int = 0


@dataclass(slots=True, eq=False)
class _Followed:
    key: str
    module: weakref.ref[nn.Module]
    name: str
    pulse: Pulse

    def param(self) -> nn.Parameter | None:
        module = self.module()
        return None if module is None else module._parameters.get(self.name)


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
_hooks: list[Any] = []


def follow(pulse: Pulse, weights: Iterable[tuple[str, nn.Module, str]]) -> None:
    """Say that the method of `pulse` is called in the steps that move these weights: the key of each, its layer, and its name there."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_any_step))
    for key, module, name in weights:
        others = [each for each in _followed.get(module, []) if each.name != name]
        _followed[module] = [*others, _Followed(key, weakref.ref(module), name, pulse)]
    _epoch[0] += 1


def unfollow(pulse: Pulse) -> None:
    """Say that this has ended."""
    for module in list(_followed):
        if not (others := [each for each in _followed[module] if each.pulse is not pulse]):
            del _followed[module]
        else:
            _followed[module] = others
    _epoch[0] += 1


def _after_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
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
            stacklevel=3,
        )
        mover.followed = None  # once is enough
    mover.calls = pulse.calls


def _one_followed(optimizer: Optimizer) -> _Followed | None:
    by_id = {id(each.param()): each for weights in _followed.values() for each in weights}
    return next((by_id[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in by_id), None)
