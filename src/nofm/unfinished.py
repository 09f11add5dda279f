"""Who trains a layer, and what its method has yet to do: for those who take the network as it is, by `fold_`, `save_packed`, `detach`,
and for those who make more of it sparse.

Methods are rooms above; here is what those below know of one. A copy of a layer is trained by nobody.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from . import ste
from .errors import OptimizerError
from .following import alive
from .site import Site

__all__ = ["Training", "check_free", "note_attached", "note_detached", "too_early", "trainings", "unfollowed", "who_keeps_more", "why_more"]


class Training(Protocol):
    """A method at work in the steps of an optimizer."""

    def name(self) -> str:
        """The name of the method."""

    def unfinished(self) -> str:
        """What it has yet to do, as half a sentence with the step at which it will be done; "" where nothing is left."""


@dataclass(frozen=True, slots=True)
class _Attached:
    """What a module of a model has to do with the method that the model was given to."""

    training: weakref.ref[Training]
    trains: bool  # whether it trains a weight of this very module; not of one that is dense, or has become sparse later


# Every module of a model that `attach` was given, sparse or not. Not in the module, which would be copied with it, and by a reference that
# keeps nothing alive: where the optimizer is gone, so is its method.
_ATTACHED: weakref.WeakKeyDictionary[nn.Module, _Attached] = weakref.WeakKeyDictionary()


def note_attached(model: nn.Module, trained: Mapping[nn.Module, Training]) -> None:
    """Remember that a method is at work in `model`, and what trains which of its layers."""
    first = next(iter(trained.values()))
    for module in model.modules():
        before = _ATTACHED.get(module)
        trained_elsewhere = before is not None and before.trains and before.training() is not None  # a layer that is plain for now
        if module in trained or not trained_elsewhere:
            _ATTACHED[module] = _Attached(weakref.ref(trained.get(module, first)), module in trained)


def note_detached(ended: Sequence[Training]) -> None:
    """Say that these have ended."""
    for module in alive(_ATTACHED):
        if (attached := _ATTACHED.get(module)) is not None and attached.training() in ended:
            del _ATTACHED[module]


def check_free(found: Iterable[Site]) -> None:
    """Raise if a method is attached to an optimizer that somebody still has. One whose optimizer is gone has ended without a word."""
    taken = [(site, attached) for site in found if (attached := _ATTACHED.get(site.module)) is not None and attached.trains]
    if taken:
        gc.collect()  # an optimizer and its hooks hold each other, so that one that nobody has any more may still be there
    for site, attached in taken:
        if attached.training() is not None:
            raise OptimizerError(f"{site.name} has a method attached already; call detach() on the handle that attach has returned first")
        if site.stored_mask is None:
            site.look_through(ste.straight_through)  # as `detach` would have left it


def unfollowed(made: Mapping[str, nn.Module]) -> str:
    """A warning where some of these layers (by name), which become sparse now, are of a model that a method is attached to and are not
    followed by it; "" where there are none. A method whose optimizer is gone has ended."""
    if _missed(made):
        gc.collect()  # as above
    if not (missed := _missed(made)):
        return ""
    names = ", ".join(list(missed)[:3]) + f" and {len(missed) - 3} more" * (len(missed) > 3)
    become, them, they, their = ("become", "them", "they are", "their") if len(missed) > 1 else ("becomes", "it", "it is", "its")
    return (
        f"{names} {become} sparse in a model that {next(iter(missed.values()))} is attached to already. It follows the layers that were "
        f"sparse then, and takes no part in training {them}: call sparsify_ before attach, or detach() and attach again; if {they} to have "
        f"a method of {their} own, attach that"
    )


def _missed(made: Mapping[str, nn.Module]) -> dict[str, str]:
    """The layers of `made` that lie in a model with a method and are not trained by one, as they are called there, and the method."""
    around: dict[int, tuple[str, str]] = {}
    trained: set[int] = set()
    for module in alive(_ATTACHED):
        if (attached := _ATTACHED.get(module)) is None or (training := attached.training()) is None:
            continue
        if attached.trains:
            trained.add(id(module))
        for name, part in module.named_modules():
            if len(name) >= len(around.get(id(part), ("", ""))[0]):  # seen from the outermost, which may be gone
                around[id(part)] = name, training.name()
    found = [(name, *around[id(module)]) for name, module in made.items() if id(module) in around and id(module) not in trained]
    return {there or here: method for here, there, method in found}


def who_keeps_more(found: Sequence[Site]) -> str:
    """Which layers compute with more weights than their pattern keeps, and with what; "" where none does."""
    if not (wider := [site for site in found if site.keeps_more]):
        return ""
    others = f" and {len(wider) - 1} more layers compute" if len(wider) > 1 else " computes"
    now = ", ".join(dict.fromkeys(site.module._nofm[site.param].now for site in wider))
    return f"{wider[0].name}{others} with more weights than the pattern keeps ({now})"


def why_more(found: Sequence[Site]) -> str:
    """Why that is so, and until when."""
    training = _training_of(next(site for site in found if site.keeps_more))
    if training is None:
        return (
            "no method is attached that would prune it. A copy (EMA) is as its model was when it was made: by Dense, or before the step at "
            "which ASP (prune_at) or SRSTE (begin_at, and ramp_at before it) prunes; if its model is pruned by now, nofm.follow_(copy, "
            "model) first. If this is no copy, the optimizer that its method was attached to is gone"
        )
    return training.unfinished() or f"the method {training.name()} trains all weights"


def trainings(found: Sequence[Site]) -> list[Training]:
    """What trains these layers."""
    return [training for site in found if (training := _training_of(site)) is not None]


def too_early(what: str, at_work: Iterable[Training]) -> str:
    """A warning where one of these is `what` (folded, detached) before it has finished; "" where all have done their part."""
    left = next((left for training in at_work if (left := training.unfinished())), "")
    return f"{left}. It is {what} before that: train until then, or attach it with options that fit the steps that you take" if left else ""


def _training_of(site: Site) -> Training | None:
    """The method that trains the layer, where one is attached and its optimizer is still there."""
    attached = _ATTACHED.get(site.module)
    return attached.training() if attached is not None and attached.trains else None
