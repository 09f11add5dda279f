"""Runs the Triton kernels over all weights of a model in a few launches, one for each pattern, stride and type.

Addresses travel to the device in a small table. It is kept, and sent again only when an address has changed, which in a steady
training loop is rare: the allocator hands out the same blocks step after step. So the host's work in a step is to compare
addresses and to launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..masks import Grouping

__all__ = ["Fleet", "axis_stride", "bits_bytes", "bits_lane", "constants", "lanes_of_a_program", "unpack_bits"]

# Measured on an H200: smaller programs starve on latency, larger ones on registers. Strided groups want one lane a thread.
_WEIGHTS_OF_A_PROGRAM = 2048
_LANES_OF_A_STRIDED_PROGRAM = 128
# Strides that get a kernel of their own, in which division by them is cheap: kernel sizes of convolutions.
_FIXED_STRIDES = frozenset((1, 3, 5, 7, 9, 25, 27, 49))
_BITS_TYPE = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}


def axis_stride(weight: Tensor, grouping: Grouping) -> int | None:
    """The distance in memory between neighbours of a group, or None where the kernels cannot walk `weight`.

    They can if its elements fill their memory without gaps, whatever the order of axes, and every row makes whole groups.
    """
    return _axis_stride(weight.shape, weight.stride(), grouping)


@lru_cache(maxsize=4096)
def _axis_stride(shape: torch.Size, strides: tuple[int, ...], grouping: Grouping) -> int | None:
    if not 0 < shape.numel() < 2**31 or grouping.row_size(shape) % grouping.pattern.m:
        return None
    expected = 1
    by_stride = sorted((stride, extent, axis) for axis, (stride, extent) in enumerate(zip(strides, shape, strict=True)) if extent != 1)
    for stride, extent, _ in by_stride:
        if stride != expected:
            return None
        expected *= extent
    if grouping.axis == "flat":
        in_order = [axis for _, _, axis in reversed(by_stride)]
        return 1 if in_order == sorted(in_order) else None
    return strides[grouping.axis] if shape[grouping.axis] > 1 else None


@dataclass(slots=True)
class _Launch:
    """The weights that one launch serves, by their place in the fleet, and its table on the device."""

    members: list[int]
    grouping: Grouping
    stride: int
    vector: bool
    lanes: list[int]
    programs: int
    block_weight: Tensor
    first_block: Tensor
    table: Tensor

    def constants(self, lane_size: int, columns: int) -> dict[str, Any]:
        return {**constants(self.grouping, self.stride, lane_size), "VECTOR": self.vector, "ROW": 3 + columns}


def constants(grouping: Grouping, stride: int, lane_size: int) -> dict[str, Any]:
    """The compile-time arguments that all kernels share."""
    fixed = stride if stride in _FIXED_STRIDES else 0
    by_four = fixed == 0 and stride % 4 == 0
    return {"N": grouping.pattern.n, "M": grouping.pattern.m, "K": fixed, "K4": by_four, "B": lanes_of_a_program(stride, lane_size)}


def lanes_of_a_program(stride: int, lane_size: int) -> int:
    """How many lanes a program works on; a power of two."""
    if stride != 1 and stride % 4:
        return _LANES_OF_A_STRIDED_PROGRAM
    return max(32, 1 << (max(1, _WEIGHTS_OF_A_PROGRAM // lane_size).bit_length() - 1))


class Fleet:
    """A list of weights that are worked on together, step after step, by one kind of kernel."""

    def __init__(self) -> None:
        self._layout: Any = None
        self._addresses: Any = None
        self._launches: list[_Launch] = []
        self._numbers: dict[tuple[float, ...], Tensor] = {}
        self.verdicts: tuple[Any, Any] = (None, None)  # which kernel serves which weight, and for which weights that was found
        self._captured: list[Tensor] = []  # what a CUDA graph reads again at every replay

    def __deepcopy__(self, memo: Any) -> Fleet:
        return Fleet()  # addresses belong to the tensors of the original

    def __reduce__(self) -> Any:
        return Fleet, ()

    def masked_into(self, weights: Sequence[Tensor], groupings: Sequence[Grouping], outs: Sequence[Tensor]) -> None:
        """Write each masked weight into its `out`, which has the weight's shape and strides and a type of its own."""
        from .triton_masks import masked_kernel

        for launch in self._ready(groupings, [weights, outs]):
            first = launch.members[0]
            masked_kernel[(launch.programs,)](
                launch.table, launch.block_weight, launch.first_block, weights[first], outs[first],
                FLAGS=False, **launch.constants(launch.grouping.pattern.m, 2),
            )  # fmt: skip

    def flags_into(self, weights: Sequence[Tensor], groupings: Sequence[Grouping], outs: Sequence[Tensor]) -> None:
        """Write each mask into its `out`, a bool tensor with the weight's shape and strides."""
        from .triton_masks import masked_kernel

        for launch in self._ready(groupings, [weights, outs]):
            first = launch.members[0]
            masked_kernel[(launch.programs,)](
                launch.table, launch.block_weight, launch.first_block, weights[first], outs[first].view(torch.uint8),
                FLAGS=True, **launch.constants(launch.grouping.pattern.m, 2),
            )  # fmt: skip

    def refine_into(
        self, weights: Sequence[Tensor], groupings: Sequence[Grouping], outs: Sequence[Tensor], factors: Tensor, scale: Tensor, sign: bool
    ) -> None:
        """out += factor * scale * (w, or sign(w)) where pruned; `factors` holds one number for each weight, on the device."""
        from .triton_masks import refine_kernel

        for launch in self._ready(groupings, [weights, outs]):
            first = launch.members[0]
            refine_kernel[(launch.programs,)](
                launch.table, launch.block_weight, launch.first_block, factors, scale, weights[first], outs[first],
                SIGN=sign, **launch.constants(launch.grouping.pattern.m, 2),
            )  # fmt: skip

    def bits_into(
        self, weights: Sequence[Tensor], groupings: Sequence[Grouping], bits: Sequence[Tensor], before: Sequence[Tensor] | None
    ) -> Tensor:
        """Write each mask into its `bits`, of `bits_bytes` bytes; returns for each weight how many bits differ from `before`."""
        from .triton_masks import bits_kernel

        columns = [weights, bits] if before is None else [weights, bits, before]
        counts = torch.zeros(len(weights), dtype=torch.int64, device=weights[0].device)
        for launch in self._ready(groupings, columns, bits=True):
            first, lane = launch.members[0], bits_lane(launch.grouping)
            bits_kernel[(launch.programs,)](
                launch.table, launch.block_weight, launch.first_block, counts, weights[first], bits[first].view(_BITS_TYPE[lane]),
                S=lane, COMPARE=before is not None, **launch.constants(lane, len(columns)),
            )  # fmt: skip
        return counts

    def _ready(self, groupings: Sequence[Grouping], columns: list[Sequence[Tensor]], bits: bool = False) -> list[_Launch]:
        """The launches for these tensors, with tables that hold their addresses."""
        layout = tuple((w.dtype, w.shape, w.stride()) for w in columns[0]), tuple(t.dtype for t in columns[1]), tuple(groupings)
        addresses = tuple(t.data_ptr() for column in columns for t in column)
        if layout != self._layout:
            self._launches, self._layout, self._addresses = _plan(groupings, columns, bits), layout, None
        if addresses != self._addresses:
            self._send(columns)
            self._addresses = addresses
        return self._launches

    def _send(self, columns: list[Sequence[Tensor]]) -> None:
        for launch in self._launches:
            rows = [
                [lanes, launch.stride, i, *(column[i].data_ptr() for column in columns)]
                for i, lanes in zip(launch.members, launch.lanes, strict=True)
            ]
            launch.table = self._on_device(rows, torch.int64, columns[0][0].device)
            wide = all(column[i].data_ptr() % 16 == 0 for column in columns[:2] for i in launch.members)
            launch.vector = wide and launch.stride == 1 and launch.grouping.pattern.m % 4 == 0

    def numbers(self, values: Sequence[float], device: torch.device) -> Tensor:
        """`values` on the device; sent once."""
        key = tuple(values)
        if key not in self._numbers or self._numbers[key].device != device:
            if len(self._numbers) > 64:  # learning rates that change at every step
                self._numbers.clear()
            self._numbers[key] = self._on_device(key, torch.float32, device)
        return self._numbers[key]

    def _on_device(self, values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
        sent = on_host.to(device, non_blocking=True)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured += [on_host, sent]
        return sent


def _plan(groupings: Sequence[Grouping], columns: list[Sequence[Tensor]], bits: bool) -> list[_Launch]:
    """Weights that one launch can serve go together: same pattern, same stride, same types."""
    weights, others = columns[0], columns[1]
    together: dict[Any, list[int]] = defaultdict(list)
    for i, (weight, grouping, other) in enumerate(zip(weights, groupings, others, strict=True)):
        stride = axis_stride(weight, grouping)
        assert stride is not None, "the caller has asked axis_stride before"
        together[grouping.pattern, stride, weight.dtype, other.dtype].append(i)
    launches = []
    for (_, stride, _, _), members in together.items():
        grouping, device = groupings[members[0]], weights[0].device
        lane = bits_lane(grouping) if bits else grouping.pattern.m
        lanes = [weights[i].numel() // lane for i in members]
        blocks = torch.tensor([-(-n // lanes_of_a_program(stride, lane)) for n in lanes])
        block_weight = torch.repeat_interleave(torch.arange(len(members)), blocks).to(device, torch.int32)
        first_block = (blocks.cumsum(0) - blocks).to(device, torch.int32)
        empty = torch.empty(0, dtype=torch.int64, device=device)
        launches.append(_Launch(members, grouping, stride, False, lanes, int(blocks.sum()), block_weight, first_block, empty))
    return launches


# ---- masks as bits, in the order in which the kernel walks the weight ----


def bits_lane(grouping: Grouping) -> int:
    """How many weights make one word of bits: a group, or as many small groups as make a byte."""
    return max(8, grouping.pattern.m)


def bits_bytes(weight: Tensor, grouping: Grouping) -> int | None:
    """How many bytes the bits of a mask take, or None where the kernel cannot write them."""
    lane, stride = bits_lane(grouping), axis_stride(weight, grouping)
    if stride is None or lane not in _BITS_TYPE or lane % grouping.pattern.m or weight.numel() % (lane * stride):
        return None
    return weight.numel() // 8


def unpack_bits(bits: Tensor, lane: int, shape: torch.Size, strides: tuple[int, ...], stride: int) -> Tensor:
    """The mask whose bits these bytes are, of a weight of `shape` and `strides` whose groups run `stride` apart."""
    words = bits.view(-1, lane // 8, 1)  # little-endian, as every machine that runs this
    flags = ((words >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1).view(-1, stride, lane)
    in_memory = flags.transpose(1, 2).reshape(-1).bool()
    return in_memory.as_strided(shape, strides)
