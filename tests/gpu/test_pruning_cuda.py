"""Methods that prune by rank or by a threshold, on a GPU: a steady step never makes the host wait, and can be captured and replayed.

pytest -m gpu tests/gpu/test_pruning_cuda.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import nofm

pytestmark = pytest.mark.gpu

METHODS = {
    "gmp": ("1:1", nofm.GMP(sparsity=0.75, end_at=4, every=2)),
    "snip": ("1:1", nofm.SNIP(sparsity=0.75)),
    "lottery": ("1:1", nofm.LotteryTicket(sparsity=0.75, rounds=1, every=4)),
    "ste": ("1:1", nofm.UnstructuredSTE(sparsity=0.75)),
    "ste global": ("1:1", nofm.UnstructuredSTE(sparsity=0.75, allocation="global")),
    "dnw": ("1:1", nofm.DNW(sparsity=0.75)),
    "str": ("1:1", nofm.STR(initial=-3.0)),
    "srste auto": ("2:4", nofm.SRSTE(decay="auto", probe=8)),
}
WARM = 10  # steps after which no method has a special one left


def setting(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    pattern, method = METHODS[name]
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32)).cuda()
    nofm.sparsify_(model, pattern, preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    nofm.attach(method, model, optimizer)
    x = torch.randn(16, 64, device="cuda")
    for _ in range(WARM):
        step(model, optimizer, x)
    assert method.phase(WARM + 1) is not None
    return model, optimizer, x


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    (model(x) - x[:, :32]).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", METHODS)
def test_a_steady_step_does_not_wait(name):
    model, optimizer, x = setting(name)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", METHODS)
def test_replayed_steps_are_the_steps(name):
    model, optimizer, x = setting(name)
    twin, twins_optimizer, _ = setting(name)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step(model, optimizer, x)
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    for _ in range(5):
        graph.replay()
    for _ in range(3 + 5):  # capturing itself moves nothing
        step(twin, twins_optimizer, x)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(nofm.sites(model), nofm.sites(twin), strict=True):
        assert torch.equal(ours.mask(), theirs.mask())
