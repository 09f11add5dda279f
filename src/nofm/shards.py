"""Weights that are spread over processes (DTensor: FSDP2, tensor parallelism).

A mask is made group by group, so each process can mask its own part of a weight, provided that no group is cut in two by the
boundary between two parts. FSDP2 cuts along axis 0 and groups run along the inputs, axis 1, of most layers: always whole. Where
the two axes meet (a transposed convolution under FSDP2, a row-parallel linear layer) the parts must hold whole groups.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from .errors import LayerError
from .masks import Grouping

__all__ = ["check_groups_whole", "local", "part_of", "whole"]


def _is_dtensor(tensor: Tensor) -> bool:
    # Importing DTensor takes long, and a tensor can only be one if somebody has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this process holds: the same memory, the whole of it where nothing is spread."""
    dtensor: Any = tensor
    result: Tensor = dtensor.to_local() if _is_dtensor(tensor) else tensor
    return result


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`, gathered from the processes where it is spread."""
    dtensor: Any = tensor
    result: Tensor = dtensor.full_tensor() if _is_dtensor(tensor) else tensor
    return result


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """The part of `full` that belongs to this process's part of `like`."""
    if not _is_dtensor(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    dtensor: Any = like
    part: Any = distribute_tensor(full, dtensor.device_mesh, dtensor.placements, src_data_rank=None)
    result: Tensor = part.to_local()
    return result


def check_groups_whole(name: str, weight: Tensor, grouping: Grouping) -> None:
    """Raise if a boundary between two processes' parts of `weight` would cut a group."""
    if not _is_dtensor(weight):
        return
    dtensor: Any = weight
    part = list(weight.shape)
    for placement, processes in zip(dtensor.placements, dtensor.device_mesh.shape, strict=True):
        if processes == 1 or not placement.is_shard():
            continue
        dim = placement.dim
        part[dim] = -(-part[dim] // processes)
        if grouping.axis == "flat":
            inside, size = dim >= 1, part[dim] * weight.shape[dim + 1 :].numel()
        else:
            inside, size = dim == grouping.axis % weight.dim(), part[dim]
        if inside and not grouping.pattern.divides(size):
            raise LayerError(
                f"{name}: axis {dim} of shape {tuple(weight.shape)} is spread over {processes} processes in parts of {part[dim]}, "
                f"which cuts groups of {grouping.pattern}; leave this layer unsharded or dense (skip), or shard another axis"
            )
