"""SAD over a run: how many weights of each layer have changed between kept and pruned since the last look.

`nofm.SAD` answers this for masks it holds in memory. A run that may be killed needs the last masks in its checkpoints, so they are
held here, whole (gathered from all processes) and packed, and can be put back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import shards
from ..masks import differing, pack
from ..site import Site, sites

__all__ = ["Movement", "packed_masks"]


@torch.no_grad()
def packed_masks(model: nn.Module) -> dict[str, Tensor]:
    """The mask of every sparse layer as bits, the whole of it on every process."""
    shards.reshard_(model)
    return {site.name: pack(_whole_mask(site)) for site in sites(model)}


def _whole_mask(site: Site) -> Tensor:
    return shards.whole_of(site.mask(), site.weight) if site.stored_mask is None else site.stored_mask


class Movement:
    """The masks of one step, to compare later ones with."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.weights = sum(site.weight.numel() for site in sites(model))
        self.since, self._masks = 0, packed_masks(model)

    def look(self, step: int) -> dict[str, Any]:
        """What has changed since the last look; the fields of a `sad` event."""
        masks = packed_masks(self._model)
        counts = torch.stack([differing(self._masks[name], packed) for name, packed in masks.items()]).tolist()  # one wait for all
        changed = dict(zip(masks, counts, strict=True))
        since, self.since, self._masks = self.since, step, masks
        return {"since": since, "changed": changed, "weights": self.weights}

    def state_dict(self) -> dict[str, Any]:
        return {"since": self.since, "masks": self._masks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.since = int(state["since"])
        self._masks = {name: packed.to(self._masks[name].device) for name, packed in state["masks"].items()}
