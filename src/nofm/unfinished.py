"""Who trains a layer, and what its method has yet to do: for those who take the network as it is, by `fold_`, `save_packed`, `detach`.

Methods are rooms above; here is what those below know of one. A copy of a layer is trained by nobody.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

from .layers import SparseModule
from .site import Site

__all__ = ["TRAINED_BY", "Training", "too_early", "trainings", "who_keeps_more", "why_more"]


class Training(Protocol):
    """A method at work in the steps of an optimizer."""

    def name(self) -> str:
        """The name of the method."""

    def unfinished(self) -> str:
        """What it has yet to do, as half a sentence with the step at which it will be done; "" where nothing is left."""


# Which method trains a layer; `attach` writes it. Not in the layer, which would be copied with it, and by a reference that keeps nothing
# alive: where the optimizer is gone, so is its method.
TRAINED_BY: weakref.WeakKeyDictionary[SparseModule, weakref.ref[Training]] = weakref.WeakKeyDictionary()


def who_keeps_more(found: Sequence[Site]) -> str:
    """Which layers compute with more weights than their pattern keeps, and with what; "" where none does."""
    if not (wider := [site for site in found if site.keeps_more]):
        return ""
    others = f" and {len(wider) - 1} more layers compute" if len(wider) > 1 else " computes"
    now = ", ".join(dict.fromkeys(site.module._nofm[site.param].now for site in wider))
    return f"{wider[0].name}{others} with more weights than the pattern keeps ({now})"


def why_more(found: Sequence[Site]) -> str:
    """Why that is so, and until when."""
    training = _training(next(site for site in found if site.keeps_more))
    if training is None:
        return (
            "no method is attached that would prune it. A copy (EMA) is as its model was when it was made: by Dense, or before the step at "
            "which ASP (prune_at) or SRSTE (begin_at, and ramp_at before it) prunes; if its model is pruned by now, nofm.follow_(copy, "
            "model) first. If this is no copy, the optimizer that its method was attached to is gone"
        )
    return training.unfinished() or f"the method {training.name()} trains all weights"


def trainings(found: Sequence[Site]) -> list[Training]:
    """What trains these layers."""
    return [training for site in found if (training := _training(site)) is not None]


def too_early(what: str, at_work: Iterable[Training]) -> str:
    """A warning where one of these is `what` (folded, detached) before it has finished; "" where all have done their part."""
    left = next((left for training in at_work if (left := training.unfinished())), "")
    return f"{left}. It is {what} before that: train until then, or attach it with options that fit the steps that you take" if left else ""


def _training(site: Site) -> Training | None:
    """The method that trains the layer, where one is attached and its optimizer is still there."""
    found = TRAINED_BY.get(site.module)
    return None if found is None else found()
