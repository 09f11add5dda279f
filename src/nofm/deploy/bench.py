"""`bench(model, example)`: how fast a folded network is here, dense and packed.

The dense network is given its chance: eager in both memory layouts, of which the faster is what ratios are to; with `compiled`, both are
compiled by torch's inductor as well. Networks take turns, and how much the rounds differ is told beside their medians.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..columns import table
from .packing import Packing, pack_
from .timing import Seconds, in_turns

__all__ = ["Bench", "bench"]

_COMPILED = ", compiled"


@dataclass(frozen=True, slots=True)
class Bench:
    """Seconds of a forward round by round, by what was run, and what `pack_` has decided; printed, both."""

    packing: Packing
    times: dict[str, Seconds]

    @property
    def seconds(self) -> dict[str, float]:
        """The medians."""
        return {name: times.median for name, times in self.times.items()}

    @property
    def speed_up(self) -> float:
        """The packed network beside the faster of the dense ones, neither of them compiled."""
        return self.times["packed"].speed_up_from(self._dense(like="packed")).median

    def __str__(self) -> str:
        rows = [("the whole network", "ms (range)", "speed-up (range)")]
        digits = 3 if min(self.seconds.values()) < 1e-3 else 2
        for name, times in self.times.items():
            ratio = times.speed_up_from(self._dense(like=name)).told(2) if name.startswith("packed") else ""
            rows.append((name, times.milliseconds().told(digits), ratio))
        rounds = len(next(iter(self.times.values())).rounds)
        lines = [str(self.packing), "", *table(rows), f"Medians of {rounds} rounds in turns; range: the lowest and the highest of a round."]
        lines.append(f"Speed-up: beside the faster dense network{' that is compiled or not, as this one' * self._is_compiled()}.")
        if not self.packing.packed:
            lines += ["No layer was faster without its zeros, so dense and packed are the same network,", "and differ by noise."]
        return "\n".join(lines)

    def _is_compiled(self) -> bool:
        return any(name.endswith(_COMPILED) for name in self.times)

    def _dense(self, like: str) -> Seconds:
        """The fastest dense network that is compiled, or not, as this one."""
        compiled = like.endswith(_COMPILED)
        alike = (s for name, s in self.times.items() if name.startswith("dense") and name.endswith(_COMPILED) == compiled)
        return min(alike, key=lambda times: times.median)


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
    return Bench(packing, dict(zip(calls, in_turns(list(calls.values()), rounds), strict=True)))
