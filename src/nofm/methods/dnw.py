"""DNW, discovering neural wirings, and why in a layered network it is top-k STE.

Where the nodes are channels of a convolution or units of a linear layer, the
inner product is the entry of the weight's gradient that the weight would have if it were in E: the straight-through gradient. For
edges in E it is the ordinary one. So in a layered network DNW *is* top-k STE, and the released code says so: zero the smallest |w| of
the layer in forward, hand the gradient on unchanged in backward, momentum and weight decay on all weights. What DNW adds, wirings
between any two channels of a graph without layers, is outside of what a layer's mask can say.
"""

from __future__ import annotations

from dataclasses import dataclass

from .straight_unstructured import UnstructuredSTE

__all__ = ["DNW"]


@dataclass(frozen=True)
class DNW(UnstructuredSTE):
    """Top-k STE as its authors train ResNet-50: k by layer, the same share of each (`allocation="uniform"`).

    Paper: Wortsman, Farhadi & Rastegari, "Discovering Neural Wirings", NeurIPS 2019, arXiv:1906.00586, Algorithm 1.

        E <- the k edges of largest |w|                                      the forward uses them alone
        w_uv <- w_uv + <Z_u, -lr * dL/dI_v>     for all edges (u, v)         those outside of E are "hallucinated": the gradient flows
                                                                             to them, but not through them

    Z_u is what node u puts out, I_v what comes in to v; in a layer the inner product is the entry of the weight's gradient.
    "global" is the rule of the paper's graphs, where all edges compete.
    """
