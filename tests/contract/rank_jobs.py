"""What each of two processes does in `test_distributed`: data-parallel jobs. Every function runs on both ranks at the same time.

Data come by step and rank, so that one process can train on what both have seen: its run is what the others are compared with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import nofm
from nofm import shards
from nofm.analysis.ranks import check_ranks, fingerprints

STEPS = 10
SRSTE = nofm.SRSTE(decay=0.05)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()]
    return nn.Sequential(*convs, nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 4, 4, 4, generator=torch.Generator().manual_seed(2 * step + rank))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    y = model(x)
    (y - y.detach().roll(1)).square().mean().backward()
    optimizer.step()


def one_process(
    method: nofm.Method, make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
) -> tuple[nn.Module, list[dict[str, int]]]:
    """The run to compare with: the batches of both ranks in one. Returns the model and its masks, as fingerprints, after each step."""
    model = network()
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = make_optimizer(model.parameters())
    nofm.attach(method, model, optimizer)
    masks = []
    for step in range(STEPS):
        # Means over halves and their mean, as two processes do it.
        optimizer.zero_grad()
        for rank in range(2):
            y = model(batch(step, rank))
            ((y - y.detach().roll(1)).square().mean() / 2).backward()
        optimizer.step()
        masks.append(fingerprints(model))
    return model, masks


def farthest(a: nn.Module, b: nn.Module) -> float:
    """The largest difference between the parameters of two models, whole ones."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((shards.whole(x.detach()) - shards.whole(y.detach())).abs().max().item() for x, y in pairs)


def compare(model: nn.Module, masks: list[dict[str, int]], method: nofm.Method, make_optimizer: Any = sgd) -> dict[str, Any]:
    alone, masks_alone = one_process(method, make_optimizer)
    changes = sum(a != b for a, b in itertools.pairwise(masks_alone))
    return {"same masks": masks == masks_alone, "farthest weight": farthest(model, alone), "mask changes": changes}


# ---- DDP ----


def ddp(rank: int, order: str, method: nofm.Method) -> dict[str, Any]:
    """`order` is one of "sparsify attach wrap", "sparsify wrap attach" and "wrap sparsify attach"."""
    model = network()
    with torch.no_grad():
        model[0].weight.add_(rank)  # DDP starts all ranks from rank 0's weights, and rank 0's frozen masks if they are there by then
    parallel: nn.Module = model
    optimizer = sgd(model.parameters())
    for verb in order.split():
        if verb == "sparsify":
            nofm.sparsify_(parallel, "2:4", preset="all")
        elif verb == "attach":
            nofm.attach(method, parallel, optimizer)
        else:
            parallel = DistributedDataParallel(model)
    masks = []
    for step in range(STEPS):
        train_step(parallel, optimizer, batch(step, rank))
        masks.append(fingerprints(parallel))
    check_ranks(parallel)
    return compare(model, masks, method)


def ddp_with_batch_norm(rank: int) -> dict[str, Any]:
    """DDP broadcasts the statistics of batch norm and, with them, frozen masks that were there when it was made."""
    model = nn.Sequential(network()[0], nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = sgd(model.parameters())
    handle = nofm.attach(nofm.ASP(), model, optimizer)
    before = fingerprints(model)
    parallel = DistributedDataParallel(model)
    named = dict(parallel.named_buffers())
    for step in range(STEPS):
        train_step(parallel, optimizer, batch(step, rank))
    check_ranks(model)
    zeros = [(site.weight[~site.stored_mask] == 0).all().item() for site in nofm.sites(model)]
    masks_are_buffers = sum("mask" in name for name in named)
    return {"frozen": fingerprints(model) == before, "zeros": all(zeros), "mask buffers": masks_are_buffers, "steps": handle.step}


def sharded_optimizer(rank: int) -> dict[str, Any]:
    """ZeroRedundancyOptimizer moves a part of the weights on each rank and sends them around."""
    model = network()
    nofm.sparsify_(model, "2:4", preset="all")
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
    method = nofm.SRSTE(decay=0.05, placement="decoupled")
    nofm.attach(method, parallel, optimizer)
    masks = []
    for step in range(STEPS):
        train_step(parallel, optimizer, batch(step, rank))
        masks.append(fingerprints(model))
    check_ranks(model)
    return compare(model, masks, method)


def masks_with_ties(rank: int, steps: int) -> dict[str, Any]:
    """Ranks have seeds and data of their own. Weights are often on a coarse grid, where magnitudes tie."""
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    nofm.sparsify_(model, {"0": "2:4", "2": "1:16"})
    parallel = DistributedDataParallel(model)
    optimizer = sgd(model.parameters())
    nofm.attach(nofm.SRSTE(decay=2e-3), parallel, optimizer)
    masks, ties = [], 0
    for step in range(steps):
        x = torch.randn(8, 16)  # from the rank's own seed
        optimizer.zero_grad()
        (parallel(x) - x).square().mean().backward()
        optimizer.step()
        if step % 3 == 0:
            with torch.no_grad():
                for site in nofm.sites(model):
                    site.weight.copy_((site.weight * 16).round() / 16)
                    groups = site.weight.abs().unflatten(1, (-1, site.grouping.pattern.m)).sort(-1, descending=True).values
                    n = site.grouping.pattern.n
                    ties += int((groups[..., n - 1] == groups[..., n]).sum())
        masks.append(fingerprints(model))
    return {"masks": masks, "ties": ties}


# ---- check_ranks ----


def planted(rank: int, plant: str) -> tuple[str, list[str], list[int]]:
    """Make rank 1 differ, and tell what every rank is told: the error's name, its layers and ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 32))
    nofm.sparsify_(model, "2:4", preset="all", skip="0" if plant == "other layers" and rank == 1 else ())
    found = list(nofm.sites(model))
    if plant.startswith("frozen"):
        for site in found:
            site.freeze(site.mask())
    if rank == 1:
        _plant(plant, found)
    try:
        check_ranks(model)
    except nofm.MaskDivergenceError as error:
        return type(error).__name__, error.layers, error.ranks
    except nofm.NofmError as error:
        return type(error).__name__, [], []
    return "nothing", [], []


@torch.no_grad()
def _plant(plant: str, found: list[Any]) -> None:
    if plant == "one weight":
        found[1].weight[3, 4:8] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    elif plant == "same mask":  # other weights, but in the same order: masks agree
        found[1].weight.mul_(2)
    elif plant == "two layers":
        found[0].weight.copy_(found[0].weight.flip(1))
        found[2].weight.copy_(found[2].weight.flip(1))
    elif plant == "frozen, one bit":
        found[2].stored_mask[31, 15] ^= True


def planted_in_a_group(rank: int) -> str:
    """Rank 1 differs, but each rank is asked about itself only."""
    model = nn.Linear(16, 16)
    nofm.sparsify_(model, "2:4")
    with torch.no_grad():
        model.weight.copy_(torch.randn(16, 16, generator=torch.Generator().manual_seed(rank)))
    groups = [distributed.new_group([r]) for r in range(2)]
    check_ranks(model, groups[rank])
    try:
        check_ranks(model)
    except nofm.MaskDivergenceError as error:
        return str(error)
    return "nothing"
