"""Convolutions and matrix products that leave out the zeros of their weight: fp32, on the CPU, by the kernels of products.c.

A *plan* is a weight laid out for inputs of one size, with a call that computes. Three of them:

    convolution   pixels in the lanes of a register; the input is copied once for each column of the kernel
    matrix        rows of a batch in the lanes; the batch is turned before and after
    vectors       16 outputs in the lanes, for batches of a few rows, where reading the weight is what takes the time

Any weight can be planned. What N:M adds is that all outputs keep equally many weights: rows that keep fewer are filled up with zeros that
are multiplied after all. The sums are those of the dense layer in another order, and a zero that is left out is not multiplied by an
input that is Inf or NaN.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .build import compiled

__all__ = ["LANES", "Pair", "Plan", "convolution", "matrix", "unavailable", "vectors"]

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
    for name in () if library is None else ("convolution", "matrix", "vectors"):
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


# ---- weights in lanes ----


def _in_blocks(weight_OI: Tensor, place_I: Tensor, bias: Tensor | None, per_block: int, of_group: Tensor | None = None) -> _Struct:
    """The kept weights, block after block of `per_block` inputs, and in each block output after output.

    `place_I`: where the input of each weight of an output begins; `of_group`: what outputs add to it (grouped convolutions).
    """
    outputs, inputs = weight_OI.shape
    values, places, kept = [], [], []
    for start in range(0, inputs, per_block):
        value_OB = weight_OI[:, start : start + per_block]
        most = max(1, int((value_OB != 0).sum(1).max()))
        # kept ones first, in the order of the inputs; then zeros, as many as are missing
        first_OK = (value_OB == 0).to(torch.int8).argsort(dim=1, stable=True)[:, :most]
        place_OK = place_I[start : start + per_block][first_OK] + (0 if of_group is None else of_group[:, None])
        values.append(value_OB.gather(1, first_OK).flatten())
        places.append(place_OK.to(torch.int32).flatten())
        kept.append(most)
    bias = torch.zeros(outputs) if bias is None else bias.detach().float().contiguous().clone()
    return _Struct(outputs, len(kept), torch.tensor(kept), torch.cat(places), torch.cat(values).contiguous(), bias)


def matrix(weight_OI: Tensor, bias: Tensor | None, rows: int) -> Plan:
    """The plan of `F.linear` for batches of `rows` rows."""
    count, (outputs, inputs) = max(rows, LANES), weight_OI.shape
    if inputs * count > _MOST_PLACES:
        raise ValueError("too many numbers for 32-bit places")
    weights = _in_blocks(weight_OI, torch.arange(inputs) * count, bias, max(LANES, _CACHE // (4 * min(count, _TILE))))
    function = _library()[0].nofm_matrix

    def run(x: Tensor) -> Tensor:
        turned, out = _room("in", inputs * count)[: inputs * count].view(inputs, count), torch.empty(outputs, count)
        turned[:, :rows].copy_(x.t())
        function(_pointer(turned), _pointer(out), weights.address, ctypes.c_int64(count), ctypes.c_int64(torch.get_num_threads()))
        return out[:, :rows].t().contiguous()

    return run


def convolution(
    weight: Tensor, bias: Tensor | None, *, size: tuple[int, int, int], stride: Pair, padding: Pair, dilation: Pair, groups: int = 1
) -> Plan:
    """The plan of `F.conv2d` for inputs of `size`: images, height, width."""
    outputs, _, kernel_h, kernel_w = weight.shape
    images, height, width = size
    out_height = (height + 2 * padding[0] - dilation[0] * (kernel_h - 1) - 1) // stride[0] + 1
    out_width = (width + 2 * padding[1] - dilation[1] * (kernel_w - 1) - 1) // stride[1] + 1
    pixels, channels = out_height * out_width, weight.shape[1] * groups
    as_it_lies = (kernel_h, kernel_w, *stride, *padding) == (1, 1, 1, 1, 0, 0) and pixels >= LANES
    together = min(images, max(1, -(-_TILE // pixels)))
    phases, rows = (1 if kernel_h == 1 else stride[0]), out_height + dilation[0] * (kernel_h - 1) // stride[0]
    line = together * out_width
    plane = pixels if as_it_lies else kernel_w * phases * rows * line
    if channels * plane > _MOST_PLACES:
        raise ValueError("too many numbers for 32-bit places")
    weights = _of_kernel(weight, bias, groups, plane, phases, rows, line, stride[0], dilation[0], together * pixels)
    shape = _Struct(
        *(images, channels, height, width, out_height, out_width, kernel_w, *stride, *padding, dilation[1]),
        *(0 if as_it_lies else together, phases, rows),
    )
    pitch, function = max(together * pixels, LANES), _library()[0].nofm_convolution
    in_size = 0 if as_it_lies else channels * plane + LANES
    out_size = 0 if as_it_lies or (together == 1 and pixels >= LANES) else outputs * pitch

    def run(x: Tensor) -> Tensor:
        y = torch.empty(images, outputs, out_height, out_width)
        scratch = _pointer(_room("in", in_size)), _pointer(_room("out", out_size))
        threads = ctypes.c_int64(torch.get_num_threads())
        function(_pointer(x), _pointer(y), *scratch, weights.address, shape.address, ctypes.c_int64(pitch), threads)
        return y

    return run


def _of_kernel(
    weight: Tensor, bias: Tensor | None, groups: int, plane: int, phases: int, rows: int, line: int, stride: int, dilation: int, count: int
) -> _Struct:
    """A convolution's weights, the channels outermost; their places as lay_out lays out the input: (channel, column, phase, row, ...)."""
    outputs, channels, kernel_h, kernel_w = weight.shape
    y_K, x_K = torch.arange(kernel_h).repeat_interleave(kernel_w), torch.arange(kernel_w).repeat(kernel_h)
    row_K = y_K * dilation
    place_K = ((x_K * phases + row_K % stride) * rows + row_K // stride) * line
    place_I = (torch.arange(channels)[:, None] * plane + place_K).flatten()
    tile = min(count, _TILE)
    touched = 4 * kernel_w * min(kernel_h * tile, tile + (kernel_h - 1) * line)  # bytes of one channel
    per_block = kernel_h * kernel_w * max(LANES, _CACHE // touched // LANES * LANES)
    of_group = None if groups == 1 else torch.arange(groups).repeat_interleave(outputs // groups) * channels * plane
    return _in_blocks(weight.flatten(1), place_I, bias, per_block, of_group)


# ---- weights picked for a vector ----


def vectors(weight_OI: Tensor, bias: Tensor | None) -> Plan:
    """The plan of `F.linear` for batches of any size, made for a few rows. Of 16 inputs, a window, all outputs keep equally many."""
    outputs, inputs = weight_OI.shape
    windows, tiles = -(-inputs // LANES), -(-outputs // LANES)
    padded = torch.zeros(tiles * LANES, windows * LANES)
    padded[:outputs, :inputs] = weight_OI
    padded_OWI = padded.unflatten(1, (windows, LANES))
    slots = max(1, int((padded_OWI != 0).sum(2).max()))
    first_OWS = (padded_OWI == 0).to(torch.int8).argsort(dim=2, stable=True)[..., :slots]
    value = _by_tiles(padded_OWI.gather(2, first_OWS), tiles)
    short = inputs - (windows - 1) * LANES  # zeros that fill up the last window must not pick an input beyond its end
    first_OWS[:, -1] = torch.where(first_OWS[:, -1] < short, first_OWS[:, -1], 0)
    place = _by_tiles(first_OWS.to(torch.uint8), tiles)
    bias_O = torch.zeros(outputs) if bias is None else bias.detach().float().contiguous().clone()
    weights, function = _Struct(inputs, outputs, slots, value, place, bias_O), _library()[0].nofm_vectors

    def run(x: Tensor) -> Tensor:
        y = torch.empty(len(x), outputs)
        function(_pointer(x), _pointer(y), weights.address, ctypes.c_int64(len(x)), ctypes.c_int64(torch.get_num_threads()))
        return y

    return run


def _by_tiles(x_OWS: Tensor, tiles: int) -> Tensor:
    """As (tile, window, slot, output of the tile)."""
    return x_OWS.unflatten(0, (tiles, LANES)).permute(0, 2, 3, 1).contiguous()
