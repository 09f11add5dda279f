"""The oracle: masks by one stable sort, the plainest statement of the contract. Slow, and never on a training path.

Every faster way to a mask is compared with this one, on random inputs, ties and special values. It compares magnitudes as
floats, unlike the fast ways, so that the two share no reasoning; the price is that it needs denormals not to be flushed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks import Grouping

__all__ = ["mask"]


def mask(weight: Tensor, grouping: Grouping) -> Tensor:
    """True at the N weights of each group that come first by (|w| descending, index ascending); NaN goes before Inf."""
    magnitude = weight.detach().abs().double()
    size = grouping.row_size(weight.shape)
    rows = magnitude.flatten(1) if grouping.axis == "flat" else magnitude.movedim(grouping.axis, -1)
    kept = torch.zeros(rows.shape, dtype=torch.bool, device=weight.device)
    for start in range(0, size, grouping.pattern.m):
        group = rows[..., start : start + grouping.pattern.m]
        first = group.sort(dim=-1, descending=True, stable=True).indices[..., : grouping.pattern.n]
        kept[..., start : start + grouping.pattern.m].scatter_(-1, first, True)
    return kept.reshape(weight.shape) if grouping.axis == "flat" else kept.movedim(-1, grouping.axis)
