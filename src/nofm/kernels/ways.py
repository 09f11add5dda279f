"""How a Triton program gets at its groups, for each distance between neighbours of a group; what was found fastest, in one table.

walk       one weight of each group a load (`triton_masks`); where groups are contiguous and aligned, 16 bytes a load
exchange   memory in order, groups through shared memory (`triton_tiles`)
blocks     memory in order, whole blocks of interleaved groups in a thread (`triton_tiles`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["FIXED_STRIDES", "Task", "Way", "way_for", "whole_blocks"]

Task: TypeAlias = Literal["masked", "refine", "bits", "step"]

# Strides that get a kernel of their own, in which division by them is cheap: kernel sizes of convolutions.
FIXED_STRIDES = frozenset((1, 3, 5, 7, 9, 25, 27, 49))

# Measured on an H200: smaller programs starve on latency, larger ones on registers. Strided groups want one lane a thread, and so do
# large groups: a thread without a lane of its own would have to be given one through shared memory.
_WEIGHTS_OF_A_PROGRAM = 2048
STEP_WEIGHTS = 1024  # of a program that takes an optimizer's step: three or four numbers a weight are in registers
_THREADS = 128
_LARGEST = 2**31 - 2**20  # places of a stretch that reaches over the end must not overflow


@dataclass(frozen=True, slots=True)
class Way:
    """A kind, and the size of its programs: lanes (walk), weights of a stretch (exchange) or rows (blocks)."""

    kind: Literal["walk", "exchange", "blocks"]
    size: int
    stretches: int = 1  # exchange: how many a program works on
    row: int = 0  # blocks: weights of a row

    def weights(self, lane: int, stride: int) -> int:
        """How many weights a program works on."""
        if self.kind == "walk":
            return self.size * lane
        return self.size * self.row if self.kind == "blocks" else self.stretches * whole_blocks(self.size, lane, stride)

    def constants(self) -> dict[str, int]:
        return {"B": self.size} if self.kind == "walk" else {"S": self.row, "B": self.size, "L": self.stretches}


def whole_blocks(weights: int, m: int, stride: int) -> int:
    """How many of `weights` consecutive weights make whole blocks, and a multiple of 8, so that every stretch begins aligned."""
    block = m * stride
    while block % 8:
        block *= 2
    return weights // block * block


# For (stride, M): what serves strided groups better than walking. `benchmarks/nchw_candidates.py` compares them.
_EXCHANGE = Way("exchange", 2048, 8)
IN_ORDER: dict[tuple[int, int], Way] = {
    (9, 2): _EXCHANGE,
    (9, 4): Way("blocks", 128, row=36),
    (9, 8): _EXCHANGE,
    (9, 16): _EXCHANGE,
    (25, 2): _EXCHANGE,
    (25, 4): _EXCHANGE,
}


def way_for(stride: int, m: int, lane: int, numel: int, aligned: bool, task: Task) -> Way:
    """The way for a weight of `numel` weights, which begins on 16 bytes where `aligned`. A lane is a group, or makes one word of bits."""
    if aligned and task != "bits" and (stride, m) in IN_ORDER and numel % 8 == 0 and numel < _LARGEST:
        way = IN_ORDER[stride, m]
        if task == "step":
            way = Way("exchange", STEP_WEIGHTS, 8)
        elif task == "refine" and way.kind == "blocks":  # weight and gradient together do not fit in registers
            way = Way("exchange", 2048, 4)
        if whole_blocks(way.size, m, stride) or way.kind == "blocks":
            return way
    if stride != 1 and stride % 4:
        return Way("walk", _THREADS)
    weights = STEP_WEIGHTS if task == "step" else _WEIGHTS_OF_A_PROGRAM
    return Way("walk", max(_THREADS, 1 << (max(1, weights // lane).bit_length() - 1)))
