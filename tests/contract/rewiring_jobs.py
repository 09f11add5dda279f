"""What each of two processes does in `test_rewiring_sharded`: methods that choose connections, under DDP and FSDP2."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from rank_jobs import batch, farthest, network, sgd, train_step
from shard_jobs import shard
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nofm

STEPS = 10


def masks_of(model: nn.Module) -> list[Tensor]:
    return [site.stored_mask.clone() for site in nofm.sites(model)]


def parallel(rank: int, method: nofm.Method, how: str) -> dict[str, Any]:
    """Train on this rank's batches, and alone on those of both: the masks of all steps, and how far the weights are apart."""
    model = network()
    nofm.sparsify_(model, "1:1", preset="all")
    wrapped = shard(model, by_layer=True) if how == "fsdp" else DistributedDataParallel(model)
    optimizer = sgd(model.parameters())
    handle = nofm.attach(method, wrapped, optimizer)
    masks = []
    for step in range(STEPS):
        train_step(wrapped, optimizer, batch(step, rank))
        masks.append(masks_of(model))
    alone, masks_alone = one_process(method)
    same = [torch.equal(a, b) for mine, theirs in zip(masks, masks_alone, strict=True) for a, b in zip(mine, theirs, strict=True)]
    changes = sum(not torch.equal(a, b) for before, after in itertools.pairwise(masks) for a, b in zip(before, after, strict=True))
    memory = {name: tensor.clone() for name, tensor in handle.state_dict()["memory"]["tensors"].items()}
    return {"same masks": all(same), "farthest weight": farthest(model, alone), "mask changes": changes, "memory": memory}


def one_process(method: nofm.Method) -> tuple[nn.Module, list[list[Tensor]]]:
    model = network()
    nofm.sparsify_(model, "1:1", preset="all")
    optimizer = sgd(model.parameters())
    nofm.attach(method, model, optimizer)
    masks = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            y = model(batch(step, rank))
            ((y - y.detach().roll(1)).square().mean() / 2).backward()
        optimizer.step()
        masks.append(masks_of(model))
    return model, masks
