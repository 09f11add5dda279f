"""Watches the weights for NaN and Inf without making the GPU wait.

One number says whether all weights are finite: the largest magnitude, or Inf. On the CPU it is read at once. On a GPU it is copied to
the host while training goes on and read when it has arrived, a step or two later; the error still names the step it was.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .. import shards
from ..kernels import cpu
from ..kernels.layout import fills_memory
from ..kernels.lookout import Lookout
from ..kernels.select import forced_path, has_triton, is_traced
from ..masks import check_finite

__all__ = ["FiniteWatch"]

_Named: TypeAlias = Sequence[tuple[str, Tensor]]
_LOOKOUT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class FiniteWatch:
    """Raises `NonFiniteWeightError` for weights it has been shown."""

    def __init__(self) -> None:
        self._posts: dict[torch.device, _Post] = {}
        self._captured: dict[tuple[torch.device, torch.dtype, bool], Tensor] = {}  # where CUDA graphs leave what they find at a replay
        self._in_graphs: dict[str, Tensor] = {}  # the weights that they look at
        self._key: list[object] = []
        self._parts: list[tuple[str, list[int]]] = []  # which way to look at which weights
        self._largest = cpu.Largest(())  # of those that are on the CPU
        self._told = torch.zeros((), dtype=torch.float32)  # the word of kernels on the CPU: Triton's interpreter
        self._last: _Named = []

    def word(self, device: torch.device) -> Tensor:
        """A number for a kernel that sees all new weights anyhow: it makes it Inf where one is not finite, and `look` is told so."""
        return self._post(device).word if device.type == "cuda" else self._told

    def look(self, step: int, named: _Named, told: _Named = ()) -> None:
        """Look at the weights as they are after `step`: those `named` here, and those that a kernel has looked at already by `word`."""
        self._last = ([*named, *told] if named else told) or self._last  # a step may move nothing, and news of an earlier one arrive in it
        weights = [w if type(w) is nn.Parameter or type(w) is Tensor else shards.local(w) for _, w in named]
        first = next(iter(weights), told[0][1] if told else None)
        traced = first is not None and is_traced(first)
        capturing = first is not None and not traced and first.is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing:
            self._in_graphs |= dict([*named, *told])
        for way, places in self._ways(weights, traced, capturing):
            members = weights if len(places) == len(weights) else [weights[i] for i in places]
            if way == "cpu":
                if not math.isfinite(self._largest.find()):
                    self._name(named, step)
                continue
            if way == "triton":
                largest = self._post(members[0].device).look(members, places)
            else:
                largest = torch.stack(torch._foreach_norm(members, math.inf)).amax()
            self._take(largest, step, self._last, capturing)
        for device in {weight.device for _, weight in told}:
            self._take(self.word(device), step, self._last, capturing)
        if not capturing:
            self._receive(self._last)

    def _take(self, largest: Tensor, step: int, named: _Named, capturing: bool) -> None:
        if largest.device.type != "cuda":
            self._check(largest, step, named)
        elif capturing:
            # One place for all graphs, so that it does not matter which one is replayed; the word that kernels tell has its own.
            post = self._posts.get(largest.device)
            key = (largest.device, largest.dtype, post is not None and largest is post.word)
            self._captured.setdefault(key, torch.empty_like(largest)).copy_(largest)
        else:
            self._send(largest, step, named)

    def replayed(self, step: int) -> None:
        """Look at what a graph has computed about the weights as they are after `step`."""
        named = list(self._in_graphs.items())
        for largest in self._captured.values():
            self._send(largest, step, named)
            self._receive(named)

    def _ways(self, weights: list[Tensor], traced: bool, capturing: bool) -> list[tuple[str, list[int]]]:
        """Weights that are looked at together, and how. Found once and kept for as long as they lie where they are."""
        key: list[object] = [forced_path(), capturing]
        if not traced:
            key += [(w.data_ptr(), w.dtype, w.stride(), w.shape) for w in weights]
        if traced or key != self._key:
            together: dict[tuple[str, torch.device, torch.dtype | None], list[int]] = {}
            for place, weight in enumerate(weights):
                if weight.numel() and weight.device.type != "meta" and not hasattr(weight, "fake_mode"):
                    way = _way(weight, capturing)
                    together.setdefault((way, weight.device, weight.dtype if way == "torch" else None), []).append(place)
            self._key, self._parts = key, [(way, places) for (way, _, _), places in together.items()]
            self._largest = cpu.Largest([weights[i] for way, places in self._parts if way == "cpu" for i in places])
        return self._parts

    def _post(self, device: torch.device) -> _Post:
        return self._posts[device] if device in self._posts else self._posts.setdefault(device, _Post(device))

    def _send(self, largest: Tensor, step: int, named: _Named) -> None:
        post = self._post(largest.device)
        if post.is_full():
            post.wait()
            self._receive(named)
        post.send(largest, step)

    def _receive(self, named: _Named) -> None:
        for post in self._posts.values():
            while (arrived := post.receive()) is not None:
                then, largest = arrived
                self._check(largest, then, named)
                if not math.isfinite(largest):
                    post.word.zero_()  # somebody has repaired the weights in the meantime

    @staticmethod
    def _check(largest: Tensor, step: int, named: _Named) -> None:
        if not math.isfinite(largest.item()):
            FiniteWatch._name(named, step)

    @staticmethod
    def _name(named: _Named, step: int) -> None:
        for name, weight in named:
            check_finite(shards.local(weight.detach()), name, step)


def _way(weight: Tensor, capturing: bool) -> str:
    if is_traced(weight) or capturing or not fills_memory(weight):
        return "torch"
    if weight.is_cuda:
        served = weight.dtype in _LOOKOUT_TYPES and has_triton()
        return "triton" if served and forced_path() in (None, "triton") else "torch"
    served = weight.device.type == "cpu" and weight.dtype == torch.float32 and cpu.unavailable() is None
    return "cpu" if served and forced_path() in (None, "cpu") else "torch"


class _Post:
    """Between one GPU and the host: numbers on their way, in a ring of pinned memory so that a step allocates nothing."""

    SLOTS = 64

    def __init__(self, device: torch.device) -> None:
        self.word = torch.zeros((), dtype=torch.float32, device=device)
        self._lookout = Lookout()
        self._slots = torch.zeros(self.SLOTS, dtype=torch.float32, pin_memory=True).unbind()
        self._events = [torch.cuda.Event() for _ in range(self.SLOTS)]
        self._arriving: deque[tuple[int, int]] = deque()  # steps and their slots
        self._sent = 0

    def look(self, weights: list[Tensor], layout: object) -> Tensor:
        self._lookout.look(weights, self.word, layout)
        return self.word

    def send(self, largest: Tensor, step: int) -> None:
        slot = self._sent % self.SLOTS
        self._slots[slot].copy_(largest.float() if largest.dtype != torch.float32 else largest, non_blocking=True)
        self._events[slot].record(torch.cuda.current_stream(largest.device))
        self._arriving.append((step, slot))
        self._sent += 1

    def is_full(self) -> bool:
        """Whether the GPU is as many steps behind as there are slots."""
        return len(self._arriving) == self.SLOTS

    def wait(self) -> None:
        """Until the next number has arrived."""
        self._events[self._arriving[0][1]].synchronize()

    def receive(self) -> tuple[int, Tensor] | None:
        """The next number that has arrived, and the step that it is of."""
        if not self._arriving or not self._events[self._arriving[0][1]].query():
            return None
        step, slot = self._arriving.popleft()
        return step, self._slots[slot]
