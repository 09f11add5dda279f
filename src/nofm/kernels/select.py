"""Which way to a mask is taken for a weight, and why.

    triton   CUDA tensors: one launch for many weights, each read once
    cpu      fp32 on the CPU: the C kernels
    torch    everything else, and whatever is being traced (compile, export, vmap, fake tensors): plain torch operations, which the
             compiler fuses

All give the same masks, bit for bit. `NOFM_KERNELS=torch` (or another name) in the environment, or `with use("torch"):`, forces one;
forcing one that cannot serve a weight is an error that says why. `explain(nofm.sites(model))` prints the choice for each layer.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..errors import NofmError
from ..masks import Grouping
from . import cpu
from .layout import axis_stride, lie_alike

__all__ = [
    "MAX_M_TRITON",
    "Path",
    "choose",
    "explain",
    "forced_path",
    "has_triton",
    "interpreting",
    "is_traced",
    "is_watched",
    "use",
    "why_not_one_pass",
]

Path: TypeAlias = Literal["triton", "cpu", "torch"]

MAX_M_TRITON = 32
_TRITON_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_forced: ContextVar[Path | None] = ContextVar("nofm_kernels", default=None)


@contextmanager
def use(path: Path) -> Iterator[None]:
    """Take this path for all masks made inside the `with` block."""
    token = _forced.set(_checked(path))
    try:
        yield
    finally:
        _forced.reset(token)


def choose(weight: Tensor, grouping: Grouping) -> Path:
    """The path for `weight`; raises where a path is forced that cannot serve it."""
    if is_traced(weight):
        return "torch"
    forced = forced_path()
    if forced is not None:
        if reason := _why_not(forced, weight, grouping):
            raise NofmError(f"NOFM_KERNELS or use({forced!r}) asks for a path that cannot serve this weight: {reason}")
        return forced
    preferred: Path = "triton" if weight.is_cuda else "cpu"
    return "torch" if _why_not(preferred, weight, grouping) else preferred


def why_not_one_pass(weight: Tensor, grouping: Grouping, others: Iterable[Tensor]) -> str | None:
    """Why an optimizer's step of `weight` cannot hold the SR-STE term, or None; `others` are its gradient and the optimizer's states."""
    if choose(weight, grouping) != "triton":
        return _why_not("triton", weight, grouping) or "another path is forced, it is traced, or spread over processes"
    for other in others:
        if type(other) is not Tensor or other.dtype != weight.dtype or other.device != weight.device:
            return "its gradient or the optimizer's state is of another type, or on another device"
        if other.shape != weight.shape or not lie_alike(other, weight):
            return "its gradient or the optimizer's state lies in another order in memory"
    return None


def forced_path() -> Path | None:
    """The path that is forced now, if one is."""
    return _forced.get() or _from_environment()


def is_traced(weight: Tensor) -> bool:
    """Whether `weight` has no values of its own to look at: inside the compiler, a transform, or a mode that watches operations."""
    if torch.compiler.is_compiling() or type(weight) not in (Tensor, torch.nn.Parameter):
        return True
    return is_watched()


def is_watched() -> bool:
    """Whether somebody looks at every operation: fake tensors, counters, tracers, `torch.jit.trace` (which layers refuse), and transforms
    (`torch.func`), which wrap what is made inside them, from whatever weights."""
    functorch: Any = torch._C._functorch
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing() or functorch.maybe_current_level() is not None


def explain(sites: Iterable[Any]) -> str:
    """A table of the path that each layer's mask takes when run eagerly, and why not the fastest where it is not."""
    lines = []
    for site in sites:
        weight, grouping = site.weight, site.grouping
        path = choose(weight, grouping)
        fastest: Path = "triton" if weight.is_cuda else "cpu"
        why = "" if path == fastest else _why_not(fastest, weight, grouping) or "forced, or spread over processes"
        lines.append(f"{site.name:40} {grouping.pattern!s:8} {path:8} {why}".rstrip())
    return "\n".join(lines)


def _why_not(path: Path, weight: Tensor, grouping: Grouping) -> str | None:
    if path == "torch":
        return None
    if axis_stride(weight, grouping) is None:
        return "its memory has gaps, or its rows end in a short group"
    if path == "cpu":
        return _why_not_cpu(weight, grouping)
    if not (weight.is_cuda or interpreting()):
        return f"Triton kernels run on CUDA tensors, this one is on {weight.device}"
    if weight.dtype not in _TRITON_TYPES:
        return f"Triton kernels take fp32, bf16 and fp16, not {weight.dtype}"
    if grouping.pattern.m > MAX_M_TRITON:
        return f"Triton kernels go up to M = {MAX_M_TRITON}"
    return None if has_triton() else "Triton is not installed"


def _why_not_cpu(weight: Tensor, grouping: Grouping) -> str | None:
    if weight.device.type != "cpu":
        return f"the C kernels run on the CPU, this weight is on {weight.device}"
    if weight.dtype != torch.float32:
        return f"the C kernels take fp32, not {weight.dtype}"
    if grouping.pattern.m > cpu.MAX_M:
        return f"the C kernels go up to M = {cpu.MAX_M}"
    return cpu.unavailable()


def _checked(path: str) -> Path:
    known: tuple[Path, ...] = get_args(Path)
    for name in known:
        if path == name:
            return name
    raise NofmError(f"NOFM_KERNELS={path!r} is not one of {', '.join(get_args(Path))}")


def _from_environment() -> Path | None:
    asked = os.environ.get("NOFM_KERNELS", "")
    return _checked(asked) if asked else None


def interpreting() -> bool:
    """Whether Triton's interpreter stands in for a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None
