"""Every public name of nofm, gathered from the rooms. `nofm/__init__.py` hands them out when one is first asked for."""

from .analysis import SAD, Cost, Divergence, Verification, check_ranks, cost, sad_of_forwards, verify
from .errors import LayerError, MaskDivergenceError, NofmError, NonFiniteWeightError, OptimizerError, PatternError
from .layers import register_layer, sites
from .masks import mask
from .methods import ASP, METHODS, SRSTE, STE, Dense, Handle, Method, attach
from .overview import Summary, summary
from .patterns import Pattern
from .sparsify import densify_, fold_, sparsify_
from .version import __version__

__all__ = [
    "ASP",
    "METHODS",
    "SAD",
    "SRSTE",
    "STE",
    "Cost",
    "Dense",
    "Divergence",
    "Handle",
    "LayerError",
    "MaskDivergenceError",
    "Method",
    "NofmError",
    "NonFiniteWeightError",
    "OptimizerError",
    "Pattern",
    "PatternError",
    "Summary",
    "Verification",
    "__version__",
    "attach",
    "check_ranks",
    "cost",
    "densify_",
    "fold_",
    "mask",
    "register_layer",
    "sad_of_forwards",
    "sites",
    "sparsify_",
    "summary",
    "verify",
]
