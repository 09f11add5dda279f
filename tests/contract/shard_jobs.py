"""What each of two processes does in `test_sharded`: weights that are spread over both (FSDP2, tensor parallelism)."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from rank_jobs import SRSTE, STEPS, adamw, batch, compare, farthest, network, sgd, train_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nofm
from nofm import shards
from nofm.analysis.ranks import check_ranks, fingerprints

OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def shard(model: nn.Sequential, by_layer: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    if by_layer:
        for layer in model:
            if isinstance(layer, nn.Linear | nn.Conv2d):
                fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(rank: int, sparsify_first: bool, by_layer: bool, optimizer: str, method: nofm.Method) -> dict[str, Any]:
    model = network()
    if sparsify_first:
        nofm.sparsify_(model, "2:4", preset="all")
    shard(model, by_layer)
    if not sparsify_first:
        nofm.sparsify_(model, "2:4", preset="all")
    steps = OPTIMIZERS[optimizer](model.parameters())
    handle = nofm.attach(method, model, steps)
    masks = []
    for step in range(STEPS):
        train_step(model, steps, batch(step, rank))
        masks.append(fingerprints(model))
    check_ranks(model)
    return {**compare(model, masks, method, OPTIMIZERS[optimizer]), **_fold_both(model, handle)}


def _fold_both(model: nn.Module, handle: nofm.Handle) -> dict[str, Any]:
    """Fold the spread model, and the same weights in one process."""
    state = {key: shards.whole(value.detach()).clone() for key, value in model.state_dict().items()}
    frozen = handle.state_dict()
    handle.detach()
    nofm.fold_(model)
    alone = network()
    nofm.sparsify_(alone, "2:4", preset="all")
    nofm.attach(handle.method, alone, sgd(alone.parameters()))
    alone.load_state_dict(state)
    for site in nofm.sites(alone):
        if site.key in frozen["masks"]:
            site.freeze(nofm.masks.unpack(frozen["masks"][site.key], site.weight.shape))
    nofm.fold_(alone)
    zeros = [(shards.whole(p.detach()) == 0).float().mean().item() for p in model.parameters() if p.dim() > 1]
    still_spread = all(hasattr(p, "placements") for p in model.parameters())
    plain = not any("Sparse" in type(m).__name__ for m in model.modules())
    return {"fold differs by": farthest(model, alone), "zeros": zeros, "still spread": still_spread, "plain": plain}


class HFLinear(nn.Module):
    """A linear layer that stores its weight as (inputs, outputs), as some of the transformers library do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


AXIS_0 = {
    "transposed convolution": lambda inputs: (nn.ConvTranspose2d(inputs, 8, 2), torch.randn(2, inputs, 3, 3)),
    "weight as (in, out)": lambda inputs: (HFLinear(inputs, 8), torch.randn(4, inputs)),
}


def groups_along_the_cut_axis(rank: int, kind: str, inputs: int, shard_first: bool) -> dict[str, Any]:
    """FSDP2 cuts axis 0, and groups run along it: right where parts hold whole groups, refused where not."""
    nofm.register_layer(HFLinear, weight=0)
    torch.manual_seed(0)
    layer, x = AXIS_0[kind](inputs)
    alone, model = nn.Sequential(copy.deepcopy(layer)), nn.Sequential(layer)
    nofm.sparsify_(alone, "2:4", preset="all")
    try:
        if shard_first:
            shard(model, by_layer=False)
        nofm.sparsify_(model, "2:4", preset="all")
        if not shard_first:
            shard(model, by_layer=False)
        optimizers = [sgd(m.parameters()) for m in (alone, model)]
        nofm.attach(SRSTE, alone, optimizers[0])
        handle = nofm.attach(SRSTE, model, optimizers[1])
    except nofm.LayerError as error:
        return {"refused": str(error)}
    same = []
    for _ in range(STEPS):
        for m, optimizer in zip((alone, model), optimizers, strict=True):
            train_step(m, optimizer, x)
        same.append(fingerprints(alone) == fingerprints(model))
    handle.detach()
    nofm.fold_(model)
    nofm.fold_(alone)
    return {"same masks": all(same), "fold differs by": farthest(model, alone)}


def attach_after_a_forward_without_backward(rank: int) -> dict[str, Any]:
    """FSDP2 then still shows gathered copies in place of the parameters."""
    model = network()
    nofm.sparsify_(model, "2:4", preset="all")
    shard(model, by_layer=False)
    optimizer = sgd(model.parameters())
    with torch.no_grad():
        model(batch(0, rank))
    shows_copies = not any(hasattr(site.weight, "placements") for site in nofm.sites(model))
    nofm.attach(SRSTE, model, optimizer)
    masks = []
    for step in range(STEPS):
        train_step(model, optimizer, batch(step, rank))
        with torch.no_grad():
            model(batch(step, rank))
        masks.append(fingerprints(model))
    return {**compare(model, masks, SRSTE), "shows copies": shows_copies}


def fold_after_a_forward(rank: int) -> list[float]:
    """What is written to the gathered copies would be lost."""
    model = network()
    nofm.sparsify_(model, "2:4", preset="all")
    shard(model, by_layer=False)
    with torch.no_grad():
        model(batch(0, rank))
    nofm.fold_(model)
    model.reshard()  # whatever copies are shown, it is the parameters that count
    return [float((shards.whole(p) == 0).double().mean()) for p in model.parameters() if p.dim() > 1]


def movement(rank: int, spread: bool) -> list[Any]:
    """What SAD says, asked twice, of weights that change in every step and of stored masks that keep fewer and fewer."""
    model = network()
    nofm.sparsify_(model, {"0": "1:1", "*": "2:4"}, preset="all")
    if spread:
        shard(model, by_layer=True)
    sad = nofm.SAD(model)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for site in nofm.sites(model):
            drawn = torch.rand(site.weight.shape, generator=generator)
            if site.grouping.pattern.m == 1:
                site.freeze(drawn > 0.2 * step)
            else:
                shards.local(site.weight.detach()).copy_(shards.part_of(drawn, site.weight))
        sad.record(step)
    return [(sad.flip_rate(), sad.lifetime(), dict(sad.between(0, 3))) for _ in range(2)]


def packed_by_all(rank: int) -> dict[str, Any]:
    """Every process takes part, one writes."""
    model, alone = network(), network()
    for m in (model, alone):
        nofm.sparsify_(m, "2:4", preset="all")
    shard(model, by_layer=True)
    folder = Path(tempfile.mkdtemp())
    said = nofm.save_packed(model, folder / "m.safetensors")
    nofm.fold_(alone)
    written = (folder / "m.safetensors").is_file()
    loaded = nofm.load_packed(folder / "m.safetensors") if written else {}
    same = all(torch.equal(loaded[key], value) for key, value in alone.state_dict().items()) if written else None
    return {"written": written, "same": same, "bytes": said.bytes}


def fold_of_cut_groups(rank: int) -> str:
    """Nobody has attached a method, so `fold_` is the first to look at where the groups are cut."""
    model = nn.Sequential(nn.ConvTranspose2d(12, 8, 1))
    nofm.sparsify_(model, "2:4", preset="all")
    shard(model, by_layer=False)
    try:
        nofm.fold_(model)
    except nofm.LayerError as error:
        return str(error)
    return "nothing"


def sharded_after_attach(rank: int) -> str:
    """The optimizer is left with parameters that nothing computes with."""
    model = network()
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = sgd(model.parameters())
    nofm.attach(SRSTE, model, optimizer)
    shard(model, by_layer=False)
    model(batch(0, rank)).sum().backward()
    try:
        optimizer.step()
    except nofm.OptimizerError as error:
        return str(error)
    return "nothing"


def flattened(rank: int) -> str:
    """The older FullyShardedDataParallel makes one long vector of all weights."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nofm.sparsify_(model, "2:4", preset="all")
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    try:
        nofm.attach(SRSTE, wrapped, sgd(wrapped.parameters()))
    except nofm.LayerError as error:
        return str(error)
    return "nothing"


# ---- tensor parallelism ----


def tensor_parallel(rank: int, sparsify_first: bool, method: nofm.Method, hidden: int = 16) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 8), nn.Linear(8, 8))
    alone = copy.deepcopy(model)
    nofm.sparsify_(alone, "2:4", preset="all")
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    try:
        if sparsify_first:
            nofm.sparsify_(model, "2:4", preset="all")
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        if not sparsify_first:
            nofm.sparsify_(model, "2:4", preset="all")
        model(torch.ones(4, 8))
    except nofm.LayerError as error:
        return {"refused": str(error)}
    masks = {}
    for name, each in (("alone", alone), ("spread", model)):
        optimizer = sgd(each.parameters())
        nofm.attach(method, each, optimizer)
        generator, masks[name] = torch.Generator().manual_seed(1), []
        for _ in range(STEPS):
            train_step(each, optimizer, torch.randn(4, 8, generator=generator))
            masks[name].append(fingerprints(each))
    return {"same masks": masks["alone"] == masks["spread"], "farthest weight": farthest(model, alone)}


def lambda_on_a_replicated_weight(rank: int) -> float:
    """Its gradient is a sum that has not been made yet: a term added on each rank would count twice."""
    weights = {}
    for method in (nofm.STE(), nofm.SRSTE(decay=0.25)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False, dtype=torch.float64))
        nofm.sparsify_(model, "2:4", preset="all")
        mesh = init_device_mesh("cpu", (2,))
        distribute_module(model, mesh)
        before = shards.whole(model[0].weight.detach()).clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        nofm.attach(method, model, optimizer)
        x = distribute_tensor(torch.randn(4, 8, dtype=torch.float64), mesh, [Shard(0)])
        model(x).square().sum().backward()
        assert model[0].weight.grad.placements[0].is_partial(), "this job has lost its point"
        optimizer.step()
        weights[type(method).__name__] = shards.whole(model[0].weight.detach())
    pruned = ~nofm.mask(before, "2:4")
    return ((weights["STE"] - weights["SRSTE"]) / (0.5 * 0.25 * before))[pruned].sub(1).abs().max().item()
