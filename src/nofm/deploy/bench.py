"""`bench(model, example)`: how fast a folded network is here, dense and packed.

The dense network is given its chance: eager in both memory layouts, of which the faster is what ratios are to; with `compiled`, both are
compiled by torch's inductor as well. Networks take turns, so that what else the machine does falls on all of them; medians.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .packing import Packing, pack_

__all__ = ["Bench", "bench"]

_COMPILED = ", compiled"


@dataclass(frozen=True, slots=True)
class Bench:
    """Seconds of a forward, by what was run, and what `pack_` has decided; printed, both."""

    packing: Packing
    seconds: dict[str, float]
    rounds: int

    @property
    def speed_up(self) -> float:
        """The packed network beside the faster of the dense ones, neither of them compiled."""
        return self._dense(like="packed") / self.seconds["packed"]

    def __str__(self) -> str:
        lines = [str(self.packing), "", f"the whole network ({self.rounds} rounds in turns, medians):"]
        for name, seconds in self.seconds.items():
            ratio = f"   {self._dense(like=name) / seconds:.2f} x the faster dense one" if name.startswith("packed") else ""
            lines.append(f"  {name:22}{seconds * 1e3:10.2f} ms{ratio}")
        if not self.packing.packed:
            lines.append("No layer was faster without its zeros, so dense and packed are the same network, and differ by noise.")
        return "\n".join(lines)

    def _dense(self, like: str) -> float:
        """The fastest dense network that is compiled, or not, as this one."""
        compiled = like.endswith(_COMPILED)
        return min(s for name, s in self.seconds.items() if name.startswith("dense") and name.endswith(_COMPILED) == compiled)


@torch.inference_mode()
def bench(model: nn.Module, example: Tensor, *, rounds: int = 15, compiled: bool = False) -> Bench:
    """Measure a folded model, which is left as it is, on one input."""
    packed = copy.deepcopy(model)
    packing = pack_(packed, example)
    in_last, last_model = example, copy.deepcopy(model)
    if example.dim() == 4:  # images; other inputs have one layout, which is then measured twice
        in_last, last_model = example.to(memory_format=torch.channels_last), last_model.to(memory_format=torch.channels_last)
    packed_last = copy.deepcopy(last_model)
    pack_(packed_last, in_last)
    calls: dict[str, Callable[[], Any]] = {
        "dense": lambda: model(example),
        "dense, channels_last": lambda: last_model(in_last),
        "packed": lambda: packed(example),
        "packed, channels_last": lambda: packed_last(in_last),
    }
    if compiled:
        dense_code, packed_code = torch.compile(last_model), torch.compile(packed)
        calls |= {f"dense{_COMPILED}": lambda: dense_code(in_last), f"packed{_COMPILED}": lambda: packed_code(example)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):  # the first two warm up
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    return Bench(packing, {name: median(times) for name, times in seconds.items()}, rounds)
