"""A loop that is resumed without its handle begins a method anew. Methods that count steps say so; others have nothing to lose."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import nofm

COUNTING = {
    "GMP": (nofm.GMP(end_at=20), "1:1"),
    "RigL": (nofm.RigL(end_at=200), "1:1"),
    "SET": (nofm.SET(), "1:1"),
    "STR": (nofm.STR(), "1:1"),
    "SNIP": (nofm.SNIP(), "1:1"),
    "LotteryTicket": (nofm.LotteryTicket(every=10), "1:1"),
    "ASP": (nofm.ASP(prune_at=10), "2:4"),
    "SRSTE, dense start": (nofm.SRSTE(2e-4, begin_at=10), "2:4"),
    "SRSTE, gradual start": (nofm.SRSTE(2e-4, begin_at=10, ramp_at=0), "2:4"),
}
OTHERS = {
    "SRSTE": (nofm.SRSTE(2e-4), "2:4"),
    "STE": (nofm.STE(), "2:4"),
    "Dense": (nofm.Dense(), "2:4"),
    "ASP at once": (nofm.ASP(), "2:4"),
    "UnstructuredSTE": (nofm.UnstructuredSTE(sparsity=0.5), "1:1"),
}


def trained(method: nofm.Method, pattern: str, *states: dict) -> list:
    """A network, its optimizer and its handle after two steps, begun from `states` where they are given; last, what was warned of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    nofm.sparsify_(model, pattern, preset="all")
    handle = nofm.attach(method, model, optimizer)
    for part, state in zip((model, optimizer, handle), states, strict=False):
        part.load_state_dict(state)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().sum().backward()
            optimizer.step()
    return [model.state_dict(), optimizer.state_dict(), handle.state_dict(), [str(w.message) for w in said if "step 0" in str(w.message)]]


@pytest.mark.parametrize(("method", "pattern"), COUNTING.values(), ids=COUNTING)
def test_a_method_that_counts_says_that_it_begins_anew(method, pattern):
    *states, fresh = trained(method, pattern)
    assert fresh == []
    (forgotten,) = trained(method, pattern, *states[:2])[-1]
    assert type(method).__name__ in forgotten
    assert "handle.load_state_dict" in forgotten
    assert trained(method, pattern, *states)[-1] == []


@pytest.mark.parametrize(("method", "pattern"), OTHERS.values(), ids=OTHERS)
def test_a_method_that_does_not_count_says_nothing(method, pattern):
    *states, _ = trained(method, pattern)
    assert trained(method, pattern, *states[:2])[-1] == []
