"""A method is what happens at two moments of a step: before the optimizer moves the weights, and after.

`attach` hangs a method on the optimizer's own hooks, so the training loop does not change and the moment is always right:
gradients are reduced over processes and summed over micro-batches by then, and a step that a gradient scaler skips is skipped
here too. What a method may touch in a step is an `OwnedWeight`: a sparse weight, its gradient and its learning rate. Methods
themselves are frozen values without state; the number of the step lives in the `Handle`, masks in the layers.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .. import shards, ste
from ..errors import OptimizerError
from ..kernels import ops
from ..kernels.multi import Fleet
from ..kernels.steps import Term
from ..layers import Site, SparseModule, sites
from ..masks import check_finite, pack, unpack
from ..sparsify import unwrap
from .finite import FiniteWatch
from .memory import Memory
from .one_pass import OnePass, check_optimizer

__all__ = ["Handle", "Memory", "Method", "OwnedWeight", "Step", "attach"]


@dataclass(frozen=True)
class Method:
    """The base of all methods: the identity. Subclasses say how layers see their weights and what a step does to them."""

    unstructured: ClassVar[bool] = False  # whether it prunes anywhere in a layer; its layers are then sparsified as "1:1"
    is_dense: ClassVar[bool] = False  # whether layers compute with all their weights throughout

    def begin(self, site: Site) -> None:
        """Called for each sparse weight when the method is attached."""
        site.look_through(ste.straight_through)

    def start(self, sites: Sequence[Site], memory: Memory) -> None:
        """Called once when the method is attached, for methods that must see all sparse weights together."""
        for site in sites:
            self.begin(site)

    def go_on(self, sites: Sequence[Site], number: int) -> None:
        """Called when a state after `number` steps has been loaded, for methods whose layers look at weights differently by then."""

    def phase(self, number: int) -> str | None:
        """What kind of step `number` (from 1) is. Steps of one phase do the same work on the device, so that one captured in a
        CUDA graph can be replayed for the others. None: a step unlike others, which the host must run itself."""
        return "train"

    def counts_steps(self) -> bool:
        """Whether what a step does depends on those before it, so that a loop that is resumed must restore the handle, too."""
        return False

    def found(self, number: int, memory: Memory) -> dict[str, float]:
        """What the method has settled by itself after step `number`, by name: options that were left to it."""
        return {}

    def fusible(self) -> bool:
        """Whether what a step does is a `term`, which an optimizer's own pass over the weights can hold."""
        return False

    def term(self, step: Step) -> Term | None:
        """What this step adds to pruned weights, if it is no more than that. `before_step` is then not shown the weights that get it."""
        return None

    def before_step(self, step: Step) -> None:
        """Gradients are complete; the optimizer has not moved yet."""

    def after_step(self, step: Step) -> None:
        """The optimizer has moved the weights."""


@dataclass(frozen=True, slots=True)
class OwnedWeight:
    """A sparse weight in a step of the optimizer. Tensors are as they are now, and this process's part of the whole."""

    site: Site
    param: nn.Parameter
    lr: float | Tensor
    descends: bool  # False under maximize=True, where the optimizer adds the gradient

    @property
    def weight(self) -> Tensor:
        weight = self.param.detach()
        return weight if type(weight) is Tensor else shards.local(weight)

    @property
    def grad(self) -> Tensor:
        grad = self.param.grad
        assert grad is not None, f"{self.site.key} has no gradient in this step"
        return grad if type(grad) is Tensor else shards.local(grad)

    def mask(self) -> Tensor:
        # Not the site's own mask: FSDP2 may show the layer a gathered copy at this moment.
        stored = self.site.stored_mask
        return ops.mask(self.weight, self.site.grouping) if stored is None else shards.part_of(stored, self.param)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one optimizer, the same object at both moments. `number` counts from 1, without steps that a scaler skipped."""

    number: int
    weights: Sequence[OwnedWeight]  # those with a gradient, which the optimizer moves
    resting: Sequence[OwnedWeight]  # those without, which it leaves alone
    grad_scale: Tensor | None = None  # gradients are this many times too large: the optimizer divides inside its own step
    carried: dict[str, Tensor] = field(default_factory=dict)  # what a method keeps from the first moment for the second, by key
    memory: Memory = field(default_factory=lambda: Memory(()))  # what it keeps from step to step
    fleet: Fleet = field(default_factory=Fleet)  # launches over many weights, kept from step to step


class Handle:
    """A method at work. `step` is the number of steps taken; `detach()` ends it."""

    def __init__(self, method: Method, model: nn.Module, optimizers: Sequence[Optimizer], fused: bool = False) -> None:
        self.method = method
        self._sites = list(sites(model))
        self._lenses = [(site, site.lens) for site in self._sites]
        self._drivers: list[_Driver] = []
        self.memory = Memory(optimizers)
        owners = _owners(self._sites, optimizers)
        _check_patterns(method, self._sites)
        try:
            with torch.no_grad():
                method.start(self._sites, self.memory)
            for site in self._sites:
                self._check_begun(site)
        except Exception:
            self.detach()
            raise
        self._drivers = [_Driver(method, optimizer, follow, self.memory, fused) for optimizer, follow in owners]

    def _check_begun(self, site: Site) -> None:
        _ATTACHED.update(module for module, _ in site.users)
        minds_it = site.lens in (ste.frozen, ste.held) or isinstance(site.lens, ste.SoftThreshold)
        if site.stored_mask is not None and not minds_it:
            raise OptimizerError(
                f"{site.name} has a frozen mask, which {type(self.method).__name__} would pass by; "
                "densify_ and sparsify_ the model again to choose masks anew"
            )

    def __repr__(self) -> str:
        found = "".join(f", {name} found: {value:.3g}" for name, value in self.found.items())
        return f"Handle({self.method}, step={self.step}, {len(self._sites)} sparse weights{found})"

    @property
    def step(self) -> int:
        """Steps taken, by the optimizer that has taken most."""
        return max((driver.number for driver in self._drivers), default=0)

    @property
    def found(self) -> dict[str, float]:
        """What the method has settled by itself so far: {"decay": 0.0012} after the search of `SRSTE(decay="auto")`."""
        return self.method.found(self.step, self.memory)

    @property
    def unfused(self) -> dict[str, str]:
        """Under `fused=True`, the sparse weights whose last step was not fused, by key, and why not."""
        return {key: why for driver in self._drivers if driver.one_pass for key, why in driver.one_pass.unserved.items()}

    @property
    def phase(self) -> str | None:
        """What kind of step the next one is, see `Method.phase`."""
        return self.method.phase(self.step + 1)

    def replayed(self) -> None:
        """Count a step that ran inside a CUDA graph, where hooks do not, and look at the weights it left."""
        for driver in self._drivers:
            driver.number += 1
            driver.watch.replayed(driver.number)

    def detach(self) -> None:
        """Stop taking part in steps. Layers see their weights as before `attach`, except where a mask has been frozen."""
        for driver in self._drivers:
            driver.remove()
        self.memory.forget()
        for site, lens in self._lenses:
            _ATTACHED.difference_update(module for module, _ in site.users)
            if isinstance(site.module, SparseModule) and not isinstance(site.lens, ste.SoftThreshold):  # what it has learned stays
                site.look_through(lens if site.stored_mask is None else ste.frozen)
        self._lenses = []  # a second detach must not take a later method's lenses away

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on exactly: numbers of steps, and frozen masks as bits. No pickle needed."""
        masks = {site.key: pack(site.stored_mask) for site in self._sites if site.stored_mask is not None}
        steps = [driver.number for driver in self._drivers]
        return {"method": type(self.method).__name__, "steps": steps, "masks": masks, "memory": self.memory.state_dict()}

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
            lens = site.lens if site.stored_mask is not None else ste.frozen
            site.freeze(unpack(packed.to(site.weight.device), site.weight.shape), lens)
        self.memory.load_state_dict(state["memory"])
        self.method.go_on(self._sites, self.step)


def attach(method: Method, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], *, fused: bool = False) -> Handle:
    """Train `model` by `method` from now on, in the steps that `optimizer` takes. The training loop stays as it is.

    Several optimizers: pass them all; each weight follows the steps of the one that owns it.

    fused=True: SR-STE's term is added inside the optimizer's own pass over the weights, on a GPU, so that it costs no time of its own.
    For torch.optim.SGD, Adam and AdamW, whose state stays what it is. Weights that no kernel serves take the usual way
    (`Handle.unfused` names them). After a step `.grad` holds what backward left there, without the term.
    """
    if not isinstance(method, Method):
        raise OptimizerError(f"attach needs a method such as nofm.SRSTE(decay=2e-4), got {method!r}; attach(method, model, optimizer)")
    if not isinstance(model, nn.Module):
        raise OptimizerError(f"attach needs a model, got {type(model).__name__}; attach(method, model, optimizer)")
    model = unwrap(model)
    shards.reshard_(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    found = list(sites(model))
    if not found:
        raise OptimizerError(f"this {type(model).__name__} has no sparse layer; call sparsify_ before attach")
    if taken := [site.name for site in found if site.module in _ATTACHED]:
        raise OptimizerError(f"{taken[0]} has a method attached already; call detach() on its handle first")
    if not optimizers:
        raise OptimizerError("attach needs at least one optimizer")
    for each in optimizers:
        if not isinstance(each, Optimizer) or not hasattr(each, "_optimizer_step_pre_hooks"):
            raise OptimizerError(f"attach needs torch optimizers, got {type(each).__name__}; if it wraps one, pass the one inside")
        if isinstance(each, LBFGS):
            raise OptimizerError("LBFGS evaluates the loss many times in a step, so a term once a step is not defined for it")
        if fused:
            check_optimizer(each)
    if fused and not method.fusible():
        raise OptimizerError(f"fused=True puts SR-STE's term into the optimizer's step, and {method} has none there; attach without it")
    for site in found:
        shards.check_groups_whole(site.name, site.weight, site.grouping)
        check_finite(shards.local(site.weight.detach()), site.key)
    return Handle(method, model, optimizers, fused)


_ATTACHED: weakref.WeakSet[SparseModule] = weakref.WeakSet()


def _owners(found: list[Site], optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, list[Site]]]:
    """Whose steps each sparse weight follows: its optimizer's, or the first one's for a weight that does not train."""
    owners: dict[int, list[int]] = {}
    for i, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for param in group["params"]:
                owners.setdefault(id(param), []).append(i)
    mine: list[list[Site]] = [[] for _ in optimizers]
    orphans: list[Site] = []
    resting: list[Site] = []
    for site in found:
        owner = owners.get(id(site.weight), [])
        if len(owner) > 1:
            raise OptimizerError(f"{site.key} is in {len(owner)} of the optimizers; once a step is only defined for a weight with one")
        if owner:
            mine[owner[0]].append(site)
        else:
            (orphans if site.weight.requires_grad else resting).append(site)
    for optimizer, owned in zip(optimizers, mine, strict=True):
        if not owned:
            raise OptimizerError(
                f"this {type(optimizer).__name__} owns no sparse weight of the model; build it from this model's parameters, "
                "after any wrapping (FSDP2) that replaces them"
            )
    if orphans:
        raise OptimizerError(
            f"no optimizer given to attach owns {', '.join(site.key for site in orphans)}; pass all optimizers as a list, or set "
            "requires_grad=False on weights that should not train"
        )
    mine[0] += resting
    return list(zip(optimizers, mine, strict=True))


class _Driver:
    """Calls a method at the two moments of one optimizer's steps."""

    def __init__(self, method: Method, optimizer: Optimizer, follow: list[Site], memory: Memory, fused: bool) -> None:
        self.method, self.optimizer, self.number, self.memory = method, optimizer, 0, memory
        self.follow = [(site, site.weight) for site in follow]
        self.owned = [OwnedWeight(site, param, 0.0, True) for site, param in self.follow]  # as they were in the last step
        self.named_for: Sequence[OwnedWeight] = ()
        self.named: list[tuple[str, Tensor]] = []
        self.known: list[tuple[int, ...]] = []
        self.groups: dict[int, dict[str, Any]] = {}
        self.current: Step | None = None
        self.watch = FiniteWatch()
        self.fleet = Fleet()
        self.one_pass = OnePass(optimizer, self.watch) if fused else None
        self.hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if self.one_pass is not None:
            self.one_pass.remove()

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
        if self.number == 0 and self.method.counts_steps() and any(self.optimizer.state.get(param) for _, param in self.follow):
            warnings.warn(
                f"{type(self.method).__name__} begins at step 0, though its optimizer has taken steps before. If this loop goes on from a "
                "checkpoint, restore the handle that attach has returned, too: handle.load_state_dict(...)",
                stacklevel=2,
            )
        with torch.no_grad():
            step = self.current = self._step()
            if self.one_pass is not None:
                owned = [(each.site, each.param, self.groups[id(each.param)]) for each in step.weights]
                rest = self.one_pass.keep_back(owned, self.method.term(step))
                step = replace(step, weights=[step.weights[i] for i in rest])
            self.method.before_step(step)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, self.current = self.current, None
        if bool(getattr(optimizer, "found_inf", False)):  # a fused optimizer under a scaler skips inside its kernel
            if self.one_pass is not None:
                self.one_pass.skipped()
            return
        self.number += 1
        with torch.no_grad():
            step = step or self._step()  # None where the optimizer has not called its closure
            self.method.after_step(step)
            if len(step.weights) != len(self.named_for) or not all(map(operator.is_, step.weights, self.named_for)):  # in few steps
                self.named_for, self.named = step.weights, [(owned.site.key, owned.param) for owned in step.weights]
            told = [] if self.one_pass is None else self.one_pass.moved
            named = [self.named[i] for i in self.one_pass.rest] if self.one_pass and told else self.named
            self.watch.look(self.number, named, told)

    def _step(self) -> Step:
        groups = self._groups()
        weights, resting = [], []
        for i, (site, param) in enumerate(self.follow):
            if site.module._parameters.get(site.param) is not param or not isinstance(site.module, SparseModule):
                _check_still_trained(site, param)
            group = groups.get(id(param))
            if group is not None and param.grad is not None:
                if type(param) is not nn.Parameter:
                    shards.complete_grad_(param)
                owned, descends = self.owned[i], not group.get("maximize", False)
                if owned.lr is not group["lr"] or owned.descends is not descends:
                    owned = self.owned[i] = OwnedWeight(site, param, group["lr"], descends)
                weights.append(owned)
            elif group is None and param.requires_grad and param.grad is not None:
                raise OptimizerError(f"{site.key} trains but is not in the optimizer that it was attached with; detach() and attach again")
            else:
                resting.append(OwnedWeight(site, param, 0.0, True))
        return Step(self.number + 1, weights, resting, getattr(self.optimizer, "grad_scale", None), memory=self.memory, fleet=self.fleet)

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The optimizer's group of each parameter, by id. Made again only when a list of parameters has changed."""
        now = [(id(group), *map(id, group["params"])) for group in self.optimizer.param_groups]
        if now != self.known:
            self.known = now
            self.groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        return self.groups


def _check_patterns(method: Method, found: list[Site]) -> None:
    """Raise or warn where a method and the patterns of its layers do not go together."""
    name = type(method).__name__
    free = [site for site in found if site.grouping.pattern.m == 1]
    if method.unstructured and len(free) < len(found):
        bound = next(site for site in found if site.grouping.pattern.m > 1)
        raise OptimizerError(
            f"{bound.name} is {bound.grouping.pattern}, and {name} is unstructured: it prunes anywhere in a layer; "
            'sparsify_(model, "1:1") only says which layers'
        )
    if free and not method.unstructured and not method.is_dense:
        warnings.warn(f"{free[0].name} is 1:1, which {name} leaves dense ({len(free)} such layers)", stacklevel=4)


def _check_still_trained(site: Site, param: nn.Parameter) -> None:
    """Raise if a layer computes with another parameter than the one that the optimizer moves."""
    if site.module._parameters.get(site.param) is param and isinstance(site.module, SparseModule):
        return
    if not isinstance(site.module, SparseModule):
        raise OptimizerError(f"{site.name} is a plain module again (fold_, densify_) while a method is attached; call detach() first")
    if site.weight is not param and not shards.gathers(site.weight, param):
        raise OptimizerError(
            f"{site.key} is no longer the parameter that the optimizer owns (load_state_dict(assign=True), or a replaced "
            "parameter?); build the optimizer again, detach() and attach to it"
        )
