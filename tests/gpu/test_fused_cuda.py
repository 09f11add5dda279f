"""`attach(..., fused=True)` on a GPU: the kernels for real, scalers, CUDA graphs, half precision.

Run with `pytest -m gpu`. The same promises are checked in the default suite through Triton's interpreter, and bit for bit where a GPU
cannot: its fused multiply-adds round once where two operations round twice.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nofm
from nofm.kernels import reference
from nofm.kernels.select import use
from nofm.kernels.steps import Rule, Squad, Term
from nofm.masks import Grouping
from nofm.patterns import Pattern

pytestmark = pytest.mark.gpu

RULES = {
    "sgd": Rule(False),
    "momentum": Rule(False, momentum=True),
    "nesterov": Rule(False, momentum=True, nesterov=True),
    "adam": Rule(True),
}


def layouts(m: int, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, int]]:
    torch.manual_seed(m)

    def tied(*shape: int) -> torch.Tensor:
        w = torch.randn(*shape)
        w = torch.where(torch.rand(shape) < 0.5, (w * 2).round() / 2, w)
        w.view(-1)[::97] = -0.0
        return w.to(dtype).cuda()

    return {
        "linear": (tied(192, 8 * m), 1),
        "conv": (tied(40, 2 * m, 3, 3), 1),
        "conv channels_last": (tied(40, 2 * m, 3, 3).to(memory_format=torch.channels_last), 1),
        "transposed": (tied(8 * m, 160).t(), 1),
        "odd stride": (tied(8 * m, 37).t(), 1),
        "transposed conv": (tied(2 * m, 6, 2, 2), 0),
        "unaligned": (tied(97 * m + 1)[1:].view(97, m), 1),
    }


def take_step(rule, term, rows, ws, grads, states, groupings, **extra) -> torch.Tensor:
    squad, word = Squad(), torch.zeros((), device="cuda")
    none = [None] * len(ws)
    settings = squad.settings(rule, rows, none, none, extra.get("found_inf"), ws[0].device)
    squad.step(
        rule, term, [ws, grads, *states], groupings, settings, extra.get("grad_scale"), extra.get("found_inf"), word, layout=object()
    )
    return word


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", ["1:2", "2:4", "4:8", "1:16", "8:16", "16:32", "5:12"])
def test_masks_are_those_of_the_oracle_bit_for_bit(pattern, dtype):
    """With no gradient, lr and decay 1, a step leaves the kept weights and +0.0."""
    named = layouts(Pattern(pattern).m, dtype)
    ws, gs = [w for w, _ in named.values()], [Grouping(Pattern(pattern), axis) for _, axis in named.values()]
    masks = [reference.mask(w.cpu(), g).cuda() for w, g in zip(ws, gs, strict=True)]
    before = [w.clone() for w in ws]
    rows = [(1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)] * len(ws)
    word = take_step(Rule(False), Term(1.0, "weight", False), rows, ws, [torch.zeros_like(w) for w in ws], [], gs)
    for name, w, mask, start in zip(named, ws, masks, before, strict=True):
        assert torch.equal(w, torch.where(mask, start, 0.0)), name
    assert word == 0


@pytest.mark.parametrize("decoupled", [False, True], ids=["gradient", "decoupled"])
@pytest.mark.parametrize("refine", ["weight", "sign", "gradient"])
@pytest.mark.parametrize("name", RULES)
def test_steps_are_those_of_the_reference(name, refine, decoupled):
    rule, term = RULES[name], Term(0.3, refine, decoupled)
    named = layouts(4, torch.float32)
    ws, gs = [w for w, _ in named.values()], [Grouping(Pattern("2:4"), axis) for _, axis in named.values()]
    grads = [torch.randn_like(w) for w in ws]
    states = [[torch.rand_like(w) for w in ws] for _ in rule.states]
    own = (0.9, 0.99, 1e-8, 5.0) if rule.adam else (0.9, 0.8, 0.0, 0.0)
    rows = [(0.1 + 0.01 * i, 0.0 if rule.adam else 0.05, 0.05 if rule.adam else 0.0, 0.3, 1.0, *own) for i in range(len(ws))]
    expected = [[t[i].clone() for t in (ws, *states)] for i in range(len(ws))]
    for i, (w, *its) in enumerate(expected):
        reference.step_(rule, term, rows[i], w, grads[i].clone(), its, gs[i])
    take_step(rule, term, rows, ws, grads, states, gs)
    for i, layout in enumerate(named):
        for mine, its in zip((ws[i], *(column[i] for column in states)), expected[i], strict=True):
            torch.testing.assert_close(mine, its, rtol=2e-6, atol=1e-6, msg=lambda text: f"{layout} {text}")  # noqa: B023


def test_a_skipped_step_writes_nothing():
    named = layouts(4, torch.float32)
    ws, gs = [w for w, _ in named.values()], [Grouping(Pattern("2:4"), axis) for _, axis in named.values()]
    grads, states = [torch.full_like(w, torch.inf) for w in ws], [[torch.rand_like(w) for w in ws] for _ in range(2)]
    before = [t.clone() for column in (ws, grads, *states) for t in column]
    rows = [(0.1, 0.0, 0.1, 0.3, 1.0, 0.9, 0.99, 1e-8, 5.0)] * len(ws)
    one = torch.ones((), device="cuda")
    word = take_step(Rule(True), Term(0.3, "weight", False), rows, ws, grads, states, gs, grad_scale=2 * one, found_inf=one)
    assert all(torch.equal(t, b) for t, b in zip([t for column in (ws, grads, *states) for t in column], before, strict=True))
    assert word == 0


def net() -> nn.Module:
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 1))
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.Linear(64, 8)).cuda()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "capturable adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-3, capturable=True),
}


def prepared(name: str, fused: bool, channels_last: bool = False, placement: str = "gradient"):
    model = net()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    nofm.sparsify_(model, {"2": "2:8", "4": "1:4", "6": "2:4"})
    optimizer = OPTIMIZERS[name](model.parameters())
    return model, optimizer, nofm.attach(nofm.SRSTE(decay=0.02, placement=placement), model, optimizer, fused=fused)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(step)
    return torch.randn(16, 3, 8, 8, device="cuda", generator=generator), torch.randint(8, (16,), device="cuda", generator=generator)


def train(model, optimizer, steps: range) -> None:
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def assert_alike(a, b) -> None:
    for (name, p), q in zip(a[0].named_parameters(), b[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-4, msg=lambda text: f"{name} {text}")  # noqa: B023
    mine, other = a[1].state_dict(), b[1].state_dict()
    assert mine["param_groups"] == other["param_groups"]
    torch.testing.assert_close(mine["state"], other["state"], rtol=1e-3, atol=1e-4)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("placement", ["gradient", "decoupled"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_two_passes(name, channels_last, placement):
    fused, usual = (prepared(name, fused, channels_last, placement) for fused in (True, False))
    for run in (fused, usual):
        train(run[0], run[1], range(5))
    assert not fused[2].unfused
    assert_alike(fused, usual)


@pytest.mark.parametrize("eager", [0, 2], ids=["from the start", "later"])
@pytest.mark.parametrize("name", ["sgd", "adamw", "capturable adam"])
def test_a_compiled_step_takes_two_passes(name, eager):
    torch._dynamo.reset()
    fused, usual = (prepared(name, fused) for fused in (True, False))
    compiled = torch.compile(fused[1].step)
    for step in range(6):
        for model, optimizer, handle in (fused, usual):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            compiled() if handle is fused[2] and step >= eager else optimizer.step()
        assert bool(fused[2].unfused) == (step >= eager)
    assert set(fused[2].unfused.values()) == {"optimizer.step is compiled"}
    for p, q in zip(fused[0].parameters(), usual[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["fused sgd", "fused adamw"])
def test_state_moves_both_ways(name):
    whole, first = prepared(name, True), prepared(name, True)
    train(whole[0], whole[1], range(4))
    train(first[0], first[1], range(2))
    for steps, fused in ((range(2, 3), False), (range(3, 4), True)):
        then = prepared(name, fused)
        then[0].load_state_dict(first[0].state_dict())
        then[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
        train(then[0], then[1], steps)
        first = then
    assert_alike(first, whole)


@pytest.mark.parametrize("name", ["sgd", "fused sgd", "fused adamw"])
def test_a_scaler_skips_and_unscales(name):
    runs = []
    for fused in (True, False):
        model, optimizer, handle = run = prepared(name, fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for step in range(5):
            x, y = batch(step)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            before = model[2].weight.detach().clone()
            if step == 2:
                model[7].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model[2].weight) == (step == 2)
        assert handle.step == 4
        runs.append(run)
    for (key, p), q in zip(runs[0][0].named_parameters(), runs[1][0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3, msg=lambda text: f"{key} {text}")  # noqa: B023


@pytest.mark.parametrize("name", ["fused sgd", "capturable adam"])
def test_a_captured_step_reads_the_learning_rate_at_every_replay(name):
    rates = (0.05, 0.02, 0.0, 0.1, 0.01)
    captured, eager = prepared(name, True), prepared(name, True)
    for run in (captured, eager):
        train(run[0], run[1], range(3))
    x, y = batch(99)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    model, optimizer, handle = captured
    lr = torch.full((), 0.05, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(model, optimizer)
        step(*eager[:2])
    torch.cuda.current_stream().wait_stream(stream)
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.cuda.graph(graph):
        step(model, optimizer)
    for rate in rates:
        lr.fill_(0.1 * rate if "adam" in name else rate)
        graph.replay()
        handle.replayed()
        for group in eager[1].param_groups:
            group["lr"] = 0.1 * rate if "adam" in name else rate
        step(*eager[:2])
    for p, q in zip(model.parameters(), eager[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert handle.step == eager[2].step + 1, "the captured step counts by replays; capturing ran its hooks once"


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
def test_a_weight_that_is_not_finite_is_named(graphed):
    layer = nn.Linear(64, 64, bias=False).cuda()
    nofm.sparsify_(layer, "2:4", preset="all")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.9, fused=True)
    handle = nofm.attach(nofm.SRSTE(decay=1e-3), layer, optimizer, fused=True)
    layer.weight.grad = torch.zeros_like(layer.weight)
    for _ in range(3):
        optimizer.step()
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            optimizer.step()

    def steps() -> None:
        for step in range(100):
            if step == 50:
                layer.weight.grad[1, 2] = torch.inf
            if graphed:
                graph.replay()
                handle.replayed()
            else:
                optimizer.step()
            torch.cuda.synchronize()

    with pytest.raises(nofm.NonFiniteWeightError, match=r"weight\[1, 2\] is -inf after step 5[45]"):
        steps()


def test_a_masked_weight_takes_the_place_of_the_cast():
    """One pass over the weight makes what the layer computes with: no copy of the dense weight comes before it,
    where the weight is large enough for that to pay."""
    layer = nn.Sequential(nn.Linear(2048, 2048, bias=False)).cuda()
    nofm.sparsify_(layer, "2:4", preset="all")
    x = torch.randn(8, 2048, device="cuda")

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layer(x)

    with use("torch"):
        expected = forward()
    out = forward()
    assert torch.equal(out, expected)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward()
        torch.cuda.synchronize()
    kernels = [
        event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA and "emcpy" not in event.name
    ]
    assert sum("masked_kernel" in name for name in kernels) == 1, kernels
    assert sum("copy" in name for name in kernels) == 1, kernels  # of x, by autocast
    out.float().sum().backward()
    torch.testing.assert_close(layer[0].weight.grad, x.bfloat16().float().sum(0).expand(2048, 2048), rtol=2e-2, atol=2e-2)
