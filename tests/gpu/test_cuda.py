"""What only a GPU can show: the Triton kernels for real, one launch for a whole model, fused optimizers under a scaler, compiled steps.

Run with `pytest -m gpu` on a machine with a CUDA device. The same kernels run in the default suite through Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nofm
from nofm.kernels import ops, reference, ways
from nofm.kernels.multi import Fleet
from nofm.kernels.select import explain, use
from nofm.kernels.ways import Way
from nofm.masks import Grouping, unpack
from nofm.patterns import Pattern

pytestmark = pytest.mark.gpu

PATTERNS = ("1:2", "2:4", "1:4", "4:8", "2:8", "1:16", "8:16", "16:32", "5:12")


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every layout that the kernels walk, and one that they do not; a third of all groups tied, zeros and denormals among them."""
    torch.manual_seed(0)

    def tied(*shape: int) -> torch.Tensor:
        w = torch.randn(*shape)
        w = torch.where(torch.rand(shape) < 0.5, (w * 2).round() / 2, w)
        w.view(-1)[::97] = -0.0
        w.view(-1)[1::89] = 1e-40
        return w.to(dtype).cuda()

    return {
        "linear": tied(192, 384),
        "conv": tied(32, 96, 3, 3),
        "conv channels_last": tied(32, 96, 3, 3).to(memory_format=torch.channels_last),
        "conv 1x1": tied(64, 192, 1, 1),
        "transposed": tied(384, 160).t(),
        "odd stride": tied(96, 37).t().contiguous().t(),
        "unaligned": tied(97 * 96 + 1)[1:].view(97, 96),
        "unaligned, transposed": tied(96 * 96 + 1)[1:].view(96, 96).t(),
        "gaps": tied(64, 192)[:, ::2],
    }


# A case compiles some forty kernels, which takes about ten seconds: all patterns in one type, two in the others.
ORACLE = [*((p, torch.float32) for p in PATTERNS), *((p, d) for p in ("2:4", "8:16") for d in (torch.bfloat16, torch.float16))]


@pytest.mark.parametrize(("pattern", "dtype"), ORACLE, ids=str)
def test_masks_are_those_of_the_oracle_bit_for_bit(pattern, dtype):
    for name, w in weights(dtype).items():
        grouping = Grouping(Pattern(pattern), 1)
        if w.shape[1] % grouping.pattern.m:
            continue
        expected = reference.mask(w.cpu(), grouping).cuda()
        assert torch.equal(ops.mask(w, grouping), expected), name
        assert torch.equal(grouping.mask(w), expected), name
        out = torch.bfloat16 if dtype == torch.float32 else dtype
        seen = ops.masked(w, grouping, out)
        assert seen.dtype == out
        assert torch.equal(seen, torch.where(expected, w, 0.0).to(out)), name
        assert not torch.signbit(seen[~expected]).any(), "pruned weights are +0.0"


IN_ORDER = (
    ("1:2", Way("exchange", 2048, 4)),
    ("1:2", Way("blocks", 128, row=36)),
    ("2:4", Way("exchange", 2048)),
    ("2:4", Way("blocks", 128, row=72)),
    ("4:8", Way("exchange", 1024, 4)),
    ("4:8", Way("blocks", 128, row=72)),
    ("8:16", Way("exchange", 2048, 4)),
    ("8:16", Way("walk", 512)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("pattern", "way"), IN_ORDER, ids=[f"{p}-{w.kind}-{w.size}" for p, w in IN_ORDER])
def test_ways_to_strided_groups_are_the_oracle_bit_for_bit(pattern, way, dtype, monkeypatch):
    grouping, m = Grouping(Pattern(pattern)), Pattern(pattern).m
    monkeypatch.setitem(ways.IN_ORDER, (9, m), way)
    torch.manual_seed(m)
    shapes = ((64, 8 * m), (8, m), (3, m), (37, 4 * m))  # the third has too few weights to be read eight at a time, for small M
    ws = [(torch.randn(o, i, 3, 3) * 4).round().div(4).to(dtype).cuda() for o, i in shapes]
    ws.append(torch.randn(8 * m * 9 + 1, dtype=torch.float32).to(dtype).cuda()[1:].view(8, m, 3, 3))  # does not begin on 16 bytes
    gs, masks = [grouping] * len(ws), [reference.mask(w.cpu(), grouping).cuda() for w in ws]
    fleet, outs = Fleet(), [torch.full_like(w, 7, dtype=torch.bfloat16) for w in ws]
    fleet.masked_into(ws, gs, outs)
    assert way.kind in {launch.way.kind for launches in fleet._ready_made.values() for launch in launches}
    grads, factors, one = [torch.zeros_like(w) for w in ws], torch.ones(len(ws), device="cuda"), torch.ones(1, device="cuda")
    Fleet().refine_into(ws, gs, grads, factors, one, sign=False)
    for w, mask, out, grad in zip(ws, masks, outs, grads, strict=True):
        assert torch.equal(ops.mask(w, grouping), mask)
        assert torch.equal(out, torch.where(mask, w, 0.0).bfloat16())
        assert not torch.signbit(out[~mask]).any()
        assert torch.equal(grad, torch.where(mask, 0.0, w))


def test_a_compiled_convolution_by_exchange_has_the_masks_of_eager(monkeypatch):
    monkeypatch.setitem(ways.IN_ORDER, (9, 8), Way("exchange", 2048, 4))
    conv = nn.Conv2d(64, 64, 3, bias=False).cuda()
    nofm.sparsify_(conv, "2:8", preset="all")
    torch._dynamo.reset()
    seen = torch.compile(lambda w: torch.ops.nofm.masked(w, 2, 8, 9, torch.bfloat16), fullgraph=True)(conv.weight)
    expected = torch.where(reference.mask(conv.weight.detach().cpu(), Grouping(Pattern("2:8"))).cuda(), conv.weight, 0.0).bfloat16()
    assert torch.equal(seen, expected)


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.ConvTranspose2d(32, 16, 2)]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(400, 64), nn.Linear(64, 8)).cuda()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_whole_model_in_one_launch_equals_its_layers_one_by_one(autocast, channels_last):
    model = small_net()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    nofm.sparsify_(model, {"2": "2:8", "4": "1:4", "6": "2:4"})
    assert explain(nofm.sites(model)).count("triton") == 3
    in_bulk: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        for site in nofm.sites(model):
            in_bulk[site.name] = site.module.__dict__["_nofm_made"][2]
            assert site.module.weight is site.weight, "a hook sees the dense weight"

    model[0].register_forward_hook(look)
    x = torch.randn(4, 3, 8, 8, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        model(x)
    for site in nofm.sites(model):
        expected = torch.where(reference.mask(site.weight.cpu(), site.grouping).cuda(), site.weight, 0.0)
        assert torch.equal(in_bulk[site.name], expected.to(torch.bfloat16 if autocast else torch.float32))
        assert in_bulk[site.name].stride() == site.weight.stride()
        assert "_nofm_made" not in site.module.__dict__, "and are gone after the forward"


@pytest.mark.parametrize("start", [{}, {"ramp_at": 0, "begin_at": 4}], ids=["at once", "gradual start"])
def test_training_by_kernels_equals_training_by_plain_torch(start):
    results = []
    for path in ("triton", "torch"):
        model = small_net().double().float()
        nofm.sparsify_(model, "2:4", preset="all", skip="0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        nofm.attach(nofm.SRSTE(decay=1e-2, **start), model, optimizer)
        torch.manual_seed(1)
        with use(path):
            for _ in range(5):
                optimizer.zero_grad()
                F.cross_entropy(model(torch.randn(8, 3, 8, 8, device="cuda")), torch.randint(8, (8,), device="cuda")).backward()
                optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("placement", ["gradient", "decoupled"])
def test_lambda_is_exact_under_a_scaler(fused, scale, placement):
    def weights_after(decay: float) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(64, 64, bias=False).cuda()
        start = layer.weight.detach().clone()
        nofm.sparsify_(layer, "2:4")
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, fused=fused)
        nofm.attach(nofm.SRSTE(decay=decay, placement=placement), layer, optimizer)
        scaler = torch.amp.GradScaler("cuda", init_scale=scale)
        scaler.scale((layer(torch.zeros(4, 64, device="cuda"))).sum()).backward()  # no gradient but the term
        scaler.step(optimizer)
        return start, layer.weight.detach()

    start, after = weights_after(0.25)
    pruned = ~nofm.mask(start, "2:4")
    torch.testing.assert_close((start - after)[pruned], 0.25 * start[pruned], rtol=1e-6, atol=0)
    assert torch.equal(start[~pruned], after[~pruned])


def test_sad_of_a_model_that_moves_between_two_records():
    model = small_net().cpu()
    nofm.sparsify_(model, "2:4")
    moved, stays = nofm.SAD(model), nofm.SAD(model, device="cpu")
    for step, device in enumerate(("cpu", "cuda", "cpu")):
        model.to(device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        moved.record(step)
        stays.record(step)
    assert moved.between(0, 1) == stays.between(0, 1)
    assert moved.between(1, 2) == stays.between(1, 2)
    assert moved.between(0, 1).total > 0


def test_sad_is_counted_on_the_device():
    model = small_net()
    nofm.sparsify_(model, {"2": "2:8", "4": "1:4", "6": "2:4"})
    sad, on_host = nofm.SAD(model), nofm.SAD(model, device="cpu")
    masks = {}
    for step in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * torch.randn_like(p))
        if step == 2:  # another order of bits in the middle of the record
            model.to(memory_format=torch.channels_last)
        sad.record(step)
        on_host.record(step)
        masks[step] = {site.name: reference.mask(site.weight.cpu(), site.grouping) for site in nofm.sites(model)}
    for i, j in ((0, 1), (1, 2), (0, 2)):
        expected = {name: int((masks[i][name] != masks[j][name]).sum()) for name in masks[i]}
        assert sad.between(i, j) == expected == on_host.between(i, j)
    assert sad.flip_rate() == on_host.flip_rate()
    for name, packed in sad.packed(2).items():
        assert torch.equal(unpack(packed.cpu(), masks[2][name].shape), masks[2][name])


def test_compiled_steps_have_no_graph_break_one_compilation_and_the_same_masks():
    model = small_net()
    nofm.sparsify_(model, "2:4", preset="all", skip="0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    nofm.attach(nofm.SRSTE(decay=1e-2), model, optimizer)
    torch._dynamo.reset()
    compilations = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=compilations, fullgraph=True)
    x, y = torch.randn(8, 3, 8, 8, device="cuda"), torch.randint(8, (8,), device="cuda")
    for step in range(200):
        optimizer.zero_grad()
        F.cross_entropy(compiled(x), y).backward()
        optimizer.step()
        if step % 50 == 0:
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-2, atol=1e-2)  # other convolution kernels
    assert compilations.frame_count <= 3, "training, and once more without gradients"
    targets = [str(node.target) for node in compilations.graphs[0].graph.nodes]
    assert sum("nofm.masked" in target for target in targets) == len(list(nofm.sites(model))), "each layer by our kernel"


def test_forward_derivatives_in_compiled_code_go_straight_through():
    """As without a compiler; `nofm::masked` itself has none, so compiled code does without it there, and has it beside that."""
    model = nn.Sequential(nn.Linear(32, 16, bias=False)).cuda()
    nofm.sparsify_(model, "2:8", preset="all")
    x, weight, direction = (torch.randn(shape, device="cuda") for shape in ((4, 32), (16, 32), (16, 32)))
    torch._dynamo.reset()
    compilations = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def outputs(own: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"0.weight": own}, (x,))

    def both(own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *torch.func.jvp(outputs, (own,), (direction,)), outputs(own)

    out, tangent, again = torch.compile(both, backend=compilations, fullgraph=True)(weight)
    torch.testing.assert_close(tangent, x @ direction.T)
    torch.testing.assert_close(out, outputs(weight))
    torch.testing.assert_close(again, outputs(weight))
    targets = [str(node.target) for node in compilations.graphs[0].graph.nodes]
    assert sum("nofm.masked" in target for target in targets) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("waits", [True, False], ids=["in step", "host ahead"])
def test_a_non_finite_weight_is_named_soon_after(dtype, waits):
    layer = nn.Linear(64, 64, bias=False).to("cuda", dtype)
    nofm.sparsify_(layer, "2:4")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    nofm.attach(nofm.STE(), layer, optimizer)

    def steps() -> None:
        for step in range(300):  # more than can be on their way at once
            layer(torch.ones(1, 64, device="cuda", dtype=dtype)).float().sum().backward()
            if step == 200:
                layer.weight.grad[1, 2] = torch.inf
            if waits or step == 299:
                torch.cuda.synchronize()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.step()  # without gradients: what has not arrived by now does so here

    with pytest.raises(nofm.NonFiniteWeightError, match=r"weight\[1, 2\] is -inf after step 201"):
        steps()


def test_a_whole_step_in_a_cuda_graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    nofm.sparsify_(model, "2:4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    nofm.attach(nofm.SRSTE(decay=1e-2), model, optimizer)
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(8, (32,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    start = [p.detach().clone() for p in model.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    for _ in range(10):
        graph.replay()
    replayed = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, before, momentum in zip(model.parameters(), start, momenta, strict=True):
            p.copy_(before)
            optimizer.state[p]["momentum_buffer"].copy_(momentum)
    for _ in range(10):
        step()
    for p, expected in zip(model.parameters(), replayed, strict=True):
        torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spread", [False, True], ids=["on one device", "over all devices"])
def test_a_model_is_masked_where_it_lies(spread):
    """Whatever the current device is: with one GPU this is the usual case, with more of them layers lie elsewhere."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in devices), nn.Linear(64, 64, bias=False))
    nofm.sparsify_(model, "2:4", preset="all")
    expected = [nofm.mask(layer.weight, "2:4") for layer in model]
    for i, layer in enumerate(model):
        layer.to(devices[i % len(devices)] if spread else devices[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    nofm.attach(nofm.SRSTE(decay=0.5), model, optimizer)
    sad = nofm.SAD(model)
    for layer, mask in zip(model, expected, strict=True):
        x = torch.eye(64, device=layer.weight.device)
        seen = layer(x).t()
        assert torch.equal(seen != 0, mask.to(seen.device))
        seen.sum().backward()
        layer.weight.grad.zero_()
    sad.record(0)
    optimizer.step()
    for layer, mask in zip(model, expected, strict=True):
        pruned = ~mask.to(layer.weight.device)
        assert torch.equal(layer.weight.grad, torch.where(pruned, 0.5 * layer.weight, 0.0))
    for packed, mask in zip(sad.packed(0).values(), expected, strict=True):
        assert torch.equal(unpack(packed.cpu(), mask.shape), mask)
