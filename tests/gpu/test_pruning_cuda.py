"""Methods that prune by rank or by a threshold, on a GPU: a steady step never makes the host wait, and can be captured and replayed.

pytest -m gpu tests/gpu/test_pruning_cuda.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import nofm
from nofm.kernels.select import use
from nofm.methods.pruning import strongest

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


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("inside", [False, True], ids=["everywhere", "inside masks"])
def test_the_strongest_by_triton_are_the_strongest_by_torch(share, inside):
    torch.manual_seed(0)
    shapes = [(64, 3, 3, 3), (512, 512, 3, 3), (10, 512), (1, 17)]
    weights = [torch.randn(shape, device="cuda") for shape in shapes]
    weights[1] = weights[1].to(memory_format=torch.channels_last)
    weights[2] = weights[2].mul(4).round()
    among = [torch.rand(w.shape, device="cuda") < 0.7 for w in weights] if inside else None
    sizes = [w.numel() for w in weights]
    for budget in ([round(share * size) for size in sizes], [round(share * sum(sizes))]):
        with use("torch"):
            expected = strongest(weights, budget, among)
        assert all(torch.equal(a, b) for a, b in zip(strongest(weights, budget, among), expected, strict=True))
    graph, budget = torch.cuda.CUDAGraph(), [round(share * size) for size in sizes]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = strongest(weights, budget, among)
    for _ in range(3):
        for weight in weights:
            weight.mul_(torch.randn_like(weight))
        graph.replay()
        with use("torch"):
            expected = strongest(weights, budget, among)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
