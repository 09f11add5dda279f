"""nofm: keep N of every M. Train, measure and ship N:M sparse networks in PyTorch.

nofm.sparsify_(model, "2:4")                            # in place, same state_dict keys
nofm.attach(nofm.SRSTE(decay=2e-4), model, optimizer)
...                                                     # your own training loop
nofm.fold_(model)                                       # zeros written in, plain modules back
"""

from .analysis import SAD, Cost, Divergence, Verification, cost, sad_of_forwards, verify
from .errors import LayerError, MaskDivergenceError, NofmError, NonFiniteWeightError, OptimizerError, PatternError
from .layers import register_layer, sites
from .masks import mask
from .methods import ASP, METHODS, SRSTE, STE, Dense, Handle, Method, attach
from .patterns import Pattern
from .sparsify import densify_, fold_, sparsify_
from .summary import Summary, summary
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
