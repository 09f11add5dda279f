"""The straight-through estimator on N:M weights."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Method

__all__ = ["STE"]


@dataclass(frozen=True)
class STE(Method):
    """The gradient of the N:M weight S(W) goes to all of W, kept and pruned alike.

    Paper: Bengio, Leonard & Courville, "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation", 2013,
    arXiv:1308.3432; on N:M weights Zhou et al., ICLR 2021, arXiv:2102.04010, Eq. 2 and 3.

        S(W) = W for the N largest |W| of every M, 0 for the others
        W <- W - lr * g(S(W))

    The layers do all of it (`ste.straight_through`); a step needs nothing more.
    """
