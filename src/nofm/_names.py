"""Every public name of nofm, gathered from the rooms. `nofm/__init__.py` hands them out when one is first asked for."""

from .allocate import allocate_patterns
from .analysis import SAD, Cost, Divergence, Verification, check_ranks, cost, sad_of_forwards, verify
from .deploy import PackedFile, Packing, load_packed, pack_, save_packed, unpack_
from .errors import LayerError, MaskDivergenceError, NofmError, NonFiniteWeightError, OptimizerError, PackedError, PatternError
from .kinds import register_layer
from .masks import mask
from .methods import (
    ASP,
    DNW,
    DSR,
    GMP,
    METHODS,
    SET,
    SNFS,
    SNIP,
    SRSTE,
    STE,
    STR,
    DeepRewiring,
    Dense,
    Handle,
    LotteryTicket,
    Method,
    RigL,
    UnstructuredSTE,
    attach,
)
from .overview import Summary, summary
from .patterns import Pattern
from .site import sites
from .sparsifying import densify_, fold_, follow_, sparsify_
from .version import __version__

__all__ = [
    "ASP",
    "DNW",
    "DSR",
    "GMP",
    "METHODS",
    "SAD",
    "SET",
    "SNFS",
    "SNIP",
    "SRSTE",
    "STE",
    "STR",
    "Cost",
    "DeepRewiring",
    "Dense",
    "Divergence",
    "Handle",
    "LayerError",
    "LotteryTicket",
    "MaskDivergenceError",
    "Method",
    "NofmError",
    "NonFiniteWeightError",
    "OptimizerError",
    "PackedError",
    "PackedFile",
    "Packing",
    "Pattern",
    "PatternError",
    "RigL",
    "Summary",
    "UnstructuredSTE",
    "Verification",
    "__version__",
    "allocate_patterns",
    "attach",
    "check_ranks",
    "cost",
    "densify_",
    "fold_",
    "follow_",
    "load_packed",
    "mask",
    "pack_",
    "register_layer",
    "sad_of_forwards",
    "save_packed",
    "sites",
    "sparsify_",
    "summary",
    "unpack_",
    "verify",
]
