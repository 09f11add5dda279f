"""Dense training, as a method: every baseline takes the same path with the identity in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import ste
from ..site import Site
from .base import Method

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense(Method):
    """Layers compute with their dense weights; SAD then tells how their N:M masks *would* move.

    Paper: the dense rows of Zhou et al., ICLR 2021, arXiv:2102.04010, Table 1: gradient descent, or whatever the optimizer makes of it.

        W <- W - lr * g(W)
    """

    is_dense: ClassVar[bool] = True

    def begin(self, site: Site) -> None:
        site.look_through(ste.dense)
