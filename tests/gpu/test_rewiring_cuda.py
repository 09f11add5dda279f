"""Methods that rewire, on a GPU: steps that the device can do alone never wait for it, and give the same bits captured in a graph.

Run with `pytest -m gpu tests/gpu/test_rewiring_cuda.py` on a machine with a CUDA device.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nofm
from nofm.kernels import selection
from nofm.kernels.select import use
from nofm.methods.draws import draw
from nofm.methods.rewiring import best

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


def scores() -> list[torch.Tensor]:
    """Random, tied, all equal, special, channels_last; sizes that are whole blocks and not, and one that gives a program several blocks."""
    torch.manual_seed(0)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, -1.0, 0.0, -0.0, 1e-40], device="cuda")
    return [
        torch.rand(512, 513, device="cuda"),
        (torch.randn(64, 64, 3, 3, device="cuda") * 8).round().to(memory_format=torch.channels_last),
        torch.full((5000,), 0.25, device="cuda"),
        special.repeat(1001),
        torch.rand(4096, device="cuda"),
        torch.rand(5_000_001, device="cuda").mul_(1 << 12).floor_(),
        torch.rand(7, device="cuda")[1:],
        torch.rand(0, device="cuda"),
    ]


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("wide", [False, True], ids=["any size", "sizes that divide by 16"])
def test_the_best_by_triton_are_the_best_by_torch(share, wide):
    given = [s for s in scores() if not wide or s.numel() % 16 == 0]
    among = [torch.rand(s.shape, device="cuda") < 0.8 for s in given]
    counts = [(share * mask.sum()).long() for mask in among]
    with use("torch"):
        expected = [best(*each) for each in zip(given, among, counts, strict=True)]
    for _ in range(5):  # programs come in another order every time
        for found, mask in zip(selection.largest(given, counts, among), expected, strict=True):
            assert torch.equal(found, mask)
    for each, mask in zip(zip(given, among, map(int, counts), strict=True), expected, strict=True):
        assert torch.equal(best(*each), mask)


def test_replays_choose_by_the_count_that_is_on_the_device_then():
    given = scores()
    among = [torch.rand(s.shape, device="cuda") < 0.8 for s in given]
    counts = [torch.tensor(1, device="cuda") for _ in given]
    selection.largest(given, counts, among)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = selection.largest(given, counts, among)
    for share in (0.0, 0.1, 0.7, 1.0, 0.01):
        for s, count in zip(given, counts, strict=True):
            count.fill_(int(share * s.numel()))
        given[0].copy_(torch.rand_like(given[0]))
        graph.replay()
        with use("torch"):
            expected = [best(*each) for each in zip(given, among, counts, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), share


@pytest.mark.parametrize("number", [0, 3, 123_456_789])
def test_triton_draws_what_torch_draws(number):
    at = torch.tensor(number, device="cuda")
    for shape in (torch.Size([1000, 999]), torch.Size([64, 64, 3, 3]), torch.Size([1]), torch.Size([0])):
        with use("torch"):
            expected = draw(1, "a", at, shape)
        found = draw(1, "a", at, shape)
        assert torch.equal(found.normal, expected.normal)
        assert torch.equal(found.uniform, expected.uniform)
