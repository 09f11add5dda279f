"""The Triton kernels against the oracle, through Triton's interpreter. A process of its own, started by test_k9_kernels.py with
TRITON_INTERPRET=1, which has to be set before Triton is imported. Prints one line for each thing that was compared.

The interpreter rounds fp32 to bf16 towards zero, a real GPU to nearest; so weights here have few enough digits to be exact in bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp

import nofm
from nofm import bulk
from nofm.kernels import layout, multi, ops, reference, triton_masks, ways
from nofm.kernels.lookout import Lookout
from nofm.kernels.select import explain, use
from nofm.kernels.ways import Way
from nofm.masks import Grouping, unpack
from nofm.patterns import Pattern

PATTERNS = ("1:2", "2:4", "1:4", "3:4", "4:8", "2:8", "1:16", "8:16", "16:32", "5:12", "4:4")


def weights() -> dict[str, tuple[torch.Tensor, int]]:
    torch.manual_seed(0)

    def exact(*shape: int) -> torch.Tensor:  # ties in most groups, zeros of both signs
        w = (torch.randn(shape) * 8).round() / 8
        w.view(-1)[::7] = -0.0
        return w

    return {
        "linear": (exact(6, 96), 1),
        "conv": (exact(4, 96, 3, 3), 1),
        "conv channels_last": (exact(4, 96, 3, 3).to(memory_format=torch.channels_last), 1),
        "transposed": (exact(96, 20).t(), 1),
        "transposed conv": (exact(96, 3, 2, 2), 0),
        "unaligned": (exact(5 * 96 + 1)[1:].view(5, 96), 1),
    }


def compare_masks(pattern: str, dtype: torch.dtype) -> None:
    named = [(name, w.to(dtype), Grouping(Pattern(pattern), axis)) for name, (w, axis) in weights().items()]
    special = torch.tensor([[0.0, -0.0, 1e-40, -1e-40, 1e38, -1e38, 1.0, -1.0] * 12], dtype=torch.float32).to(dtype)
    named.append(("special values", special, Grouping(Pattern(pattern), 1)))
    expected = [reference.mask(w, g) for _, w, g in named]
    ws, gs = [w for _, w, _ in named], [g for _, _, g in named]
    assert all(layout.axis_stride(w, g) is not None for w, g in zip(ws, gs, strict=True))
    outs = [torch.full_like(w, 7.0) for w in ws]
    multi.Fleet().masked_into(ws, gs, outs)
    for (name, w, g), out, mask in zip(named, outs, expected, strict=True):
        assert torch.equal(out, torch.where(mask, w, 0.0)), (pattern, name)
        assert not torch.signbit(out[~mask]).any(), (pattern, name)
        with use("triton"):
            assert torch.equal(ops.mask(w, g), mask), (pattern, name)
    ws, gs, expected = ws[:-1], gs[:-1], expected[:-1]  # the interpreter's own arithmetic loses denormals
    grads = [torch.ones_like(w) for w in ws]
    for sign in (False, True):
        after = [g.clone() for g in grads]
        multi.Fleet().refine_into(ws, gs, after, torch.arange(1.0, len(ws) + 1), torch.tensor(0.5), sign)
        for i, (w, mask) in enumerate(zip(ws, expected, strict=True)):
            term = torch.where(mask, 0.0, w.float().sign() if sign else w.float())
            torch.testing.assert_close(after[i].float(), (1 + 0.5 * (i + 1) * term).to(dtype).float(), rtol=1e-2, atol=1e-6)
            assert torch.equal(after[i][mask], grads[i][mask]), "kept weights get no term"
    print("compared", pattern, dtype)


IN_ORDER = (
    ("1:2", Way("exchange", 256)),
    ("1:2", Way("blocks", 16, row=72)),
    ("3:4", Way("exchange", 512, 2)),
    ("2:4", Way("blocks", 32, row=36)),
    ("4:8", Way("exchange", 1024, 2)),
    ("2:8", Way("blocks", 16, row=72)),
    ("8:16", Way("exchange", 512, 3)),
)


def compare_in_order(pattern: str, way: Way) -> None:
    """Strided groups by programs that read memory in order, a last stretch that is not full, and weights that they must leave alone."""
    grouping, m = Grouping(Pattern(pattern), 1), Pattern(pattern).m
    torch.manual_seed(m)
    sizes = ((8, 2 * m), (3, m), (8, m))
    ws = [(torch.randn(o, i, 3, 3) * 8).round() / 8 for o, i in sizes]
    ws.append(((torch.randn(8 * m * 9 + 1) * 8).round() / 8)[1:].view(8, m, 3, 3))  # does not begin on 16 bytes
    ways.IN_ORDER[9, m] = way
    try:
        for dtype in (torch.float32, torch.bfloat16) if way.kind == "exchange" else (torch.float32,):
            kinds = _compare_strided([w.to(dtype) for w in ws], grouping)
            assert way.kind in kinds
            assert ("walk" in kinds) == (dtype == torch.float32 or 27 * m % 8 != 0), kinds
    finally:
        del ways.IN_ORDER[9, m]
    print("compared in order", pattern, way.kind)


def _compare_strided(ws: list[torch.Tensor], grouping: Grouping) -> set[str]:
    gs, masks, fleet = [grouping] * len(ws), [reference.mask(w, grouping) for w in ws], multi.Fleet()
    outs, flags = [torch.full_like(w, 7.0) for w in ws], [torch.zeros_like(w, dtype=torch.bool) for w in ws]
    grads = [torch.ones_like(w) for w in ws]
    fleet.masked_into(ws, gs, outs)
    multi.Fleet().flags_into(ws, gs, flags)
    multi.Fleet().refine_into(ws, gs, grads, torch.arange(1.0, len(ws) + 1), torch.tensor(0.5), sign=False)
    for i, (w, mask) in enumerate(zip(ws, masks, strict=True)):
        assert torch.equal(flags[i], mask), (grouping, i)
        assert torch.equal(outs[i], torch.where(mask, w, 0.0)), (grouping, i)
        assert not torch.signbit(outs[i][~mask]).any(), (grouping, i)
        term = torch.where(mask, 0.0, w.float())
        torch.testing.assert_close(grads[i].float(), (1 + 0.5 * (i + 1) * term).to(w.dtype).float(), rtol=1e-2, atol=1e-6)
        assert (grads[i][mask] == 1).all(), "kept weights get no term"
    return {launch.way.kind for launches in fleet._ready_made.values() for launch in launches}


def compare_bits(pattern: str) -> None:
    named = [(w, Grouping(Pattern(pattern), axis)) for w, axis in weights().values()]
    named = [(w, g) for w, g in named if multi.bits_bytes(w, g) is not None]
    if not named:
        return
    ws, gs = [w for w, _ in named], [g for _, g in named]
    moved = [w + (torch.randn_like(w) * 4).round() / 8 for w in ws]
    fleet = multi.Fleet()
    bits, later = ([torch.full((multi.bits_bytes(w, g) or 0,), 255, dtype=torch.uint8) for w, g in named] for _ in range(2))
    fleet.bits_into(ws, gs, bits, None)
    counts = fleet.bits_into(moved, gs, later, bits)
    for i, (w, g) in enumerate(named):
        stride = layout.axis_stride(w, g) or 0
        assert torch.equal(multi.unpack_bits(bits[i], multi.bits_lane(g), w.shape, w.stride(), stride), reference.mask(w, g)), pattern
        assert int(counts[i]) == int((reference.mask(w, g) != reference.mask(moved[i], g)).sum()), pattern
    print("compared bits", pattern)


def look_for_not_finite(dtype: torch.dtype) -> None:
    sizes, lookout = ((7, 12), (300, 16), (3, 3, 3)), Lookout()
    weights = [torch.full(size, torch.finfo(dtype).max, dtype=dtype) for size in sizes]
    word = torch.zeros(())
    lookout.look(weights, word, sizes)
    assert word == 0, "the largest finite number is finite"
    for weight in weights:
        for value in (torch.inf, -torch.inf, torch.nan):
            before = weight.view(-1)[-1].clone()
            weight.view(-1)[-1] = value
            lookout.look(weights, word, sizes)
            assert not word.isfinite(), (dtype, weight.shape, value)
            weight.view(-1)[-1] = before
            word.zero_()
    print("compared finite", dtype)


def compare_training() -> None:
    """Five steps of SR-STE by the kernels and by plain torch: the same weights, the same SAD."""
    results = []
    for path in ("triton", "torch"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 32), nn.Linear(32, 4))
        with use(path):
            nofm.sparsify_(model, {"1": "2:8", "3": "1:16"})
            assert explain(nofm.sites(model)).count(path) == 2
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            nofm.attach(nofm.SRSTE(decay=0.05), model, optimizer)
            sad = nofm.SAD(model)
            sad.record(0)
            for step in range(1, 6):
                optimizer.zero_grad()
                model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
                sad.record(step)
            masks = {site.name: unpack(sad.packed(5)[site.name], site.weight.shape) for site in nofm.sites(model)}
            results.append(([p.detach() for p in model.parameters()], sad.flip_rate(), masks))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert results[0][1] == results[1][1]
    assert all(torch.equal(results[0][2][name], results[1][2][name]) for name in results[0][2])
    print("compared training")


def hand_out_masked_weights_and_show_dense_ones() -> None:
    """A whole model in one launch: layers compute with masked weights that they were handed, hooks find the dense ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    nofm.sparsify_(model, "2:4", preset="all", skip="4")
    handed: list[bool] = []

    def look(*_: object) -> None:
        assert model[2].weight is model[2]._parameters["weight"]
        handed.append("_nofm_made" in model[2].__dict__)

    x = torch.randn(4, 16)
    with use("triton"):
        expected = model[4](model[3](model[2](model[1](model[0](x)))))
        model[1].register_forward_hook(look)
        torch.testing.assert_close(model(x), expected)
        bulk._LARGE = 0  # from now on the copies are written by the kernel alone
        out = model(x)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), model[0].weight)[0] for each in (out, expected)))
        model[2].register_forward_pre_hook(look)
        torch.testing.assert_close(model(x), expected)
    assert handed == [True, True, False, False]
    print("compared hooks")


def can_wrap_interpreted_kernels() -> bool:
    """torch 2.11 takes kernels into compiled code only where they are compiled too; tests/gpu has the same test for it."""
    from torch.library import wrap_triton

    try:
        wrap_triton(triton_masks.one_masked_kernel)
    except RuntimeError:
        return False
    return True


def compile_one_node_a_layer(in_order: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    nofm.sparsify_(model, "2:8", preset="all", skip="4")
    if in_order:
        ways.IN_ORDER[9, 8] = Way("exchange", 1024)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    x = torch.randn(4, 8, 4, 4)
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    # torch 2.11 shows the kernel inside the operator instead of the operator
    one = ("nofm.masked", "triton_kernel_wrapper")
    nodes = [node for graph in counter.graphs for node in graph.graph.nodes if any(name in str(node.target) for name in one)]
    assert counter.frame_count == 1
    assert len(nodes) == 2, nodes
    assert model[0].weight.grad is not None
    ways.IN_ORDER.pop((9, 8), None)
    print("compared compiled")


def compile_forward_derivatives() -> None:
    """Of pruned weights too, as without a compiler; inside compiled code, of a gradient there, and of dual tensors."""
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    nofm.sparsify_(model, "2:8", preset="all")
    x, weight, direction = torch.randn(4, 16), model[0].weight.detach().clone(), torch.randn(8, 16)

    def outputs(own: Tensor) -> Tensor:
        return functional_call(model, {"0.weight": own}, (x,))

    def forward(own: Tensor, towards: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = jvp(outputs, (own,), (towards,))
        return result

    torch._dynamo.reset()
    found = torch.compile(forward, backend="eager", fullgraph=True)(weight, direction)
    torch.testing.assert_close(found, (outputs(weight), x @ direction.T))
    second = torch.compile(lambda own: jvp(grad(lambda own: outputs(own).square().sum()), (own,), (direction,))[1], backend="eager")
    torch.testing.assert_close(second(weight), 2 * (x @ direction.T).T @ x)
    plain = torch.compile(outputs, backend="eager")
    torch.testing.assert_close(plain(weight), outputs(weight))  # compiled without derivatives, and the code is not used with them
    with forward_ad.dual_level():
        torch.testing.assert_close(forward_ad.unpack_dual(plain(forward_ad.make_dual(weight, direction))).tangent, x @ direction.T)
    print("compared forward derivatives")


def jobs() -> Iterator[Callable[[], None]]:
    """All that is compared."""
    for text in PATTERNS:
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            yield partial(compare_masks, text, kind)
        yield partial(compare_bits, text)
    for text, way in IN_ORDER:
        yield partial(compare_in_order, text, way)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        yield partial(look_for_not_finite, kind)
    yield compare_training
    yield hand_out_masked_weights_and_show_dense_ones
    for in_order in (False, True):
        if can_wrap_interpreted_kernels():
            yield partial(compile_one_node_a_layer, in_order)
    if can_wrap_interpreted_kernels():
        yield compile_forward_derivatives


if __name__ == "__main__":
    share, of = map(int, sys.argv[1:])  # two processes side by side take half the time
    for job in list(jobs())[share::of]:
        job()
