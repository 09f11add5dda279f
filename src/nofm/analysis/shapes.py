"""Kernel shapes (paper appendix A.2): which positions of a convolution kernel are kept.

A kernel is what joins one input channel to one output channel, kh x kw weights. Groups of N:M run along input channels, so the
pattern rules how many kernels are kept at a position, and leaves each kernel free to take any shape: 2^(kh*kw) of them. A
coarser pattern of the same density (2:8 for 1:4) lets kernels take shapes together that the finer one forbids; `beyond` finds them.

Shape suffixes: O output channels, I input channels, K kernel positions (kh, kw flattened), X kernels (O, I flattened).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import shards
from ..errors import NofmError
from ..layers import dense_class
from ..masks import Grouping
from ..patterns import Pattern, PatternLike
from ..site import sites, unwrap

__all__ = ["KernelShapes", "Shape", "beyond", "kernel_shapes", "shapes_of"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape: rows of kept positions, how many kernels have it, and the first that does, as (input, output channel)."""

    kept: tuple[tuple[bool, ...], ...]
    count: int
    example: tuple[int, int]

    def __str__(self) -> str:
        return "\n".join("".join("#" if kept else "." for kept in row) for row in self.kept)


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """The shapes that the kernels of one layer take, the most frequent first."""

    kernel: tuple[int, int]
    kernels: int
    shapes: tuple[Shape, ...]

    @property
    def distinct(self) -> int:
        return len(self.shapes)

    @property
    def by_size(self) -> dict[int, int]:
        """How many kernels keep how many of their weights."""
        sizes: Counter[int] = Counter()
        for shape in self.shapes:
            sizes[sum(map(sum, shape.kept))] += shape.count
        return dict(sorted(sizes.items()))


def shapes_of(mask: Tensor) -> KernelShapes:
    """The shapes in the mask of one convolution, given as (output, input, kh, kw)."""
    if mask.dim() != 4 or mask.dtype != torch.bool:
        raise NofmError(f"kernel shapes are read from a bool mask (output, input, kh, kw), got {mask.dtype} of shape {tuple(mask.shape)}")
    (_, in_channels, kh, kw), kernels = mask.shape, mask.shape[0] * mask.shape[1]
    mask_XK = mask.reshape(kernels, kh * kw).cpu()
    found_K, which_X, counts = torch.unique(mask_XK, dim=0, return_inverse=True, return_counts=True)
    first = torch.full((len(found_K),), kernels).scatter_reduce(0, which_X, torch.arange(kernels), "amin")
    shapes = [
        Shape(tuple(tuple(row) for row in kept.view(kh, kw).tolist()), count, (index % in_channels, index // in_channels))
        for kept, count, index in zip(found_K, counts.tolist(), first.tolist(), strict=True)
    ]
    # Ties go to the shape whose first kernel comes first: one order, whatever `unique` does.
    shapes.sort(key=lambda shape: (-shape.count, shape.example[1], shape.example[0]))
    return KernelShapes((kh, kw), kernels, tuple(shapes))


def kernel_shapes(model: nn.Module) -> dict[str, KernelShapes]:
    """The kernel shapes of every sparse two-dimensional convolution of `model`, by layer; 1x1 kernels have none to speak of."""
    found = {}
    for site in sites(unwrap(model)):
        if site.weight.dim() != 4 or site.weight.shape[2:].numel() == 1:
            continue
        mask = shards.whole_of(site.mask(), site.weight)
        transposed = issubclass(dense_class(type(site.module)), nn.ConvTranspose2d)  # its weight is (input, output, kh, kw)
        found[site.name] = shapes_of(mask.transpose(0, 1) if transposed else mask)
    if not found:
        raise NofmError(f"this {type(model).__name__} has no sparse 2-d convolution with a kernel larger than 1x1")
    return found


def beyond(mask: Tensor, finer: PatternLike) -> Tensor:
    """Which kernels of an (output, input, kh, kw) mask have a shape that `finer` could not give them beside their neighbours.

    True at (output, input) where the kernel keeps a weight in a group of `finer` that keeps more than its n. A mask of 2:8 has
    such kernels under 1:4; a mask of 1:4 has none.
    """
    grouping = Grouping(Pattern(finer), axis=1)
    grouping.check(mask.shape)
    too_many = grouping.split(mask).sum(-1, keepdim=True) > grouping.pattern.n
    crowded = grouping.join(too_many.expand(*too_many.shape[:-1], grouping.pattern.m), mask.shape)
    return (crowded & mask).flatten(2).any(-1)
