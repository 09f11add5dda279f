"""A run that is taken back to an earlier state, in the model and optimizer it is in, goes on from there as it did the first time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nofm

METHODS = {
    "SR-STE": ("2:4", nofm.SRSTE(decay=0.1)),
    "SR-STE, in its dense start": ("2:4", nofm.SRSTE(decay=0.1, begin_at=3)),
    "SR-STE, in its gradual start": ("2:4", nofm.SRSTE(decay=0.1, begin_at=3, ramp_at=0)),
    "SR-STE, looking for lambda": ("2:4", nofm.SRSTE(decay="auto", probe=8)),
    "ASP, before it prunes": ("2:4", nofm.ASP(prune_at=3)),
    "SNIP, before it prunes": ("1:1", nofm.SNIP(sparsity=0.5, batches=3)),
    "SNIP, while it measures": ("1:1", nofm.SNIP(sparsity=0.5, batches=9)),
    "GMP": ("1:1", nofm.GMP(sparsity=0.5, end_at=4, every=1)),
    "RigL": ("1:1", nofm.RigL(sparsity=0.5, end_at=9, every=2)),
    "SNFS": ("1:1", nofm.SNFS(sparsity=0.5, every=2)),
    "DSR": ("1:1", nofm.DSR(sparsity=0.5, every=2)),
    "DEEP R": ("1:1", nofm.DeepRewiring(sparsity=0.5)),
    "lottery, between two rounds": ("1:1", nofm.LotteryTicket(sparsity=0.5, rounds=2, every=3, rewind_to=1)),
    "STR": ("1:1", nofm.STR(initial=-4.0)),
}


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_taken_back_goes_on_as_before(name: str, at: int) -> None:
    pattern, method = METHODS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    nofm.sparsify_(model, pattern, preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = nofm.attach(method, model, optimizer)
    parts = (model, optimizer, handle)

    def losses(steps: range) -> list[float]:
        found = []
        for step in steps:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    losses(range(at))
    saved = copy.deepcopy([part.state_dict() for part in parts])
    first, known = losses(range(at, 7)), copy.deepcopy(handle.state_dict())
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(copy.deepcopy(state))
    assert losses(range(at, 7)) == first
    for what in ("masks", "memory"):
        torch.testing.assert_close(handle.state_dict()[what], known[what], rtol=0, atol=0)
