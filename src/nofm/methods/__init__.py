"""Ways to train an N:M network. Each is a frozen value; `METHODS` lists them with the paper they come from."""

from __future__ import annotations

from dataclasses import dataclass

from .asp import ASP
from .attaching import Handle, attach
from .base import Memory, Method, OwnedWeight, Step
from .deepr import DeepRewiring
from .dense import Dense
from .dnw import DNW
from .dsr import DSR
from .evolutionary import SET
from .gmp import GMP
from .lottery import LotteryTicket
from .rigl import RigL
from .snfs import SNFS
from .snip import SNIP
from .srste import SRSTE
from .str_ import STR
from .straight import STE
from .straight_unstructured import UnstructuredSTE

__all__ = [
    "ASP",
    "DNW",
    "DSR",
    "GMP",
    "METHODS",
    "SET",
    "SNFS",
    "SNIP",
    "SRSTE",
    "STE",
    "STR",
    "DeepRewiring",
    "Dense",
    "Handle",
    "LotteryTicket",
    "Memory",
    "Method",
    "MethodInfo",
    "OwnedWeight",
    "RigL",
    "Step",
    "UnstructuredSTE",
    "attach",
]


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
    "set": MethodInfo(SET, "Mocanu et al. 2018, arXiv:1707.04780, Algorithm 1", stages=1),
    "rigl": MethodInfo(RigL, "Evci et al. 2020, arXiv:1911.11134, Algorithm 1", stages=1),
    "snfs": MethodInfo(SNFS, "Dettmers & Zettlemoyer 2019, arXiv:1907.04840, Algorithm 1", stages=1),
    "dsr": MethodInfo(DSR, "Mostafa & Wang 2019, arXiv:1902.05967, Algorithm 1", stages=1),
    "deepr": MethodInfo(DeepRewiring, "Bellec et al. 2018, arXiv:1711.05136, Algorithm 1", stages=1),
    "gmp": MethodInfo(GMP, "Zhu & Gupta 2017, arXiv:1710.01878, Eq. 1", stages=1),
    "str": MethodInfo(STR, "Kusupati et al. 2020, arXiv:2002.03231, section 3", stages=1),
    "ste_unstructured": MethodInfo(UnstructuredSTE, "Bengio et al. 2013, arXiv:1308.3432, on the largest weights", stages=1),
    "dnw": MethodInfo(DNW, "Wortsman et al. 2019, arXiv:1906.00586, Algorithm 1", stages=1),
    "snip": MethodInfo(SNIP, "Lee et al. 2019, arXiv:1810.02340, Algorithm 1", stages=1),
    "lottery": MethodInfo(LotteryTicket, "Frankle & Carbin 2019, arXiv:1803.03635; Frankle et al. 2020, arXiv:1912.05671", stages=2),
}
