"""Weights that are spread over processes (DTensor: FSDP2, tensor parallelism).

A mask is made group by group, so each process can mask its own part of a weight, provided that no group is cut in two by the
boundary between two parts. FSDP2 cuts along axis 0 and groups run along the inputs, axis 1, of most layers: always whole. Where
the two axes meet (a transposed convolution under FSDP2, a row-parallel linear layer) the parts must hold whole groups.

A mixed-precision policy of FSDP2 gathers weights in bf16, and layers then mask what they are given: where two magnitudes tie after
rounding (0.4 % of 2:4 groups) forward may keep the other one than the fp32 master weight says. Autocast has no such gap.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .errors import LayerError
from .masks import Grouping

__all__ = [
    "check_groups_whole",
    "complete_grad_",
    "cuts_groups",
    "gathers",
    "groups_of",
    "joined",
    "local",
    "mask",
    "part_of",
    "reshard_",
    "spread",
    "summed",
    "whole",
    "whole_of",
]


def _is_dtensor(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is spread over processes. For a type checker it has any attributes then."""
    # Importing DTensor takes long, and a tensor can only be one if somebody has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this process holds: the same memory, the whole of it where nothing is spread."""
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`, gathered from the processes where it is spread."""
    return tensor.full_tensor() if _is_dtensor(tensor) else tensor


def reshard_(model: nn.Module) -> None:
    """Put the parameters that FSDP2 trains back in their places.

    After a forward without a backward its root module still shows the gathered copies: what is written to them is lost.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise LayerError(
                f"{name or type(model).__name__}: FullyShardedDataParallel flattens weights, so that groups are lost; "
                "use fully_shard (FSDP2)"
            )
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def gathers(tensor: Tensor, param: Tensor) -> bool:
    """Whether `tensor` can be FSDP2's gathered copy of `param`: spread over fewer processes, or not at all."""
    return _is_dtensor(param) and not (_is_dtensor(tensor) and tensor.device_mesh == param.device_mesh)


def complete_grad_(param: Tensor) -> None:
    """Spread the gradient as its parameter is, so that adding to a process's part adds to the sum once and not on every process."""
    if _is_dtensor(param) and param.grad.placements != param.placements:
        param.grad = param.grad.redistribute(placements=param.placements)


def spread(full: Tensor, like: Tensor) -> Tensor:
    """`full`, which every process has all of, spread over the processes as `like` is: nothing is sent."""
    if not _is_dtensor(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """The part of `full` that belongs to this process's part of `like`."""
    return local(spread(full, like))


def joined(part: Tensor, like: Tensor) -> Tensor:
    """One tensor, spread as `like` is, of the parts that the processes hold: nothing is sent."""
    if not _is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(part.contiguous(), like.device_mesh, like.placements, shape=like.shape, stride=stride)


def whole_of(part: Tensor, like: Tensor) -> Tensor:
    """All of a tensor of which every process holds the part that belongs to its part of `like`: the inverse of `part_of`."""
    return whole(joined(part, like))


def mask(weight: Tensor, grouping: Grouping) -> Tensor:
    """The mask of `weight`, spread as it is: each process masks its own part."""
    if not _is_dtensor(weight):
        return grouping.mask(weight)
    check_groups_whole("a weight in forward", weight, grouping)
    return joined(grouping.mask(local(weight)), weight)


def groups_of(tensor: Tensor) -> list[Any]:
    """The process groups that `tensor` is spread over: summing over all of them sums over the whole tensor."""
    if not _is_dtensor(tensor):
        return []
    mesh = tensor.device_mesh
    return [mesh.get_group(i) for i, placement in enumerate(tensor.placements) if _axis(placement) is not None and mesh.size(i) > 1]


def summed(part: Tensor, like: Tensor) -> Tensor:
    """The sum of what each process has found in its part of `like`. `part` stays what it is."""
    for group in groups_of(like):
        part = part.to(like.device, copy=True)
        torch.distributed.all_reduce(part, group=group)
    return part


def check_groups_whole(name: str, weight: Tensor, grouping: Grouping) -> None:
    """Raise if a boundary between two processes' parts of `weight` would cut a group."""
    if not _is_dtensor(weight):
        return
    for axis, counts in _splits(weight).items():
        size, unit = weight.shape[axis], 1
        if grouping.axis == "flat" and axis >= 1:
            unit = weight.shape[axis + 1 :].numel()
        elif grouping.axis == "flat" or axis != grouping.axis % weight.dim():
            continue
        # A flat row that is cut along a kernel axis falls into many pieces.
        if cuts_groups(size, unit, grouping.pattern.m, counts) or (grouping.axis == "flat" and axis > 1):
            part = functools.reduce(lambda size, count: -(-size // count), counts, size)
            raise LayerError(
                f"{name}: axis {axis} of shape {tuple(weight.shape)} is spread over {math.prod(counts)} processes in parts of {part}, "
                f"which cuts groups of {grouping.pattern}; leave this layer unsharded or dense (skip), or shard another axis"
            )


def cuts_groups(size: int, unit: int, m: int, counts: Iterable[int]) -> bool:
    """Whether cutting `size` times `unit` weights into parts cuts a group of `m`.

    They are cut between units, into as many parts as the first of `counts` says, as torch.chunk does: equal parts and a shorter
    last one. Then every part is cut again by the next count.
    """
    parts = {size}
    for count in counts:
        finer = set()
        for part in filter(None, parts):
            step = -(-part // count)
            if step < part and step * unit % m:
                return True
            finer |= {step, part - (part - 1) // step * step}
        parts = finer
    return False


def _splits(weight: Any) -> dict[int, list[int]]:
    """By axis, into how many parts a spread weight is cut, in the order of the cuts.

    Left to right through the axes of the mesh, but FSDP2 on top of tensor parallelism cuts what has been cut already: its strided
    placement stands on the left and is applied last.
    """
    cuts = list(zip(weight.placements, weight.device_mesh.shape, strict=True))
    plain, strided = [c for c in cuts if c[0].is_shard()], [c for c in reversed(cuts) if not c[0].is_shard()]
    splits: dict[int, list[int]] = {}
    for placement, count in plain + strided:
        axis = _axis(placement)
        if axis is not None and count > 1:
            splits.setdefault(axis % weight.dim(), []).append(count)
    return splits


def _axis(placement: Any) -> int | None:
    """The axis that a placement cuts; None where every process has all of it. (A strided shard does not call itself a shard.)"""
    return None if placement.is_replicate() or placement.is_partial() else placement.dim
