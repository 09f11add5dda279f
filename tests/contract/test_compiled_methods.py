"""Every method trains a compiled model as one graph, to the bit as an uncompiled one, and a second model of its kind is not compiled again.

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
}
DENSE_AT_FIRST = ("asp", "snip", "srste, after a dense start")  # two graphs: layers see their weights in two ways


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
        assert backend.frame_count == (2 if case in DENSE_AT_FIRST else 1)
