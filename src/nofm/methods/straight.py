"""The straight-through estimator on N:M weights (paper section 3.2, Eq. 3; Bengio et al. 2013)."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Method

__all__ = ["STE"]


@dataclass(frozen=True)
class STE(Method):
    """W <- W - lr * g(S(W)): the gradient of the N:M weight S(W) goes to all of W, kept and pruned alike.

    The layers do all of it (`ste.straight_through`); a step needs nothing more.
    """
