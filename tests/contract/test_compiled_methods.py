"""Every method trains a compiled model as one graph, to the bit as an uncompiled one, and a second model of its kind is not compiled again.
Derivatives taken forward are the same too.

Whatever breaks a graph inside of a layer breaks it in every layer: each piece is then compiled for itself, until torch gives up and goes
on uncompiled, and such a training is slower than one that was never compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, jvp

import nofm

STEPS = 6
# So that each of them rewires, prunes or goes back within these steps.
OPTIONS: dict[str, dict[str, Any]] = {
    "asp": {"prune_at": 3},
    "gmp": {"end_at": 4, "every": 2},
    "lottery": {"every": 2, "rounds": 2},
    "rigl": {"every": 2, "end_at": 5},
    **{kind: {"every": 2} for kind in ("set", "snfs", "dsr")},
    "str": {"initial": -2.0},
}
CASES: dict[str, nofm.Method] = {
    **{kind: info.method(**OPTIONS.get(kind, {})) for kind, info in nofm.METHODS.items()},
    "srste, in the backward pass": nofm.SRSTE(placement="backward"),
    "srste, after a dense start": nofm.SRSTE(begin_at=3),
    "srste, after a gradual start": nofm.SRSTE(begin_at=4, ramp_at=1),
}
GRAPHS = {  # layers see their weights in several ways
    **dict.fromkeys(("asp", "snip", "srste, after a dense start"), 2),
    "srste, after a gradual start": 3,  # all weights, 3 of 4, 2 of 4
}


def trained(method: nofm.Method, seed: int, compiled: Callable[[nn.Module], Any]) -> list[Tensor]:
    """The losses of a few steps, and the weights that they leave."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.Flatten(), nn.Linear(32, 8))
    nofm.sparsify_(model, "1:1" if method.unstructured else "2:4", preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nofm.attach(method, model, optimizer)
    run, losses = compiled(model), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(run(torch.randn(4, 8, 4, 4)).square().mean())
        losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses] + [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_every_method_trains_as_one_graph(case):
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("eager")
    for seed in (0, 1):
        compiled = trained(CASES[case], seed, lambda model: torch.compile(model, backend=backend, fullgraph=True))
        for a, b in zip(compiled, trained(CASES[case], seed, lambda model: model), strict=True):
            assert torch.equal(a, b)
        assert backend.frame_count == GRAPHS.get(case, 1)


@pytest.mark.parametrize("kind", ["ste", "ste_unstructured", "snfs"])
def test_forward_derivatives_are_those_of_uncompiled_layers(kind):
    """A derivative in the direction of a pruned weight is not zero: it goes straight through, as gradients do."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    method = CASES[kind]
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    nofm.sparsify_(model, "1:1" if method.unstructured else "2:4", preset="all")
    nofm.attach(method, model, torch.optim.SGD(model.parameters(), lr=0.1))
    images, weights = torch.randn(4, 16), {name: weight.detach() for name, weight in model.named_parameters()}
    directions = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def derivative(weights: dict[str, Tensor], directions: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = jvp(lambda own: functional_call(model, own, (images,)), (weights,), (directions,))
        return result

    out, tangent = derivative(weights, directions)
    compiled_out, compiled_tangent = torch.compile(derivative, backend="aot_eager", fullgraph=True)(weights, directions)
    assert torch.allclose(tangent, images @ directions["0.weight"].T, atol=1e-5)
    assert torch.allclose(compiled_out, out)
    assert torch.allclose(compiled_tangent, tangent, atol=1e-5)
