"""What a forward hook may say of itself: that it changes no weights. Layers below such a hook can be masked all at once (see `bulk`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["is_harmless", "leaves_weights"]

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def leaves_weights(hook: _Hook) -> _Hook:
    """Mark a function that is to be a hook and changes no weights."""
    hook.__dict__["_nofm_leaves_weights"] = True
    return hook


def is_harmless(hook: Any) -> bool:
    """Whether it is marked so."""
    return getattr(hook, "_nofm_leaves_weights", False) is True
