"""`torch.compile(optimizer.step)`: a method works in a compiled step as in any other. (Kernels inside it: `fused_edge_jobs.py`.)"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import nofm

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
STEPS = 10  # more than torch compiles one function anew


def trained(kind: str, method: nofm.Method, fused: bool = False, first: int = STEPS, **compile_options: Any) -> list[torch.Tensor]:
    """Weights and the method's own count after `STEPS`, of which those from `first` on are compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    nofm.sparsify_(model, "2:4", preset="all")
    make, options = OPTIMIZERS[kind]
    optimizer = make(model.parameters(), **options)
    handle = nofm.attach(method, model, optimizer, fused=fused)
    compiled = torch.compile(optimizer.step, **compile_options)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that fused=True serves no weight on a CPU
            (compiled if step >= first else optimizer.step)()
    assert handle.step == STEPS
    return [parameter.detach() for parameter in model.parameters()]


def assert_near(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    """As near as torch's own compiled steps are to its others: a few roundings, which Adam makes steps of."""
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("fused", "first"), [(False, 0), (True, 0), (True, 2)], ids=["two passes", "fused", "fused, compiled later"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_srste(kind, fused, first):
    compiled = trained(kind, nofm.SRSTE(decay=0.1), fused, first, backend="eager")
    assert_near(compiled, trained(kind, nofm.SRSTE(decay=0.1)))
    if (kind, fused) == ("sgd", False):
        with pytest.raises(AssertionError):  # the comparison sees a lambda that is off by a tenth
            assert_near(compiled, trained(kind, nofm.SRSTE(decay=0.11)))


@pytest.mark.parametrize(
    "method",
    [nofm.STE(), nofm.SRSTE(decay=0.1, placement="decoupled"), nofm.ASP(prune_at=4)],
    ids=["ste", "decoupled", "a method that counts steps"],
)
def test_other_methods(method):
    assert_near(trained("sgd", method, first=0, backend="eager"), trained("sgd", method))


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["two passes", "fused"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_srste_with_compiled_kernels(kind, fused):
    assert_near(trained(kind, nofm.SRSTE(decay=0.1), fused, 0), trained(kind, nofm.SRSTE(decay=0.1)))


def test_no_code_of_a_method_is_compiled():
    """Which would be done anew for every step that it counts."""
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph.print_readable(print_output=False))
        return graph

    trained("sgd", nofm.SRSTE(decay=0.1), first=0, backend=backend)
    assert compiled
    assert not [code for code in compiled if "src/nofm" in code or "/nofm/methods" in code]
    assert len(compiled) <= 2, "the first step, whose momentum begins, and all others"


def test_one_graph_for_all_is_refused_with_a_reason():
    with pytest.raises(torch._dynamo.exc.Unsupported, match="nofm's method works between the compiled parts"):
        trained("sgd", nofm.SRSTE(decay=0.1), first=0, backend="eager", fullgraph=True)


def test_a_closure_in_a_compiled_step():
    """The moment before the step comes when the closure returns, as for a closure that is called by hand before a step without one."""
    runs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = nn.Linear(16, 8)
        nofm.sparsify_(layer, "2:4", preset="all")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        handle = nofm.attach(nofm.SRSTE(decay=0.1), layer, optimizer)
        step = torch.compile(optimizer.step, backend="eager")

        def closure(layer=layer, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(torch.ones(2, 16)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            if compiled:
                step(closure)
            else:
                closure()
                optimizer.step()
        assert handle.step == 3
        runs.append([layer.weight.detach(), layer.bias.detach()])
    assert_near(*runs)
