"""`attach`: train a model by a method from now on; and the `Handle` that says how far it is, saves it and ends it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from .. import shards, ste
from ..errors import NotCopiedError, OptimizerError
from ..layers import SparseModule
from ..masks import check_finite, pack, unpack
from ..site import Site, shortly, sites, unwrap
from ..unfinished import check_free, note_attached, note_detached, too_early
from . import saved
from .base import Memory, Method
from .driver import Driver
from .one_pass import check_optimizer

__all__ = ["Handle", "attach"]


class Handle:
    """A method at work. `step` is the number of steps taken; `detach()` ends it."""

    def __init__(self, method: Method, model: nn.Module, optimizers: Sequence[Optimizer], fused: bool = False) -> None:
        self.method = method
        self._sites = list(sites(model))
        self._lenses = [(site, site.lens, site.module._nofm) for site in self._sites]  # the last is made anew by each sparsify_
        self._drivers: list[Driver] = []
        self.memory = Memory(optimizers)
        owners = _owners(self._sites, optimizers)
        _check_patterns(method, self._sites)
        _check_thresholds(method, self._sites)
        try:
            with torch.no_grad():
                method.start(self._sites, self.memory)
            saved.check_remembered(method, self.memory)
            for site in self._sites:
                self._check_begun(site)
        except Exception:
            self.detach()
            raise
        self._drivers = [Driver(method, optimizer, follow, self.memory, fused) for optimizer, follow in owners]
        note_attached(model, {module: driver for driver in self._drivers for site, _ in driver.follow for module, _ in site.users})

    def _check_begun(self, site: Site) -> None:
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
    def unfinished(self) -> str:
        """What the method has yet to do in later steps before the network is what was asked for; "" where nothing is left."""
        return next((left for driver in self._drivers if (left := driver.unfinished())), "")

    @property
    def unfused(self) -> dict[str, str]:
        """Under `fused=True`, the sparse weights whose last step was not fused, by key, and why not."""
        return {key: why for driver in self._drivers if driver.one_pass for key, why in driver.one_pass.unserved.items()}

    @property
    def phase(self) -> str | None:
        """What kind of step the next one is, see `Method.phase`."""
        return None if any(driver.is_late for driver in self._drivers) else self.method.phase(self.step + 1)

    def replayed(self) -> None:
        """Count a step that ran inside a CUDA graph, where hooks do not, and look at the weights it left."""
        for driver in self._drivers:
            driver.number += 1
            driver.watch.replayed(driver.number)

    def detach(self) -> None:
        """Stop taking part in steps. Layers see their weights as before `attach`, except where a mask has been frozen.

        A method that has not finished (a dense or gradual start, a search for lambda, a pruning to come) says so: its network is not what
        was asked for.
        """
        is_at_work = any(isinstance(site.module, SparseModule) for site, _, _ in self._lenses)  # neither detached nor folded before
        said = too_early("detached", self._drivers) if is_at_work else ""
        for driver in self._drivers:
            driver.remove()
        self.memory.forget()
        for site, lens, marked in self._lenses:
            is_ours = isinstance(site.module, SparseModule) and site.module._nofm is marked
            if is_ours and not isinstance(site.lens, ste.SoftThreshold):  # what it has learned stays
                site.look_through(lens if site.stored_mask is None else ste.frozen)
        note_detached(self._drivers)
        self._lenses = []  # a second detach must not take a later method's lenses away
        if said:
            warnings.warn(said, stacklevel=2)  # last: where warnings are errors it would never be detached

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on exactly: numbers of steps, frozen masks as bits, what the method remembers; and of which
        method, options and patterns it is. No pickle needed."""
        masks = {site.key: pack(site.stored_mask) for site in self._sites if site.stored_mask is not None}
        steps = [driver.number for driver in self._drivers]
        return {**saved.origin(self.method, self._sites), "steps": steps, "masks": masks, "memory": self.memory.state_dict()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _NotCopied()  # mostly a part of something else, such as a LightningModule that is copied for an average

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotCopiedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`, forward or back. Load the model first: loading weights makes frozen masks anew.

        A state of another method, of other patterns or of options that it was made by (`sparsity`) is refused, and nothing is loaded; so
        is one of a network that has come to its pattern, where the attached `begin_at` or `ramp_at` would give it more weights again.
        Where another option has changed, the attached one holds from now on, and a warning names both.
        """
        owned = [[site for site, _ in driver.follow] for driver in self._drivers]
        saved.check(state, self.method, owned, self._sites, self.memory)
        if changed := saved.changes(state, self.method):
            was, now = saved.told(changed)
            warnings.warn(
                f"this state is of {type(self.method).__name__}({was}), the attached one has {now}, which holds from step "
                f"{max(state['steps'])} on; what was done until then stays. If that is not meant, detach(), attach the method as it was, "
                "and load model, optimizer and handle again, in this order",
                stacklevel=2,
            )
        for site in self._sites:
            if site.stored_mask is not None and site.key not in state["masks"]:
                site.thaw(ste.dense)  # the state is of a time before the mask was made
        by_key = {site.key: site for site in self._sites}
        for key, packed in state["masks"].items():
            site = by_key[key]
            lens = site.lens if site.stored_mask is not None else ste.frozen
            site.freeze(unpack(packed.to(site.weight.device), site.weight.shape), lens)
        self.memory.load_state_dict(state["memory"])
        for driver, number in zip(self._drivers, state["steps"], strict=True):
            driver.go_on(int(number))


class _NotCopied:
    """What stands in a copy where its original has a handle, until somebody uses it."""

    def __repr__(self) -> str:
        return "no handle: this is a copy, which has no method"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else _NotCopiedAttribute()


class _NotCopiedAttribute(NotCopiedError, AttributeError):
    """As `hasattr` wants it."""


def attach(method: Method, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], *, fused: bool = False) -> Handle:
    """Train `model` by `method` from now on, in the steps that `optimizer` takes. The training loop stays as it is.

    Several optimizers: pass them all; each weight follows the steps of the one that owns it. What Accelerate and Lightning wrap around an
    optimizer may be passed as well.

    A copy of the model, an average (EMA) say, has no method. What a method changes later in how layers see their weights (ASP's and
    `begin_at`'s pruning, the masks of unstructured methods) it takes over by `nofm.follow_(copy, model)`.

    fused=True: SR-STE's term is added inside the optimizer's own pass over the weights, on a GPU, so that it costs no time of its own.
    For torch.optim.SGD, Adam and AdamW, whose state stays what it is. Weights that no kernel serves take the usual way
    (`Handle.unfused` names them). After a step `.grad` holds what backward left there, without the term.
    """
    if not isinstance(method, Method):
        raise OptimizerError(
            f"attach needs a method such as nofm.SRSTE(decay=2e-4), got {shortly(method)}; attach(method, model, optimizer)"
        )
    saved.check_options(method)
    if not isinstance(model, nn.Module):
        raise OptimizerError(f"attach needs a model, got {type(model).__name__}; attach(method, model, optimizer)")
    model = unwrap(model)
    shards.reshard_(model)
    optimizers = [_inside(each) for each in _listed(optimizer)]
    found = list(sites(model))
    if not found:
        raise OptimizerError(f"this {type(model).__name__} has no sparse layer; call sparsify_ before attach")
    check_free(found)
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
        if site.weight.is_meta:
            raise OptimizerError(f"{site.key} is on the meta device, so it has no values yet; attach after to_empty() and loading")
        shards.check_groups_whole(site.name, site.weight, site.grouping)
        check_finite(shards.local(site.weight.detach()), site.key)
    return Handle(method, model, optimizers, fused)


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, Optimizer | nn.Module | str) else [given]


def _inside(optimizer: Any) -> Any:
    """The optimizer inside a wrapper that hands it the steps (Accelerate's, Lightning's): hooks of the wrapper itself are never called."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and isinstance(inside := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inside
    return optimizer


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
    if resting and not orphans and not any(mine):
        raise OptimizerError(
            f"no sparse weight of this model trains ({resting[0].key} has requires_grad=False), so a method has nothing to do; layers "
            "compute with their N:M weights without one"
        )
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


def _check_thresholds(method: Method, found: list[Site]) -> None:
    """Raise where layers have thresholds that no step of `method` would train, and that its masks would take away."""
    if not method.has_thresholds and (left := [site for site in found if isinstance(site.lens, ste.SoftThreshold)]):
        raise OptimizerError(
            f"{left[0].name} has a threshold that STR has learned, which {type(method).__name__} would pass by; fold_ the model, which "
            "writes in what its layers compute with, and sparsify_ it again"
        )


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
