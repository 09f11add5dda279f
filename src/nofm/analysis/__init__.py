"""What a sparse network is and does: how its masks move (SAD), what it costs, whether it is N:M, whether processes agree."""

from .cost import Cost, LayerCost, cost
from .ranks import check_ranks, fingerprints
from .sad import SAD, Divergence, sad_of_forwards
from .verify import Verification, WeightReport, verify

__all__ = [
    "SAD",
    "Cost",
    "Divergence",
    "LayerCost",
    "Verification",
    "WeightReport",
    "check_ranks",
    "cost",
    "fingerprints",
    "sad_of_forwards",
    "verify",
]
