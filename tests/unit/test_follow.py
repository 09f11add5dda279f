"""follow_: an average (EMA) sees its weights as its model does, whenever it was made and whatever the method has done since."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nofm
from nofm import ste

STEPS = 6
METHODS = {
    "ASP": (nofm.ASP(prune_at=3), "2:4"),
    "dense start": (nofm.SRSTE(2e-4, begin_at=3), "2:4"),
    "gradual start": (nofm.SRSTE(2e-4, ramp_at=0, begin_at=4), "1:8"),
    "SR-STE": (nofm.SRSTE(2e-4), "2:4"),
    "GMP": (nofm.GMP(0.75, begin_at=1, end_at=4, every=1), "1:1"),
    "SNIP": (nofm.SNIP(0.75, batches=2), "1:1"),
    "RigL": (nofm.RigL(0.75, end_at=5, every=2), "1:1"),
    "STR": (nofm.STR(-3.0), "1:1"),
}


def network(pattern: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
    nofm.sparsify_(model, pattern, preset="all")
    return model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("first", ["average", "attach"])
@pytest.mark.parametrize(("method", "pattern"), METHODS.values(), ids=METHODS)
def test_an_average_sees_its_weights_as_the_model_does(method, pattern, first) -> None:
    model = network(pattern)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if first == "average" else None
    nofm.attach(method, model, optimizer)
    average = average or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(STEPS):
        train_step(model, optimizer)
        assert nofm.follow_(average, model) is average
        average.update_parameters(model)
        for ours, theirs in zip(nofm.sites(average.module), nofm.sites(model), strict=True):
            assert ours.weight is not theirs.weight
            if isinstance(theirs.lens, ste.SoftThreshold):  # which says itself what is kept, of any weight
                assert torch.equal(ours.lens.s, theirs.lens.s)
                assert torch.equal(ours.mask(), ours.seen() != 0)
                assert ours.used() == ours.kept() == int(ours.mask().sum())
                continue
            assert ours.used() == theirs.used()
            if theirs.stored_mask is not None:
                assert torch.equal(ours.mask(), theirs.mask())
    assert all(site.used() < site.weight.numel() for site in nofm.sites(average.module))


def test_a_method_that_goes_back_takes_the_average_along() -> None:
    model = network("2:4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = nofm.attach(nofm.ASP(prune_at=2), model, optimizer)
    before, average = handle.state_dict(), copy.deepcopy(model)
    for _ in range(2):
        train_step(model, optimizer)
    nofm.follow_(average, model)
    assert [site.stored_mask is not None for site in nofm.sites(average)] == [True, True]
    handle.load_state_dict(before)
    nofm.follow_(average, model)
    assert [site.stored_mask for site in nofm.sites(average)] == [None, None]
    assert [site.used() for site in nofm.sites(average)] == [256, 256]


@pytest.mark.parametrize("made", ["before", "after"])
def test_an_average_has_thresholds_of_its_own(made) -> None:
    """The model's go on being trained."""
    model = network("1:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    before = copy.deepcopy(model)
    nofm.attach(nofm.STR(-3.0), model, optimizer)
    average = nofm.follow_(before if made == "before" else copy.deepcopy(model), model)
    train_step(model, optimizer)
    nofm.follow_(average, model)
    thresholds = [site.lens.s for site in nofm.sites(average)]
    x = torch.randn(4, 16)
    seen = average.eval()(x)
    for site in nofm.sites(average):
        assert torch.equal(site.stored_mask, site.seen() != 0), "the mask of its own weight"
    for _ in range(5):
        train_step(model, optimizer)
    assert torch.equal(average(x), seen)
    nofm.follow_(average, model)
    assert not torch.equal(average(x), seen)
    assert [site.lens.s for site in nofm.sites(average)] == thresholds, "in the same places, where a CUDA graph looks for them"


class Wrapper(nn.Module):
    """As timm's ModelEma."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)


class Named(nn.Module):
    """A model whose own part has the name of what wrappers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


@pytest.mark.parametrize("wrap", [copy.deepcopy, AveragedModel, Wrapper])
@pytest.mark.parametrize("named", [False, True])
def test_a_wrapper_is_looked_into(wrap, named) -> None:
    model = Named() if named else network("2:4")
    if named:
        nofm.sparsify_(model, "2:4", preset="all")
    average = wrap(model)
    nofm.attach(nofm.ASP(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    if named and wrap is Wrapper:  # which cannot be told from a copy
        with pytest.raises(nofm.LayerError, match="of a wrapper pass the copy inside"):
            nofm.follow_(average, model)
        nofm.follow_(average.module, model)
    else:
        assert nofm.follow_(average, model) is average
    assert all(site.stored_mask is not None for site in nofm.sites(average))


def test_dense_models_have_nothing_to_follow() -> None:
    model = nn.Linear(16, 16)
    with pytest.raises(nofm.LayerError, match="neither model has a sparse layer, so there is nothing to follow; sparsify_ comes first"):
        nofm.follow_(copy.deepcopy(model), model)


def test_masks_of_the_average_are_its_own() -> None:
    model = network("2:4")
    nofm.attach(nofm.ASP(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = nofm.follow_(copy.deepcopy(model), model)
    for ours, theirs in zip(nofm.sites(average), nofm.sites(model), strict=True):
        assert ours.stored_mask.data_ptr() != theirs.stored_mask.data_ptr()


OTHERS = {
    "another pattern": (lambda: network("1:4"), "0 1:4 would follow 0 2:4: this is no copy of that model; copy it after sparsify_"),
    "a dense one": (lambda: nofm.densify_(network("2:4")), "no sparse layer would follow 0 2:4: this is no copy"),
    "fewer layers": (lambda: network("2:4")[:2], "no sparse layer would follow 3 2:4: this is no copy"),
}


@pytest.mark.parametrize(("other", "message"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_copy_is_refused(other, message) -> None:
    model = network("2:4")
    nofm.attach(nofm.ASP(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    untold = other()
    with pytest.raises(nofm.LayerError, match=message):
        nofm.follow_(untold, model)
    assert all(site.stored_mask is None for site in nofm.sites(untold))
