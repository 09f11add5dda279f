"""What a sparse network is and does: how its masks move (SAD), what it costs, whether it is N:M at all."""

from .cost import Cost, LayerCost, cost
from .sad import SAD, Divergence, sad_of_forwards
from .verify import Verification, WeightReport, verify

__all__ = ["SAD", "Cost", "Divergence", "LayerCost", "Verification", "WeightReport", "cost", "sad_of_forwards", "verify"]
