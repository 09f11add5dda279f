"""What each of two processes does in `test_pruning_ranks`: train by a method on its half of every batch, and tell what came out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nofm
from nofm.deploy import folded_weights

STEPS = 20
METHODS: dict[str, tuple[str, nofm.Method]] = {
    "gmp": ("1:1", nofm.GMP(sparsity=0.75, begin_at=2, end_at=12, every=3)),
    "gmp global": ("1:1", nofm.GMP(sparsity=0.75, begin_at=2, end_at=12, every=3, allocation="global")),
    "snip": ("1:1", nofm.SNIP(sparsity=0.75, batches=2)),
    "lottery": ("1:1", nofm.LotteryTicket(sparsity=0.75, rounds=2, every=6, rewind_to=2)),
    "ste global": ("1:1", nofm.UnstructuredSTE(sparsity=0.75, allocation="global")),
    "str": ("1:1", nofm.STR(initial=-3.0)),
    "srste auto": ("2:4", nofm.SRSTE(decay="auto", probe=12)),
}


def network(pattern: str) -> nn.Module:
    """Nine outputs at the end: two processes hold five and four of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 9)).double()
    nofm.sparsify_(model, pattern, preset="all")
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + rank), dtype=torch.float64)


def trained(name: str, how: str, rank: int) -> dict[str, Tensor]:
    """The weights that layers compute with in the end. `how`: ddp, fsdp, or alone, which sees both halves."""
    pattern, method = METHODS[name]
    model = network(pattern)
    if how == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    called = DistributedDataParallel(model) if how == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    nofm.attach(method, model, optimizer)
    for step in range(STEPS):
        x = torch.cat([batch(step, 0), batch(step, 1)]) if how == "alone" else batch(step, rank)
        optimizer.zero_grad()
        (called(x) - x[:, :9]).square().mean().backward()
        optimizer.step()
    return folded_weights(model)


def compared(rank: int, name: str) -> dict[str, dict[str, Tensor]]:
    return {how: trained(name, how, rank) for how in ("alone", "ddp", "fsdp")}
