"""`check_ranks(model)`: do all processes hold the same masks?

In data-parallel training every process makes its masks from its own copy of the weights, and nothing tells when a copy drifts:
the losses still look alike. Here each mask is reduced to one number on its device, only those numbers travel, and every process
learns which layers differ and on which ranks.

A weight that is spread over processes (FSDP2, tensor parallelism) has no copies to compare except where it is also replicated
(HSDP). Its whole mask is gathered, so its fingerprint is the one it would have in a single process.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, distributed, nn

from .. import shards
from ..errors import LayerError, MaskDivergenceError, NofmError
from ..masks import pack
from ..site import Site, sites, unwrap

__all__ = ["check_ranks", "fingerprints"]


def fingerprints(model: nn.Module) -> dict[str, int]:
    """One number for the mask of each sparse layer. Masks that differ in one weight always have different numbers.

    The same in every process that holds the same masks, on every device; with spread weights, all processes must call it.
    """
    found = _sites(model)
    numbers: list[int] = torch.stack([_fingerprint(site) for site in found]).tolist()
    return {site.name: number for site, number in zip(found, numbers, strict=True)}


def check_ranks(model: nn.Module, group: distributed.ProcessGroup | None = None) -> None:
    """Raise `MaskDivergenceError`, in every process of `group`, if some process holds other masks than the first one.

    All processes of `group` (default: all there are) must call it. Ranks are counted within `group`.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise NofmError("check_ranks compares processes, and there is no process group; call torch.distributed.init_process_group first")
    found = _sites(model)
    # Ranks with other layers would send other numbers of numbers, and hang. So this goes first.
    layers = zlib.crc32(repr([(site.key, tuple(site.weight.shape), site.grouping) for site in found]).encode())
    names = _gather(torch.tensor([layers], device=found[0].weight.device), group)
    if others := (names[:, 0] != names[0, 0]).nonzero().flatten().tolist():
        raise LayerError(f"rank(s) {', '.join(map(str, others))} have other sparse layers than rank 0; call sparsify_ alike on all ranks")

    numbers_RL = _gather(torch.stack([_fingerprint(site) for site in found]), group)  # R ranks, L layers
    differs_RL = numbers_RL != numbers_RL[0]
    if differs_RL.any():
        layers_differing = [site.name for site, differs in zip(found, differs_RL.any(0).tolist(), strict=True) if differs]
        raise MaskDivergenceError(layers_differing, differs_RL.any(1).nonzero().flatten().tolist())


def _sites(model: nn.Module) -> list[Site]:
    model = unwrap(model)
    shards.reshard_(model)
    found = list(sites(model))
    if not found:
        raise LayerError(f"this {type(model).__name__} has no sparse layer; sparsify_ comes first")
    return found


def _gather(numbers: Tensor, group: distributed.ProcessGroup | None) -> Tensor:
    rows = [torch.empty_like(numbers) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(rows, numbers, group=group)
    return torch.stack(rows)


def _fingerprint(site: Site) -> Tensor:
    """The bytes of the packed mask, each times an odd number of its own, summed modulo 2^64.

    A difference in one byte is less than 2^8 in size, and times an odd number it is not 0 modulo 2^64.
    """
    if site.stored_mask is not None:
        mask = site.stored_mask
    else:
        shards.check_groups_whole(site.name, site.weight, site.grouping)
        mask = shards.whole_of(site.mask(), site.weight)
    packed = pack(mask).to(torch.int64)
    return (packed * _odd_numbers(packed)).sum()


def _odd_numbers(like: Tensor) -> Tensor:
    """Odd numbers without pattern, from their index by the mixing steps of the splitmix64 generator."""
    x = torch.arange(1, like.numel() + 1, device=like.device) * -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x | 1
