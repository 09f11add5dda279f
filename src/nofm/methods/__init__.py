"""Ways to train an N:M network. Each is a frozen value; `METHODS` lists them with the paper they come from."""

from __future__ import annotations

from dataclasses import dataclass

from .asp import ASP
from .base import Handle, Method, OwnedWeight, Step, attach
from .dense import Dense
from .srste import SRSTE
from .straight import STE

__all__ = ["ASP", "METHODS", "SRSTE", "STE", "Dense", "Handle", "Method", "MethodInfo", "OwnedWeight", "Step", "attach"]


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """A row of the registry: how a method is called, where it comes from, in how many stages it trains."""

    method: type[Method]
    paper: str
    stages: int


METHODS: dict[str, MethodInfo] = {
    "dense": MethodInfo(Dense, "the baseline", stages=1),
    "ste": MethodInfo(STE, "Bengio et al. 2013, arXiv:1308.3432; Zhou et al. 2021, Eq. 3", stages=1),
    "srste": MethodInfo(SRSTE, "Zhou et al. 2021, arXiv:2102.04010, Eq. 4 to 6", stages=1),
    "asp": MethodInfo(ASP, "Mishra et al. 2021, arXiv:2104.08378", stages=2),
}
