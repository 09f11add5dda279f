"""How weights lie in memory: in which order, without gaps or not, and how far apart the neighbours of a group are."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..masks import Grouping

__all__ = ["axis_stride", "fills_memory", "lie_alike"]


def axis_stride(weight: Tensor, grouping: Grouping) -> int | None:
    """The distance in memory between neighbours of a group, or None where the kernels cannot walk `weight`.

    They can if its elements fill their memory without gaps, whatever the order of axes, and every row makes whole groups.
    """
    find = _axis_stride if torch.compiler.is_compiling() else _remembered_axis_stride  # the compiler warns of caches
    return find(weight.shape, weight.stride(), grouping)


def _axis_stride(shape: torch.Size, strides: tuple[int, ...], grouping: Grouping) -> int | None:
    if not 0 < shape.numel() < 2**31 or grouping.row_size(shape) % grouping.pattern.m:
        return None
    by_stride = _axes_by_stride(shape, strides)
    if by_stride is None:
        return None
    if grouping.axis == "flat":
        return 1 if by_stride == sorted(by_stride, reverse=True) else None
    return strides[grouping.axis] if shape[grouping.axis] > 1 else None


_remembered_axis_stride = lru_cache(maxsize=4096)(_axis_stride)


def _axes_by_stride(shape: torch.Size, strides: tuple[int, ...]) -> list[int] | None:
    """The axes longer than 1, innermost first, or None where the tensor does not fill its memory."""
    expected, axes = 1, []
    by_stride = sorted((stride, extent, axis) for axis, (stride, extent) in enumerate(zip(strides, shape, strict=True)) if extent != 1)
    for stride, extent, axis in by_stride:
        if stride != expected:
            return None
        expected *= extent
        axes.append(axis)
    return axes


def fills_memory(tensor: Tensor) -> bool:
    """Whether the elements of `tensor` lie without gaps, in whatever order."""
    return 0 < tensor.numel() < 2**31 - 2**20 and _axes_by_stride(tensor.shape, tensor.stride()) is not None


def lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have their elements in the same order in memory. Strides of axes of size 1 say nothing: a 1x1
    convolution in channels_last and its gradient may differ there."""
    strides = one.stride(), other.stride()
    return strides[0] == strides[1] or all(a == b or extent == 1 for a, b, extent in zip(*strides, one.shape, strict=True))
