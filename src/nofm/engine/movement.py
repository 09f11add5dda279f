"""SAD over a run: how many weights of each layer have changed between kept and pruned since the last look, and in the first steps since
the start, which is what the paper's Fig. 3 shows of each layer (SAD_{0:1} and SAD_{0:10}).

`nofm.SAD` answers this for masks it holds in memory. A run that may be killed needs the last masks in its checkpoints, so they are
held here, whole (gathered from all processes) and packed, and can be put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import shards
from ..masks import differing, pack
from ..site import Site, sites

__all__ = ["Movement", "packed_masks"]

_EARLY = (1, 10)  # the steps after which the paper compares masks with those of the start


@torch.no_grad()
def packed_masks(model: nn.Module) -> dict[str, Tensor]:
    """The mask of every sparse layer as bits, the whole of it on every process."""
    shards.reshard_(model)
    return {site.name: pack(_whole_mask(site)) for site in sites(model)}


def _whole_mask(site: Site) -> Tensor:
    return shards.whole_of(site.mask(), site.weight) if site.stored_mask is None else site.stored_mask


class Movement:
    """The masks of one step, to compare later ones with; and those of the start, until they have been."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.weights = sum(site.weight.numel() for site in sites(model))
        self.since, self._masks = 0, packed_masks(model)
        self._start: dict[str, Tensor] | None = self._masks

    def look(self, step: int) -> dict[str, Any]:
        """What has changed since the last look; the fields of a `sad` event."""
        masks = packed_masks(self._model)
        changed = _changed(self._masks, masks)
        since, self.since, self._masks = self.since, step, masks
        return {"since": since, "changed": changed, "weights": self.weights}

    def look_back(self, step: int) -> dict[str, Any] | None:
        """After one of the first steps that the paper looks at: what differs from the start; the fields of a `sad_from_start` event."""
        if self._start is None or step not in _EARLY:
            return None
        changed = _changed(self._start, packed_masks(self._model))
        if step == _EARLY[-1]:
            self._start = None
        return {"changed": changed, "weights": self.weights}

    def state_dict(self) -> dict[str, Any]:
        return {"since": self.since, "masks": self._masks, "start": self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        here = {name: packed.device for name, packed in self._masks.items()}
        self.since = int(state["since"])
        self._masks = {name: packed.to(here[name]) for name, packed in state["masks"].items()}
        start = state.get("start")  # which checkpoints of earlier versions do not have, nor those of later steps
        self._start = None if start is None else {name: packed.to(here[name]) for name, packed in start.items()}


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, int]:
    """In how many weights of each layer two masks differ."""
    counts = torch.stack([differing(before[name], packed) for name, packed in after.items()]).tolist()  # one wait for all
    return dict(zip(after, counts, strict=True))
