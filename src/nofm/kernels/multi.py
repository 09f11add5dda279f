"""Runs the Triton kernels over all weights of a model in a few launches, one for each pattern, stride and type.

Addresses travel to the device in a small table. Tables are kept: in a steady training loop the allocator hands out the same blocks again,
in the next step or, where gradients live until those of the next step are there, in the one after it. So the host's work in a step is to
compare addresses and to launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..masks import Grouping
from .layout import axis_stride
from .ways import FIXED_STRIDES, Task, Way, way_for

__all__ = ["Fleet", "at", "bits_bytes", "bits_lane", "constants", "hold", "sent", "unpack_bits"]

_TABLES = 16  # that a fleet keeps
_BITS_TYPE = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}


@dataclass(slots=True)
class _Launch:
    """The weights that one launch serves, by their place in the fleet, and its table on the device."""

    members: list[int]
    grouping: Grouping
    stride: int
    way: Way
    lanes: list[int]
    programs: int
    block_weight: Tensor
    first_block: Tensor
    constants: dict[str, Any]
    table: Tensor


def constants(grouping: Grouping, stride: int, way: Way, aligned: bool) -> dict[str, Any]:
    """The compile-time arguments that all kernels share."""
    shared = {"N": grouping.pattern.n, "M": grouping.pattern.m, **way.constants()}
    if way.kind != "walk":
        return {**shared, "K": stride}
    fixed = stride if stride in FIXED_STRIDES else 0
    vector = aligned and stride == 1 and grouping.pattern.m % 4 == 0
    return {**shared, "K": fixed, "K4": aligned and fixed == 0 and stride % 4 == 0, "VECTOR": vector}


def at(device: torch.device) -> AbstractContextManager[Any]:
    """Where Triton launches, which does not look where tensors lie: a model may be on another GPU than the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Fleet:
    """A list of weights on one device that are worked on together, step after step, by one kind of kernel."""

    def __init__(self) -> None:
        self._layout: object = None
        self._plans: dict[tuple[bool, ...], list[_Launch]] = {}  # for this layout, by which weights are aligned
        self._ready_made: dict[tuple[int, ...], list[_Launch]] = {}  # with tables on the device, by addresses
        self._numbers: dict[tuple[float, ...], Tensor] = {}
        self.verdict: Any = None  # which kernel serves which weight: see `ops`

    def __deepcopy__(self, memo: Any) -> Fleet:
        return Fleet()  # addresses belong to the tensors of the original

    def __reduce__(self) -> Any:
        return Fleet, ()

    def masked_into(self, weights: Sequence[Tensor], groupings: Sequence[Grouping], outs: Sequence[Tensor]) -> None:
        """Write each masked weight into its `out`, which has the weight's shape and strides and a type of its own."""
        self._write_masked(weights, groupings, outs, flags=False)

    def flags_into(self, weights: Sequence[Tensor], groupings: Sequence[Grouping], outs: Sequence[Tensor]) -> None:
        """Write each mask into its `out`, a bool tensor with the weight's shape and strides."""
        self._write_masked(weights, groupings, [out.view(torch.uint8) for out in outs], flags=True)

    def _write_masked(self, weights: Sequence[Tensor], groupings: Sequence[Grouping], outs: Sequence[Tensor], flags: bool) -> None:
        from .triton_masks import masked_kernel
        from .triton_tiles import in_order_masked_kernel

        with at(weights[0].device):
            for launch in self._ready(groupings, [weights, outs], "masked"):
                first = launch.members[0]
                kernel = masked_kernel if launch.way.kind == "walk" else in_order_masked_kernel
                kernel[(launch.programs,)](
                    launch.table, launch.block_weight, launch.first_block, weights[first], outs[first], FLAGS=flags, **launch.constants
                )

    def refine_into(
        self,
        weights: Sequence[Tensor],
        groupings: Sequence[Grouping],
        outs: Sequence[Tensor],
        factors: Tensor,
        scale: Tensor,
        sign: bool,
        layout: object = None,
    ) -> None:
        """out += factor * scale * (w, or sign(w)) where pruned; `factors` holds one number for each weight, on the device.

        A caller who has looked at all tensors says with `layout` that nothing but addresses of `outs` differs from the last call
        with the same object.
        """
        from .triton_masks import refine_kernel
        from .triton_tiles import in_order_refine_kernel

        with at(weights[0].device):
            for launch in self._ready(groupings, [weights, outs], "refine", layout):
                first = launch.members[0]
                kernel = refine_kernel if launch.way.kind == "walk" else in_order_refine_kernel
                kernel[(launch.programs,)](
                    launch.table, launch.block_weight, launch.first_block, factors, scale, weights[first], outs[first],
                    SIGN=sign, **launch.constants,
                )  # fmt: skip

    def bits_into(
        self, weights: Sequence[Tensor], groupings: Sequence[Grouping], bits: Sequence[Tensor], before: Sequence[Tensor] | None
    ) -> Tensor:
        """Write each mask into its `bits`, of `bits_bytes` bytes; returns for each weight how many bits differ from `before`."""
        from .triton_masks import bits_kernel

        columns = [weights, bits] if before is None else [weights, bits, before]
        counts = torch.zeros(len(weights), dtype=torch.int64, device=weights[0].device)
        with at(weights[0].device):
            for launch in self._ready(groupings, columns, "bits"):
                first, lane = launch.members[0], bits_lane(launch.grouping)
                bits_kernel[(launch.programs,)](
                    launch.table, launch.block_weight, launch.first_block, counts, weights[first], bits[first].view(_BITS_TYPE[lane]),
                    S=lane, COMPARE=before is not None, **launch.constants,
                )  # fmt: skip
        return counts

    def _ready(self, groupings: Sequence[Grouping], columns: list[Sequence[Tensor]], task: Task, layout: object = None) -> list[_Launch]:
        """The launches for these tensors, with tables that hold their addresses."""
        if layout is None:
            looks = [(w.dtype, w.shape, w.stride()) for w in columns[0]]
            layout = task, columns[0][0].device, looks, [t.dtype for t in columns[1]], list(groupings)
            addresses = [t.data_ptr() for column in columns for t in column]
        else:
            addresses = [t.data_ptr() for t in columns[1]]
        if layout != self._layout:
            self._layout, self._plans, self._ready_made = layout, {}, {}
        # A graph sends its own tables, at every replay and not before, so nobody else may read them.
        capturing = columns[0][0].is_cuda and torch.cuda.is_current_stream_capturing()
        launches = None if capturing else self._ready_made.get(tuple(addresses))
        if launches is None:
            launches = self._with_tables(self._plan(groupings, columns, task, capturing), columns)
            if capturing:
                _HELD.extend(tensor for launch in launches for tensor in (launch.block_weight, launch.first_block))
            else:
                if len(self._ready_made) == _TABLES:  # addresses that do not come again
                    self._ready_made.clear()
                self._ready_made[tuple(addresses)] = launches
        return launches

    def _plan(self, groupings: Sequence[Grouping], columns: list[Sequence[Tensor]], task: Task, capturing: bool) -> list[_Launch]:
        walked = columns if task == "step" else columns[:2]
        aligned = tuple(all(column[i].data_ptr() % 16 == 0 for column in walked) for i in range(len(columns[0])))
        plan = self._plans.get(aligned) or _plan(groupings, columns, aligned, task)
        if not capturing:
            self._plans[aligned] = plan
        return plan

    @staticmethod
    def _with_tables(plan: list[_Launch], columns: list[Sequence[Tensor]]) -> list[_Launch]:
        launches = []
        for launch in plan:
            rows = [
                [lanes, launch.stride, i, *(column[i].data_ptr() for column in columns)]
                for i, lanes in zip(launch.members, launch.lanes, strict=True)
            ]
            launches.append(replace(launch, table=sent(torch.tensor(rows, dtype=torch.int64), columns[0][0].device)))
        return launches

    def numbers(self, values: Sequence[float], device: torch.device) -> Tensor:
        """`values` on the device; sent once."""
        key = tuple(values)
        found = self._numbers.get(key)
        if found is None or found.device != device:
            found = sent(torch.tensor(key, dtype=torch.float32), device)
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return found  # nobody else may read it: a graph sends it at every replay, and not before
            if len(self._numbers) > 64:  # learning rates that change at every step
                self._numbers.clear()
            self._numbers[key] = found
        hold(found)
        return found


# What a CUDA graph reads again at every replay. A graph does not say when it goes, and a table has some kilobytes: kept for good.
_HELD: list[Tensor] = []


def hold(*tensors: Tensor) -> None:
    """Keep these, if a CUDA graph is being captured, which reads them."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        _HELD.extend(tensors)


def sent(on_host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it."""
    if device.type != "cuda":
        return on_host.to(device)
    pinned = on_host.pin_memory()
    arriving = pinned.to(device, non_blocking=True)
    if torch.cuda.is_current_stream_capturing():
        _HELD.extend((pinned, arriving))
    return arriving


def _plan(groupings: Sequence[Grouping], columns: list[Sequence[Tensor]], aligned: Sequence[bool], task: Task) -> list[_Launch]:
    """Weights that one launch can serve go together: same pattern, same stride, same types, same way to their groups."""
    weights, others = columns[0], columns[1]
    together: dict[Any, list[int]] = defaultdict(list)
    for i, (weight, grouping, other) in enumerate(zip(weights, groupings, others, strict=True)):
        stride, m = axis_stride(weight, grouping), grouping.pattern.m
        assert stride is not None, "the caller has asked axis_stride before"
        way = way_for(stride, m, bits_lane(grouping) if task == "bits" else m, weight.numel(), aligned[i], task)
        together[grouping.pattern, stride, weight.dtype, other.dtype, way, aligned[i]].append(i)
    launches = []
    for (_, stride, _, _, way, wide), members in together.items():
        grouping, device = groupings[members[0]], weights[0].device
        lane = bits_lane(grouping) if task == "bits" else grouping.pattern.m
        blocks = torch.tensor([-(-weights[i].numel() // way.weights(lane, stride)) for i in members])
        launches.append(
            _Launch(
                members,
                grouping,
                stride,
                way,
                lanes=[weights[i].numel() // lane for i in members],
                programs=int(blocks.sum()),
                block_weight=sent(torch.repeat_interleave(torch.arange(len(members)), blocks).to(torch.int32), device),
                first_block=sent((blocks.cumsum(0) - blocks).to(torch.int32), device),
                constants={**constants(grouping, stride, way, wide), "ROW": 3 + len(columns)},
                table=torch.empty(0, dtype=torch.int64, device=device),
            )
        )
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
