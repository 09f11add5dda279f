"""The weights of a sparse network as others load them: plain keys, zeros written in. The network itself is not touched."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import shards
from ..masks import check_finite
from ..site import named_weights, sites

__all__ = ["folded_weights"]


@torch.no_grad()
def folded_weights(model: nn.Module) -> dict[str, Tensor]:
    """What `fold_` would leave in the state dict, gathered from all processes."""
    shards.reshard_(model)
    seen = {}
    for site in sites(model):
        check_finite(shards.local(site.weight.detach()), site.key)
        seen[id(site.weight)] = shards.whole_of(site.seen(), site.weight)
    tied = {name: id(p) for name, p in named_weights(model, remove_duplicate=False)}
    return {
        name: seen[tied[name]] if tied.get(name) in seen else shards.whole(tensor.detach()) for name, tensor in model.state_dict().items()
    }
