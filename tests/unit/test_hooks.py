"""Hooks that say that they leave weights alone: layers below them are masked with all others, and others are left to themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nofm
from nofm.hooks import leaves_weights


def noticed(model: nn.Module) -> list[bool]:
    """Which of its linear layers find their masked weight made, in a forward."""
    found: list[bool] = []

    class Look(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append("_nofm_made" in self.__dict__)
            return super().forward(x)

    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Look
    nofm.sparsify_(model, "2:4", preset="all")
    model(torch.ones(2, 8))
    return found


def network() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("marked", [False, True])
def test_layers_below_a_hook(marked, before):
    def hook(*_: object) -> None:
        pass

    model = network()
    register = model[0].register_forward_pre_hook if before else model[0].register_forward_hook
    register(leaves_weights(hook) if marked else hook)
    assert noticed(model) == [marked, marked, True]


def test_one_hook_that_is_not_marked_is_enough():
    model = network()
    model[0].register_forward_hook(leaves_weights(lambda *_: None))
    model[0].register_forward_hook(lambda *_: None)
    assert noticed(model) == [False, False, True]


@pytest.mark.parametrize("where", ["", "0"], ids=["model", "part"])
def test_a_hook_that_takes_the_place_of_another_is_noticed(where):
    """As many hooks as before, but this one changes a weight."""
    model, x = nn.Sequential(nn.Sequential(nn.Linear(8, 8, bias=False))), torch.randn(2, 8)
    module = model.get_submodule(where)
    first = module.register_forward_pre_hook(leaves_weights(lambda *_: None))
    nofm.sparsify_(model, "2:4", preset="all")
    before = model(x)
    first.remove()

    @torch.no_grad()
    def double(module: nn.Module, args: object) -> None:
        next(module.parameters()).mul_(2)

    module.register_forward_pre_hook(double)
    torch.testing.assert_close(model(x), 2 * before)


@pytest.mark.parametrize("undo", [nofm.densify_, nofm.fold_])
def test_a_part_that_is_plain_again_is_noticed(undo):
    model, x = network(), torch.ones(2, 8)
    nofm.sparsify_(model, "2:4", preset="all")
    model(x)
    undo(model[0])
    expected = model[1](model[0](x))
    assert torch.equal(model(x), expected)


def test_hooks_of_others_stay_when_ours_go():
    seen: list[nn.Module] = []
    original = network()
    original.register_forward_hook(lambda module, *_: seen.append(module))
    nofm.sparsify_(original, "2:4", preset="all")
    original.register_forward_pre_hook(lambda module, _: seen.append(module))
    for model in (copy.deepcopy(original), original):
        nofm.densify_(model)
        model(torch.ones(2, 8))
        assert seen == [model, model]
        assert not any("_nofm_bulk" in module.__dict__ for module in model.modules())
        assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
        seen.clear()


def test_a_detector_is_masked_at_once():
    """Its own hooks, which keep boxes in fp32, are no reason to mask layer by layer."""
    from nofm import bulk
    from nofm.tasks.detection import Detection
    from nofm.tasks.detectors import build_detector

    task = Detection(build_detector("fasterrcnn_tiny", 3), ["a", "b", "c"])
    nofm.sparsify_(task.model, "2:4")
    observed, layers = bulk._observed(task.model), [site.module for site in nofm.sites(task.model)]
    assert len(layers) > 10
    assert not [layer for layer in layers if id(layer) in observed]
