"""Convolutions and matrix products that leave out the zeros of their weight: fp32, on the CPU, by the kernels of products.c.

A *plan* is a weight laid out for the kernels, with a call that computes. Two of them:

    convolution   pixels in the lanes of a register; the input is copied once for each column of the kernel. For inputs of one size
    linear        16 outputs in the lanes, their inputs picked for them. For any batch

Any weight can be planned. What N:M adds is that all outputs keep equally many weights: rows that keep fewer are filled up with zeros that
are multiplied after all. The sums are those of the dense layer in another order, and a zero that is left out is not multiplied by an
input that is Inf or NaN.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import NofmError
from .build import compiled

__all__ = ["LANES", "Pair", "Plan", "convolution", "linear", "unavailable"]

Plan: TypeAlias = Callable[[Tensor], Tensor]
Pair: TypeAlias = tuple[int, int]

LANES = 16  # of the widest register: fewer outputs side by side go through scratch memory
_TILE = 8 * LANES
_CACHE = 40_000  # bytes of input that a block of weights may touch: what the first cache of most machines holds
_MOST_PLACES = 2**31 - 1


def unavailable() -> str | None:
    """Why these kernels cannot be used here, or None where they can. Compiles them if need be."""
    return _library()[1]


@cache
def _library() -> tuple[Any, str | None]:
    source = Path(__file__).with_name("products.c")
    library, why_not = compiled(source, ("-fopenmp",))
    if library is None:  # a compiler without OpenMP, or a torch without it: one thread
        library, why_not = compiled(source)
    for name in () if library is None else ("convolution", "vectors"):
        getattr(library, f"nofm_{name}").restype = None
    return library, why_not


class _Struct:
    """Numbers and addresses as C has them, and the tensors that the addresses are of."""

    def __init__(self, *fields: int | Tensor) -> None:
        self._tensors = [f for f in fields if isinstance(f, Tensor)]
        self._words = (ctypes.c_int64 * len(fields))(*(f.data_ptr() if isinstance(f, Tensor) else f for f in fields))
        self.address = ctypes.c_void_p(ctypes.addressof(self._words))


_scratch = threading.local()


def _room(name: str, size: int) -> Tensor:
    """Memory of this thread for what is needed during one call: all layers of a network use the same, which stays in the caches."""
    found = getattr(_scratch, name, None)
    if found is None or found.numel() < size:
        found = torch.zeros(size)
        setattr(_scratch, name, found)
    return found


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


# ---- convolutions ----


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the input of a convolution lies in memory while it is computed: (channel, kernel's column, phase, row, image, x of the output).

    A row of the input is of phase y mod stride: the rows that one row of the kernel meets are of one phase, and follow each other.
    """

    size: tuple[int, int, int, int]  # images, channels, height, width
    out_size: Pair
    phases: int
    rows: int  # of each phase
    together: int  # images whose rows stand side by side, where one alone does not fill the lanes; 0: the input is used as it lies
    line: int  # numbers from row to row
    plane: int  # numbers from channel to channel

    @property
    def lanes(self) -> int:
        """Outputs side by side, with what is between rows."""
        return self.out_size[0] * self.line

    @property
    def pitch(self) -> int:
        """Lanes of an output in scratch memory, whole registers; 0 where the sums go straight to the output: where it lies as the lanes
        do, and a last register that is not full hardly counts."""
        straight = self.line == self.out_size[1] and (self.lanes % LANES == 0 or self.lanes > 2 * _TILE)
        return 0 if straight else -(-self.lanes // LANES) * LANES


def _layout(size: tuple[int, int, int, int], kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> _Layout:
    images, _, height, width = size
    out_height = (height + 2 * padding[0] - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    out_width = (width + 2 * padding[1] - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    if (height, *kernel, *stride, *padding) == (1, 1, 1, 1, 1, 0, 0) and width % LANES == 0:
        return _Layout(size, (1, width), 1, 1, 0, width, width)
    together = min(images, -(-_TILE // (out_height * out_width)))
    phases, rows = (1 if kernel[0] == 1 else stride[0]), out_height + dilation[0] * (kernel[0] - 1) // stride[0]
    line = together * out_width if kernel[0] == 1 else _aligned(together * out_width)
    plane = -(-kernel[1] * phases * rows * line // LANES) * LANES
    return _Layout(size, (out_height, out_width), phases, rows, together, line, plane)


def _aligned(line: int) -> int:
    """`line` and what is left to a whole line of the cache, or to half of one, where that is no more than a seventh: loads that cross
    lines take twice as long."""
    return next((whole for unit in (LANES, LANES // 2) if (whole := -(-line // unit) * unit) <= line * 8 / 7), line)


def convolution(
    weight: Tensor, bias: Tensor | None, *, size: tuple[int, int, int], stride: Pair, padding: Pair, dilation: Pair, groups: int = 1
) -> Plan:
    """The plan of `F.conv2d` for inputs of `size`: images, height, width."""
    outputs, channels, *kernel = weight.shape
    images, height, width = size
    pointwise = (*kernel, *stride, *padding) == (1, 1, 1, 1, 0, 0)  # then a picture is one long row
    whole = images, channels * groups, *((1, height * width) if pointwise else (height, width))
    lying = _layout(whole, (kernel[0], kernel[1]), stride, padding, dilation)
    if channels * groups * lying.plane > _MOST_PLACES:
        raise NofmError(f"a convolution of {channels * groups} channels of {height} x {width} is too large to be packed")
    weights = _of_kernel(weight, bias, groups, lying, stride[0], dilation[0])
    numbers = (lying.together, lying.phases, lying.rows, lying.line, lying.plane)
    shape = _Struct(*lying.size, *lying.out_size, kernel[1], *stride, *padding, dilation[1], *numbers)
    in_size = channels * groups * lying.plane + LANES if lying.together else 0
    out_shape, function = (height, width) if pointwise else lying.out_size, _library()[0].nofm_convolution

    def run(x: Tensor) -> Tensor:
        y = torch.empty(images, outputs, *out_shape)
        scratch = _pointer(_room("in", in_size)), _pointer(_room("out", outputs * lying.pitch))
        threads = ctypes.c_int64(torch.get_num_threads())
        function(_pointer(x), _pointer(y), *scratch, weights.address, shape.address, ctypes.c_int64(lying.pitch), threads)
        return y

    return run


def _of_kernel(weight: Tensor, bias: Tensor | None, groups: int, lying: _Layout, stride: int, dilation: int) -> _Struct:
    """A convolution's weights, the channels outermost, and the places of their inputs."""
    outputs, channels, kernel_h, kernel_w = weight.shape
    row_K, x_K = torch.arange(kernel_h).repeat_interleave(kernel_w) * dilation, torch.arange(kernel_w).repeat(kernel_h)
    place_K = ((x_K * lying.phases + row_K % stride) * lying.rows + row_K // stride) * lying.line
    place_I = (torch.arange(channels)[:, None] * lying.plane + place_K).flatten()
    tile = min(lying.lanes, _TILE)
    touched = 4 * kernel_w * min(kernel_h * tile, tile + (kernel_h - 1) * lying.line)  # bytes of one channel
    per_block = kernel_h * kernel_w * max(LANES, _CACHE // touched // LANES * LANES)
    of_group = torch.arange(groups).repeat_interleave(outputs // groups) * channels * lying.plane
    return _in_blocks(weight.flatten(1), place_I, of_group, bias, per_block)


def _in_blocks(weight_OI: Tensor, place_I: Tensor, of_group_O: Tensor, bias: Tensor | None, per_block: int) -> _Struct:
    """The kept weights, block after block of `per_block` inputs, and in each block output after output.

    `place_I`: where the input of each weight of an output begins; `of_group_O`: what an output's group adds to it.
    """
    outputs, inputs = weight_OI.shape
    values, places, kept = [], [], []
    for start in range(0, inputs, per_block):
        value_OB = weight_OI[:, start : start + per_block]
        first_OK = _kept_first(value_OB)
        values.append(value_OB.gather(1, first_OK).flatten())
        places.append((place_I[start : start + per_block][first_OK] + of_group_O[:, None]).to(torch.int32).flatten())
        kept.append(first_OK.shape[1])
    return _Struct(outputs, len(kept), torch.tensor(kept), torch.cat(places), torch.cat(values).contiguous(), _bias(bias, outputs))


def _kept_first(value: Tensor) -> Tensor:
    """Where kept weights are along the last axis, in their order, as many as the fullest row has; rows with fewer have zeros after them."""
    most = max(1, int((value != 0).sum(-1).max()))
    return (value == 0).to(torch.int8).argsort(dim=-1, stable=True)[..., :most]


def _bias(bias: Tensor | None, outputs: int) -> Tensor:
    return torch.zeros(outputs) if bias is None else bias.detach().float().contiguous().clone()


# ---- linear layers ----


def linear(weight_OI: Tensor, bias: Tensor | None) -> Plan:
    """The plan of `F.linear`, for rows of any number. Of 16 inputs, a window, all outputs keep equally many weights."""
    outputs, inputs = weight_OI.shape
    windows, tiles = -(-inputs // LANES), -(-outputs // LANES)
    padded = torch.zeros(tiles * LANES, windows * LANES)
    padded[:outputs, :inputs] = weight_OI
    padded_OWI = padded.unflatten(1, (windows, LANES))
    first_OWS = _kept_first(padded_OWI)
    value = _by_tiles(padded_OWI.gather(2, first_OWS), tiles)
    short = inputs - (windows - 1) * LANES  # zeros that fill up the last window must not pick an input beyond its end
    first_OWS[:, -1] = torch.where(first_OWS[:, -1] < short, first_OWS[:, -1], 0)
    place = _by_tiles(first_OWS.to(torch.uint8), tiles)
    weights = _Struct(inputs, outputs, first_OWS.shape[2], value, place, _bias(bias, outputs))
    function = _library()[0].nofm_vectors

    def run(x: Tensor) -> Tensor:
        y = torch.empty(len(x), outputs)
        function(_pointer(x), _pointer(y), weights.address, ctypes.c_int64(len(x)), ctypes.c_int64(torch.get_num_threads()))
        return y

    return run


def _by_tiles(x_OWS: Tensor, tiles: int) -> Tensor:
    """As (tile, window, slot, output of the tile)."""
    return x_OWS.unflatten(0, (tiles, LANES)).permute(0, 2, 3, 1).contiguous()
