"""Methods that rewire, on a GPU: steps that the device can do alone never wait for it, and give the same bits captured in a graph.

Run with `pytest -m gpu tests/gpu/test_rewiring_cuda.py` on a machine with a CUDA device.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nofm
from nofm.methods.draws import draw

pytestmark = pytest.mark.gpu

METHODS = {
    "set": nofm.SET(sparsity=0.8, every=8),
    "rigl": nofm.RigL(sparsity=0.8, every=8, end_at=100),
    "snfs": nofm.SNFS(sparsity=0.8, every=8),
    "dsr": nofm.DSR(sparsity=0.8, every=8),
    "deepr": nofm.DeepRewiring(sparsity=0.8, l1=1e-2, temperature=1e-4),  # rewires inside the graph
}


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32)).cuda()
    nofm.sparsify_(model, "1:1", preset="all")
    return model


def backward(model: nn.Module, x: torch.Tensor) -> None:
    (model(x) - x[:, :32]).square().mean().backward()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_steady_steps_do_not_wait_and_can_be_captured(method):
    eager, captured = network(), network()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True) for m in (eager, captured)]
    handles = [nofm.attach(method, m, o) for m, o in zip((eager, captured), optimizers, strict=True)]
    x = torch.randn(16, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # gradients and momentum get their memory; step 1 is steady
        for model, optimizer in zip((eager, captured), optimizers, strict=True):
            backward(model, x)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(captured, x)
        optimizers[1].step()
        optimizers[1].zero_grad(set_to_none=False)
    handles[1]._drivers[0].number = 1  # capturing computes nothing
    for number in range(2, 21):
        if method.phase(number) is None:
            for model, optimizer in zip((eager, captured), optimizers, strict=True):
                backward(model, x)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            continue
        backward(eager, x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizers[0].step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizers[0].zero_grad(set_to_none=False)
        graph.replay()
        handles[1].replayed()
    assert [handle.step for handle in handles] == [20, 20]
    for a, b in zip(nofm.sites(eager), nofm.sites(captured), strict=True):
        assert torch.equal(a.stored_mask, b.stored_mask)
        assert torch.equal(a.weight, b.weight)


@pytest.mark.parametrize("number", [0, 1, 123_456_789])
def test_a_gpu_draws_what_a_cpu_draws(number):
    shape = torch.Size([1000, 999])
    on_cpu, on_gpu = (draw(5, "layer.weight", torch.tensor(number, device=device), shape) for device in ("cpu", "cuda"))
    assert torch.equal(on_cpu.normal, on_gpu.normal.cpu())
    assert torch.equal(on_cpu.uniform, on_gpu.uniform.cpu())


def test_replays_draw_anew():
    number, seen = torch.zeros((), dtype=torch.int64, device="cuda"), []
    draw(0, "layer.weight", number, torch.Size([64]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        number.add_(1)
        drawn = draw(0, "layer.weight", number, torch.Size([64]))
    for _ in range(3):
        graph.replay()
        seen.append(drawn.normal.clone())
    for at, normal in enumerate(seen, start=1):
        assert torch.equal(normal.cpu(), draw(0, "layer.weight", torch.tensor(at), torch.Size([64])).normal)
