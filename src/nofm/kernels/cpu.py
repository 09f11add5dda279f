"""The C kernels for masks of fp32 weights on the CPU (`build` compiles them when a mask is first wanted there). Where there is no compiler
the plain torch path serves, and `select` says so.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .build import compiled

__all__ = ["MAX_M", "Jobs", "Largest", "mask", "masked", "refine_", "unavailable"]

MAX_M = 64
_WEIGHTS_OF_A_TASK = 1 << 18  # below this a thread costs more than it brings


def unavailable() -> str | None:
    """Why the C kernels cannot be used here, or None where they can. Compiles them if need be."""
    return _library()[1]


@cache
def _library() -> tuple[Any, str | None]:
    library, why_not = compiled(Path(__file__).with_name("cpu.c"))
    if library is None:
        return None, why_not
    span = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    library.nofm_masked.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *span]
    library.nofm_mask.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *span]
    library.nofm_refine.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int, *span]
    many: list[Any] = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.nofm_masked_all.argtypes = many
    library.nofm_refine_all.argtypes = [*many, ctypes.c_void_p, ctypes.c_int]
    for name in ("masked", "mask", "refine", "masked_all", "refine_all", "largest"):
        getattr(library, f"nofm_{name}").restype = None
    library.nofm_largest.argtypes = many
    return library, None


def masked(weight: Tensor, n: int, m: int, stride: int) -> Tensor:
    """`weight` where kept, +0.0 elsewhere."""
    out = torch.empty_like(weight)
    function = _library()[0].nofm_masked
    _in_threads(weight.numel() // m, m, lambda begin, end: function(weight.data_ptr(), out.data_ptr(), begin, end, n, m, stride))
    return out


def mask(weight: Tensor, n: int, m: int, stride: int) -> Tensor:
    """True where kept."""
    out = torch.empty_like(weight, dtype=torch.bool)
    function = _library()[0].nofm_mask
    _in_threads(weight.numel() // m, m, lambda begin, end: function(weight.data_ptr(), out.data_ptr(), begin, end, n, m, stride))
    return out


def refine_(weight: Tensor, out: Tensor, factor: float, sign: bool, n: int, m: int, stride: int) -> None:
    """out += factor * (w, or sign(w)) where pruned."""
    function = _library()[0].nofm_refine
    call = (weight.data_ptr(), out.data_ptr(), factor, int(sign))
    _in_threads(weight.numel() // m, m, lambda begin, end: function(*call, begin, end, n, m, stride))


class Jobs:
    """What is done to many weights together, step after step: weights that stay where they are, results that go elsewhere each time."""

    def __init__(self, weights: Sequence[int], shapes: Sequence[tuple[int, int, int, int]]) -> None:
        """`weights`: their addresses. `shapes`: how many groups each has, N, M, and the distance between neighbours of a group."""
        total = sum(groups * m for groups, _, m, _ in shapes)
        tasks = max(1, min(torch.get_num_threads(), -(-total // _WEIGHTS_OF_A_TASK)))
        self._tasks = [_Task([], array("q"), array("q")) for _ in range(tasks)]
        room = share = -(-total // tasks)
        number = 0
        for i, (groups, n, m, stride) in enumerate(shapes):
            begin = 0
            while begin < groups:
                end = groups if number + 1 == tasks else min(groups, begin + max(1, room // m))
                self._tasks[number].members.append(i)
                self._tasks[number].weights.append(weights[i])
                self._tasks[number].spans.extend((begin, end, n, m, stride))
                room -= (end - begin) * m
                begin = end
                if room < m and number + 1 < tasks:
                    number, room = number + 1, share

    def masked(self, outs: Sequence[int]) -> None:
        """Write the masked weights to these addresses."""
        function = _library()[0].nofm_masked_all

        def run(task: _Task) -> None:
            mine = array("q", [outs[i] for i in task.members])
            function(*task.call, mine.buffer_info()[0], task.spans.buffer_info()[0])

        self._run(run)

    def refine(self, outs: Sequence[int], factors: Sequence[float], sign: bool) -> None:
        """out += factor * (w, or sign(w)) where pruned, an address and a factor for each weight."""
        function = _library()[0].nofm_refine_all

        def run(task: _Task) -> None:
            mine, times = array("q", [outs[i] for i in task.members]), array("f", [factors[i] for i in task.members])
            function(*task.call, mine.buffer_info()[0], task.spans.buffer_info()[0], times.buffer_info()[0], sign)

        self._run(run)

    def _run(self, run: Callable[[_Task], None]) -> None:
        if len(self._tasks) == 1:
            run(self._tasks[0])
        else:
            list(_pool().map(run, self._tasks))


@dataclass(slots=True)
class _Task:
    """One thread's part of the work: places and addresses of weights, and for each five numbers: first group, last, N, M, stride."""

    members: list[int]
    weights: array[int]
    spans: array[int]

    @property
    def call(self) -> tuple[int, int]:
        return len(self.members), self.weights.buffer_info()[0]


class Largest:
    """The largest magnitude in many weights, NaN being the largest of all. They are fp32 and fill their memory without gaps."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._addresses, self._sizes = array("q", [w.data_ptr() for w in weights]), array("q", [w.numel() for w in weights])
        self._found = ctypes.c_float()
        self._call = len(weights), self._addresses.buffer_info()[0], self._sizes.buffer_info()[0], ctypes.addressof(self._found)

    def find(self) -> float:
        """It, as the weights are now. They must lie where they lay."""
        _library()[0].nofm_largest(*self._call)
        return self._found.value


def _in_threads(groups: int, m: int, run: Callable[[int, int], None]) -> None:
    """Run over all groups, in as many threads as torch uses; ctypes lets go of the interpreter lock meanwhile."""
    tasks = min(torch.get_num_threads(), -(-groups * m // _WEIGHTS_OF_A_TASK))
    if tasks <= 1:
        run(0, groups)
        return
    edges = [groups * i // tasks for i in range(tasks + 1)]
    list(_pool().map(run, edges[:-1], edges[1:]))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="nofm")


# A fork has the pool but none of its threads, and would wait for them for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
