"""Measures the lambda of the sparse-refined term from what the optimizer did with it, in one cell of many.

Two runs of one step from the same weights on the same data, one by STE and one by SR-STE, differ in the term alone. It is read
where the optimizer keeps it: in the momentum buffer of SGD, in the first moment of AdamW, or for the decoupled placement in the
weights. Everything is float64, so that a small lambda is not lost in the rounding of the gradient.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import nofm

DECAY = 2e-4
LR = {"sgd": 0.1, "adamw": 1e-3}


@dataclass(frozen=True)
class Cell:
    """One way to make a step."""

    optimizer: str = "sgd"
    fused: bool = False
    micro_batches: int = 1
    scale: float | None = None  # of the GradScaler; None: no scaler
    uses: int = 1  # of the weight, in one forward
    placement: str = "gradient"
    refine: str = "weight"
    sums_over_ranks: bool = False  # all-reduce by hand, summing, instead of DDP, which averages

    def __str__(self) -> str:
        return (
            f"{self.optimizer}{' fused' if self.fused else ''}, {self.micro_batches} micro, scale {self.scale}, {self.uses} uses, "
            f"{self.placement}, {self.refine}{', summed' if self.sums_over_ranks else ''}"
        )


def exact_cells() -> list[Cell]:
    """All combinations in which lambda has to be the one that was asked for."""
    axes = itertools.product(("sgd", "adamw"), (False, True), (1, 2, 8), (None, 1.0, 2.0**16), (1, 2), ("gradient", "decoupled"))
    cells = [Cell(*values) for values in axes]
    return [*cells, Cell(sums_over_ranks=True), Cell(sums_over_ranks=True, placement="decoupled")]


class Repeated(nn.Module):
    """A layer that one forward uses several times, as RAFT does with its update block."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses = uses
        self.layer = nn.Linear(16, 16, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = torch.tanh(self.layer(x))
        return x


def measure(cell: Cell, rank: int = 0) -> float:
    """Effective lambda / lambda, the one of the pruned weights that is farthest from 1. Kept weights must not see the term at all."""
    torch.manual_seed(0)
    model = Repeated(cell.uses)
    nofm.sparsify_(model, "2:4", preset="all")
    weight = model.layer.weight.detach().clone()
    pruned = ~nofm.mask(weight, "2:4")

    straight = _term_and_gradient(cell, model, nofm.STE(), rank)
    refined = _term_and_gradient(cell, model, nofm.SRSTE(DECAY, cell.refine, cell.placement), rank)
    term = refined - straight
    assert not term[~pruned].any(), "the term reached a kept weight"
    ratios = (term / DECAY / {"weight": weight, "sign": weight.sign()}[cell.refine])[pruned]
    return ratios[(ratios - 1).abs().argmax()].item()


def _term_and_gradient(cell: Cell, model: nn.Module, method: nofm.Method, rank: int) -> Tensor:
    """The gradient as the optimizer took it, or, for a term that goes past it, minus the change of the weight over lr."""
    model = copy.deepcopy(model)
    weight, lr = model.layer.weight, LR[cell.optimizer]
    before = weight.detach().clone()
    if cell.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01, fused=cell.fused)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=cell.fused)
    handle = nofm.attach(method, model, optimizer)
    _one_step(cell, model, optimizer, rank)
    assert handle.step == 1
    if cell.placement == "decoupled":
        return (before - weight.detach()) / lr
    state = optimizer.state[weight]
    return state["momentum_buffer"] if cell.optimizer == "sgd" else state["exp_avg"] / (1 - 0.9)


def _one_step(cell: Cell, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    parallel = distributed.is_initialized() and not cell.sums_over_ranks
    network = DistributedDataParallel(model) if parallel else model
    scaler = None if cell.scale is None else torch.amp.GradScaler("cpu", init_scale=cell.scale)
    generator = torch.Generator().manual_seed(rank)
    for i in range(cell.micro_batches):
        last = i == cell.micro_batches - 1
        with network.no_sync() if parallel and not last else contextlib.nullcontext():
            loss = network(torch.randn(4, 16, generator=generator, dtype=torch.float64)).square().mean() / cell.micro_batches
            (loss if scaler is None else scaler.scale(loss)).backward()
    if cell.sums_over_ranks:
        distributed.all_reduce(model.layer.weight.grad)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def measure_all(cells: list[Cell], rank: int) -> dict[Cell, float]:
    return {cell: measure(cell, rank) for cell in cells}
