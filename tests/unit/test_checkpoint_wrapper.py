"""torch's `checkpoint_wrapper` around a layer changes the names of modules, not those of the state dict: with it or without, a network is
the same, and goes on from the other's states."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import nofm


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).relu())


def network(is_wrapped: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if is_wrapped:
        model[1] = checkpoint_wrapper(model[1])
    return model


def trained(is_wrapped: bool, method: nofm.Method, steps: int, states: list | None = None) -> list:
    model = network(is_wrapped)
    nofm.sparsify_(model, "1:1" if method.unstructured else "2:4", preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = [model, optimizer, nofm.attach(method, model, optimizer)]
    for part, state in zip(parts, copy.deepcopy(states) or (), strict=states is not None):
        part.load_state_dict(state)
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimizer.step()
    return parts


METHODS = {"SR-STE": nofm.SRSTE("auto", probe=8), "ASP": nofm.ASP(prune_at=2), "STR": nofm.STR(-4.0), "RigL": nofm.RigL(end_at=9, every=2)}


@pytest.mark.parametrize("first", [False, True], ids=["switched on", "switched off"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_it_may_be_switched_between_two_runs(method, first):
    states = [part.state_dict() for part in trained(first, method, 3)]
    model, _, handle = trained(not first, method, 3, states)
    as_it_was, _, its_handle = trained(first, method, 3, states)
    assert [site.key for site in nofm.sites(model)] == [name for name in model.state_dict() if name.endswith("weight")]
    for what in ("steps", "masks", "memory"):
        torch.testing.assert_close(handle.state_dict()[what], its_handle.state_dict()[what], rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), as_it_was.state_dict(), rtol=0, atol=0)


def test_rules_reports_and_files_have_the_names_of_the_state_dict(tmp_path: Path):
    """Files of a network that was wrapped had its dense weights."""
    told = []
    for is_wrapped in (False, True):
        model = network(is_wrapped)
        nofm.sparsify_(model, {"1.first": "1:4", "1.*": "2:4", "*": None})
        gradients = {name: torch.ones_like(weight) for name, weight in model.named_parameters()}
        rules = nofm.allocate_patterns(network(is_wrapped), 0.5, by="sensitivity", gradients=gradients)
        nofm.save_packed(model, tmp_path / "packed.safetensors")
        found = [str(nofm.summary(model)), str(nofm.verify(model)), str(nofm.cost(model, (1, 16))), str(rules)]
        told.append((*found, str(nofm.verify(tmp_path / "packed.safetensors")), nofm.load_packed(tmp_path / "packed.safetensors")))
    torch.testing.assert_close(told[1][-1], told[0][-1], rtol=0, atol=0)
    assert told[1][:-1] == told[0][:-1]
