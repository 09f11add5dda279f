"""Calls a method at the two moments of one optimizer's steps.

It hangs on the optimizer's own hooks, so the training loop does not change and the moment is always right: gradients are reduced
over processes and summed over micro-batches by then, and a step that a gradient scaler skips is skipped here too.

Where `optimizer.step` is compiled, the hooks still run as they are, between compiled parts: a method decides by the number of the step and
looks at tensors on the host, so that traced it would be compiled anew step after step.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .. import following, shards
from ..errors import NonFiniteWeightError, OptimizerError
from ..kernels.multi import Fleet
from ..layers import SparseModule
from ..site import Site
from .base import Memory, Method, OwnedWeight, Step
from .finite import FiniteWatch
from .inside import optimizers_in, states_of
from .nesting import Nesting
from .one_pass import OnePass

__all__ = ["Driver"]


class Driver:
    """Calls a method at the two moments of one optimizer's steps."""

    def __init__(self, method: Method, optimizer: Optimizer, follow: list[Site], memory: Memory, fused: bool) -> None:
        self.method, self.optimizer, self.number, self.memory = method, optimizer, 0, memory
        self.follow = [(site, site.weight) for site in follow]
        self.marked = [site.module._nofm for site in follow]  # made anew by each sparsify_, so that it tells of one
        self.owned = [OwnedWeight(site, param, 0.0, True) for site, param in self.follow]  # as they were in the last step
        self.named_for: Sequence[OwnedWeight] = ()
        self.named: list[tuple[str, Tensor]] = []
        self.known: list[dict[str, Any]] = []
        self.known_params: list[list[Tensor]] = []
        self.groups: dict[int, dict[str, Any]] = {}
        self.current: Step | None = None
        self.is_late = False  # whether the next step must make up for one before it
        self.nesting = Nesting(optimizer)
        self.pulse = following.Pulse(type(method).__name__, method.acts_in_steps())
        following.follow(self.pulse, [(site.key, module, param) for site in follow for module, param in site.users])
        self.watch = FiniteWatch()
        self.is_plain = any(isinstance(each, SGD) for each in optimizers_in(optimizer))
        self.is_warned = False  # that the method is too strong for the learning rate
        self.fleet = Fleet()
        self.one_pass = OnePass(optimizer, self.watch) if fused else None
        why = "nofm's method works between the compiled parts of optimizer.step; compile it without fullgraph=True"
        self._uncompiled = torch.compiler.disable(_call, reason=why)
        if not getattr(type(optimizer).step, "hooked", False):  # a wrapper that leaves out Optimizer.__init__ (timm's Lookahead)
            optimizer._patch_step_function()
        self.hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def remove(self) -> None:
        following.unfollow(self.pulse)
        for hook in self.hooks:
            hook.remove()
        if self.one_pass is not None:
            self.one_pass.remove()

    def name(self) -> str:
        return type(self.method).__name__

    def sites(self) -> list[Site]:
        """Those that are still sparse: not folded, and not made plain."""
        return [site for site, _ in self.follow if isinstance(site.module, SparseModule)]

    def go_on(self, number: int) -> None:
        """Say that `number` steps have been taken, by a state that has been loaded."""
        self.number = number
        self.method.go_on(self.sites(), number)
        self.is_late = self.method.is_late(self.sites(), self.memory, number)

    def unfinished(self) -> str:
        """What the method has yet to do in later steps, as half a sentence with the step; "" where nothing is left."""
        left = self.method.unfinished(self.sites(), self.memory, self.number)
        return f"{self.name()} has taken {self.number} step{'s' * (self.number != 1)}, and {left}" if left else ""

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if not self.nesting.enters():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._at_moment(self._before_step)
            return None
        # A closure computes the gradients inside the step: the moment before the step comes when it returns.
        wrapped = self._then_before_step(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _then_before_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            loss = closure()
            self._at_moment(self._before_step)
            return loss

        return wrapped

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.nesting.leaves():
            self._at_moment(self._after_step)

    def _at_moment(self, work: Callable[[bool], None]) -> None:
        if torch.compiler.is_compiling():  # in compiled code that is always so, and only there
            self._uncompiled(work, True)
        else:
            work(False)

    def _before_step(self, compiled: bool) -> None:
        self.pulse.calls += 1
        if self.number == 0 and self.method.counts_steps() and any(_has_moved(self.optimizer, param) for _, param in self.follow):
            warnings.warn(
                f"{type(self.method).__name__} begins at step 0, though its optimizer has taken steps before. If this loop goes on from a "
                "checkpoint, restore the handle that attach has returned, too: handle.load_state_dict(...); if the method is to begin now, "
                "all is well",
                stacklevel=following.level_of_the_user(),
            )
        with torch.no_grad():
            step = self.current = self._step()
            if self.one_pass is not None:
                owned = [(each.site, each.param, self.groups[id(each.param)]) for each in step.weights]
                rest = self.one_pass.keep_back(owned, self.method.term(step), compiled)
                step = replace(step, weights=[step.weights[i] for i in rest])
            self.method.before_step(step)

    def _after_step(self, compiled: bool) -> None:
        self.pulse.calls += 1
        step, self.current = self.current, None
        if self.one_pass is not None:
            self.one_pass.check_moved()
        if bool(getattr(self.optimizer, "found_inf", False)):  # a fused optimizer under a scaler skips inside its kernel
            if self.one_pass is not None:
                self.one_pass.skipped()
            return
        self.number += 1
        with torch.no_grad():
            step = step or self._step()  # None where the optimizer has not called its closure
            self.method.after_step(step)
            self.is_late = False
            if not _are_same(step.weights, self.named_for):  # in few steps
                self.named_for, self.named = step.weights, [(owned.site.key, owned.param) for owned in step.weights]
            told = [] if self.one_pass is None else self.one_pass.moved
            named = [self.named[i] for i in self.one_pass.rest] if self.one_pass and told else self.named
            try:
                self.watch.look(self.number, named, told)
            except NonFiniteWeightError as error:
                if why := next((why for owned in step.weights if (why := self._too_strong(float(owned.lr), self.number))), ""):
                    raise NonFiniteWeightError(error.parameter, error.index, error.value, error.step, why) from None
                raise

    def _step(self) -> Step:
        groups = self._groups()
        weights, resting = [], []
        for i, (site, param) in enumerate(self.follow):
            if site.module._parameters.get(site.param) is not param or site.module.__dict__.get("_nofm") is not self.marked[i]:
                _check_still_trained(site, param, self.marked[i])
            group = groups.get(id(param))
            if group is not None and param.grad is not None:
                if type(param) is not nn.Parameter:
                    shards.complete_grad_(param)
                owned, descends = self.owned[i], not group.get("maximize", False)
                if owned.lr is not group["lr"] or owned.descends is not descends:
                    owned = self.owned[i] = OwnedWeight(site, param, group["lr"], descends)
                    self._warn_if_too_strong(owned.lr)
                weights.append(owned)
            elif group is None and param.requires_grad and param.grad is not None:
                raise OptimizerError(f"{site.key} trains but is not in the optimizer that it was attached with; detach() and attach again")
            else:
                resting.append(OwnedWeight(site, param, 0.0, True))
        scale = getattr(self.optimizer, "grad_scale", None)
        return Step(self.number + 1, weights, resting, scale, memory=self.memory, fleet=self.fleet, is_late=self.is_late)

    def _warn_if_too_strong(self, lr: float | Tensor) -> None:
        """Once, of a learning rate that has just been given; one that is a tensor, as some loops have on a GPU, is not waited for."""
        if not self.is_warned and not isinstance(lr, Tensor) and (why := self._too_strong(lr, self.number + 1)):
            self.is_warned = True
            warnings.warn(why, stacklevel=following.level_of_the_user())

    def _too_strong(self, lr: float, number: int) -> str:
        return self.method.too_strong(lr, self.is_plain, number)

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The optimizer's group of each parameter, by id. Made again only when a group or its parameters have changed."""
        groups = self.optimizer.param_groups
        if not (_are_same(groups, self.known) and all(map(_are_same, map(_PARAMS, groups), self.known_params))):
            self.known, self.known_params = list(groups), [list(group["params"]) for group in groups]
            self.groups = {id(p): group for group in groups for p in group["params"]}
        return self.groups


_PARAMS = operator.itemgetter("params")


def _are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    """Whether two lists hold the very same objects. No loop of Python's own: an optimizer may have a thousand parameters."""
    return len(these) == len(those) and all(map(operator.is_, these, those))


def _check_still_trained(site: Site, param: nn.Parameter, marked: object) -> None:
    """Raise if a layer is not what the method was attached to: plain, or sparse anew, or with another parameter than the optimizer's."""
    if not isinstance(site.module, SparseModule):
        raise OptimizerError(
            f"{site.name} is a plain module again (fold_, densify_) while a method is attached; call detach() before that. After fold_ the "
            "dense values of pruned weights are gone, and training cannot go on as it was: go on from a checkpoint, and take a folded copy "
            "in the middle of training by nofm.fold_(copy.deepcopy(model))"
        )
    if site.module._nofm is not marked:
        raise OptimizerError(
            f"{site.name} was made plain and sparse again while a method is attached, so that what the method had done to it is gone; "
            "detach() and attach again"
        )
    weight = site.module._parameters.get(site.param)
    if weight is None or not shards.gathers(weight, param):
        raise OptimizerError(
            f"{site.key} is no longer the parameter that the optimizer owns (load_state_dict(assign=True), or a replaced "
            "parameter?); build the optimizer again, detach() and attach to it"
        )


def _has_moved(optimizer: Optimizer, param: nn.Parameter) -> bool:
    """Whether an optimizer has moved a parameter, by what it remembers of it. Adagrad remembers something before its first step."""
    steps = [state.get("step", 1) for _, state in states_of(optimizer, param) if state]
    return any(bool((isinstance(step, Tensor) and step.is_cuda) or step != 0) for step in steps)  # a GPU may be recording a graph


def _call(work: Callable[[bool], None], compiled: bool) -> None:
    work(compiled)
