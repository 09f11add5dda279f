"""A method is what happens at two moments of a step: before the optimizer moves the weights, and after.

`attach` hangs a method on the optimizer's own hooks, so the training loop does not change and the moment is always right:
gradients are reduced over processes and summed over micro-batches by then, and a step that a gradient scaler skips is skipped
here too. What a method may touch in a step is an `OwnedWeight`: a sparse weight, its gradient and its learning rate. Methods
themselves are frozen values without state; the number of the step lives in the `Handle`, masks in the layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .. import shards, ste
from ..errors import OptimizerError
from ..layers import Site, SparseModule, sites
from ..masks import pack, unpack
from ..sparsify import unwrap
from .finite import FiniteWatch

__all__ = ["Handle", "Method", "OwnedWeight", "Step", "attach"]


@dataclass(frozen=True)
class Method:
    """The base of all methods: the identity. Subclasses say how layers see their weights and what a step does to them."""

    def begin(self, site: Site) -> None:
        """Called for each sparse weight when the method is attached."""
        site.look_through(ste.straight_through)

    def before_step(self, step: Step) -> None:
        """Gradients are complete; the optimizer has not moved yet."""

    def after_step(self, step: Step) -> None:
        """The optimizer has moved the weights."""


@dataclass(frozen=True, slots=True)
class OwnedWeight:
    """A sparse weight that the optimizer is about to move, or has just moved. Tensors are this process's part of the whole."""

    site: Site
    weight: Tensor
    grad: Tensor
    lr: float | Tensor
    descends: bool  # False under maximize=True, where the optimizer adds the gradient

    def mask(self) -> Tensor:
        return self.site.mask()


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one optimizer. `number` counts from 1 and leaves out steps that a gradient scaler skipped."""

    number: int
    weights: Sequence[OwnedWeight]
    grad_scale: Tensor | None = None  # gradients are this many times too large: the optimizer divides inside its own step
    taken: Tensor | None = None  # 0 where the optimizer will skip this step inside its own kernel, else 1


class Handle:
    """A method at work. `step` is the number of steps taken; `detach()` ends it."""

    def __init__(self, method: Method, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.method = method
        self._sites = list(sites(model))
        self._drivers = [_Driver(method, optimizer, owned) for optimizer, owned in _owners(self._sites, optimizers)]
        self._lenses = [(site, site.lens) for site in self._sites]
        for site in self._sites:
            method.begin(site)
            _ATTACHED.add(site.module)

    @property
    def step(self) -> int:
        """Steps taken, by the optimizer that has taken most."""
        return max(driver.number for driver in self._drivers)

    def detach(self) -> None:
        """Stop taking part in steps. Layers see their weights as before `attach`, except where a mask has been frozen."""
        for driver in self._drivers:
            driver.remove()
        for site, lens in self._lenses:
            _ATTACHED.discard(site.module)
            if isinstance(site.module, SparseModule) and site.stored_mask is None:
                site.look_through(lens)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on exactly: numbers of steps, and frozen masks as bits. No pickle needed."""
        masks = {site.key: pack(site.stored_mask) for site in self._sites if site.stored_mask is not None}
        return {"method": type(self.method).__name__, "steps": [driver.number for driver in self._drivers], "masks": masks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`. Load the model first: loading weights makes frozen masks anew."""
        name, by_key = type(self.method).__name__, {site.key: site for site in self._sites}
        if state["method"] != name:
            raise OptimizerError(f"this state is of method {state['method']}, the attached one is {name}; attach the same method")
        if len(state["steps"]) != len(self._drivers):
            raise OptimizerError(f"this state is of {len(state['steps'])} optimizers, {len(self._drivers)} are attached")
        if unknown := sorted(set(state["masks"]) - set(by_key)):
            raise OptimizerError(f"this state has masks for {', '.join(unknown)}, which are not sparse weights of this model")
        for driver, number in zip(self._drivers, state["steps"], strict=True):
            driver.number = int(number)
        for key, packed in state["masks"].items():
            site = by_key[key]
            site.freeze(unpack(packed.to(site.weight.device), site.weight.shape))


def attach(method: Method, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]) -> Handle:
    """Train `model` by `method` from now on, in the steps that `optimizer` takes. The training loop stays as it is.

    Several optimizers: pass them all; each weight follows the steps of the one that owns it.
    """
    model = unwrap(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    found = list(sites(model))
    if not found:
        raise OptimizerError(f"this {type(model).__name__} has no sparse layer; call sparsify_ before attach")
    if taken := [site.name for site in found if site.module in _ATTACHED]:
        raise OptimizerError(f"{taken[0]} has a method attached already; call detach() on its handle first")
    for each in optimizers:
        if not isinstance(each, Optimizer) or not hasattr(each, "_optimizer_step_pre_hooks"):
            raise OptimizerError(f"attach needs torch optimizers, got {type(each).__name__}; if it wraps one, pass the one inside")
        if isinstance(each, LBFGS):
            raise OptimizerError("LBFGS evaluates the loss many times in a step, so a term once a step is not defined for it")
    for site in found:
        shards.check_groups_whole(site.name, site.weight, site.grouping)
    return Handle(method, model, optimizers)


_ATTACHED: weakref.WeakSet[SparseModule] = weakref.WeakSet()


def _owners(found: list[Site], optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, list[Site]]]:
    """Which sparse weights each optimizer owns; all that train must have an owner, and every optimizer must own one."""
    owner = {id(p): i for i, optimizer in enumerate(optimizers) for group in optimizer.param_groups for p in group["params"]}
    owned: list[list[Site]] = [[] for _ in optimizers]
    orphans = []
    for site in found:
        if id(site.weight) in owner:
            owned[owner[id(site.weight)]].append(site)
        elif site.weight.requires_grad:
            orphans.append(site.key)
    for optimizer, mine in zip(optimizers, owned, strict=True):
        if not mine:
            raise OptimizerError(
                f"this {type(optimizer).__name__} owns no sparse weight of the model; build it from this model's parameters, "
                "after any wrapping (FSDP2) that replaces them"
            )
    if orphans:
        more = f" and {len(orphans) - 1} more" if len(orphans) > 1 else ""
        raise OptimizerError(
            f"{orphans[0]}{more} train(s) but no optimizer given to attach owns it; pass all optimizers as a list, or set "
            "requires_grad=False on weights that should not train"
        )
    return list(zip(optimizers, owned, strict=True))


class _Driver:
    """Calls a method at the two moments of one optimizer's steps."""

    def __init__(self, method: Method, optimizer: Optimizer, owned: list[Site]) -> None:
        self.method, self.optimizer, self.number = method, optimizer, 0
        self.sites = owned
        self.params = [site.weight for site in owned]
        self.watch = FiniteWatch()
        self.hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._before_step()
            return None
        # A closure computes the gradients inside the step: the moment before the step comes when it returns.
        wrapped = self._then_before_step(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _then_before_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def wrapped() -> Any:
            loss = closure()
            self._before_step()
            return loss

        return wrapped

    def _before_step(self) -> None:
        with torch.no_grad():
            self.method.before_step(self._step(self.number + 1))

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is not None and found_inf.item():  # a fused optimizer under a scaler skips inside its kernel
            return
        self.number += 1
        with torch.no_grad():
            step = self._step(self.number)
            self.method.after_step(step)
            self.watch.look(self.number, [(w.site.key, w.weight) for w in step.weights])

    def _step(self, number: int) -> Step:
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        weights = []
        for site, param in zip(self.sites, self.params, strict=True):
            self._check_still_owned(site, param)
            if param.grad is None:  # the optimizer leaves it alone, and so do we
                continue
            group = groups[id(param)]
            local = shards.local(param.detach()), shards.local(param.grad)
            weights.append(OwnedWeight(site, *local, group["lr"], not group.get("maximize", False)))
        found_inf = getattr(self.optimizer, "found_inf", None)
        taken = None if found_inf is None else 1.0 - found_inf
        return Step(number, weights, getattr(self.optimizer, "grad_scale", None), taken)

    def _check_still_owned(self, site: Site, param: nn.Parameter) -> None:
        if not isinstance(site.module, SparseModule):
            raise OptimizerError(f"{site.name} is a plain module again (fold_, densify_) while a method is attached; call detach() first")
        now = site.weight
        if now is not param and shards.local(now) is now and shards.local(param) is param:
            raise OptimizerError(
                f"{site.key} is no longer the parameter that the optimizer owns (load_state_dict(assign=True), or a replaced "
                "parameter?); build the optimizer again and attach to it"
            )
