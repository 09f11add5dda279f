"""Whether all weights of a model are finite, found on the GPU in one launch for each type that they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .multi import at

__all__ = ["Lookout"]

_WEIGHTS_OF_A_PROGRAM = 4096


class Lookout:
    """Looks for Inf and NaN in many weights, step after step: one launch for each type."""

    def __init__(self) -> None:
        self._layout: Any = None
        self._launches: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # table, block_weight, first_block, a weight of the type

    def look(self, weights: Sequence[Tensor], word: Tensor, layout: object) -> None:
        """`word`, one fp32 on the device, becomes Inf if any weight holds Inf or NaN, and else stays as it is.

        `layout` is an object of the caller's, the same for as long as weights lie where they lay and are of the same types and sizes.
        """
        from .triton_masks import not_finite_kernel

        if layout is not self._layout:
            self._layout, self._launches = layout, self._plan(weights)
        with at(word.device):
            for table, block_weight, first_block, like in self._launches:
                not_finite_kernel[(len(block_weight),)](
                    table, block_weight, first_block, word.view(torch.int32), like, ROW=2, B=_WEIGHTS_OF_A_PROGRAM
                )

    @staticmethod
    def _plan(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        launches, device = [], weights[0].device
        for dtype in {w.dtype: None for w in weights}:
            alike = [w for w in weights if w.dtype == dtype]
            table = torch.tensor([[w.numel(), w.data_ptr()] for w in alike], dtype=torch.int64).to(device)
            blocks = torch.tensor([-(-w.numel() // _WEIGHTS_OF_A_PROGRAM) for w in alike])
            block_weight = torch.repeat_interleave(torch.arange(len(alike)), blocks).to(device, torch.int32)
            launches.append((table, block_weight, (blocks.cumsum(0) - blocks).to(device, torch.int32), alike[0]))
        return launches
