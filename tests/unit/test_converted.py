"""A model that is converted (`double()`, `to(dtype)`) while a method is attached, by either of torch's ways: new values in the parameters,
or parameters swapped for new ones under the old names and identities, which no weak reference to a parameter survives."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import nofm
from nofm import following

METHODS = {
    "SRSTE": (nofm.SRSTE(0.5), "2:4"),
    "SRSTE, backward": (nofm.SRSTE(0.5, placement="backward"), "2:4"),
    "ASP": (nofm.ASP(prune_at=3), "2:4"),
    "GMP": (nofm.GMP(0.5, end_at=5, every=1), "1:1"),
    "SET": (nofm.SET(0.5, every=2), "1:1"),
    "ticket": (nofm.LotteryTicket(0.5, rounds=1, every=4, rewind_to=1), "1:1"),
    "STR": (nofm.STR(initial=-3.0), "1:1"),
}


@pytest.fixture
def swaps() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def trained(method: nofm.Method, pattern: str, dtype: torch.dtype) -> list[Tensor]:
    """Weights and masks after three steps, a conversion, and three more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    nofm.sparsify_(model, pattern, preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = nofm.attach(method, model, optimizer)
    x = torch.randn(8, 16, dtype=torch.float64)
    for number in range(6):
        if number == 3:
            model.to(dtype)
        model(x.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.step == 6
    return [each for site in nofm.sites(model) for each in (site.weight.detach(), site.mask())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("method", "pattern"), METHODS.values(), ids=METHODS)
def test_training_goes_on_alike_in_swapped_parameters(method, pattern, dtype, request):
    expected = trained(method, pattern, dtype)
    request.getfixturevalue("swaps")
    found = trained(method, pattern, dtype)
    assert found[0].dtype == dtype
    assert all(map(torch.equal, found, expected))


def test_a_state_is_loaded_into_swapped_parameters(swaps):
    torch.manual_seed(0)
    weights = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        nofm.sparsify_(model, "2:4", preset="all")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = nofm.attach(nofm.SRSTE(0.5), model, optimizer)
        if not weights:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(saved)
        x = torch.linspace(-1, 1, 64).reshape(4, 16)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle.step == 3
        weights.append(torch.cat([site.weight.detach().flatten() for site in nofm.sites(model)]))
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], torch.cat([saved[name].flatten() for name in saved if name.endswith("weight")]))


def test_another_optimizer_of_swapped_parameters_is_still_named(swaps):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    nofm.sparsify_(model, "2:4", preset="all")
    _handle = nofm.attach(nofm.SRSTE(0.5), model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.double()
    new = torch.optim.Adam(model.parameters())
    said = []
    for _ in range(3):
        model(torch.randn(4, 16).double()).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            new.step()
        said += [str(warning.message) for warning in caught]
    assert [text[:28] for text in said] == ["this Adam moves 0.weight, bu"]


def test_what_is_followed_keeps_no_layer_alive():
    gc.collect()
    before = len(following._followed)
    model = nn.Linear(16, 16)
    nofm.sparsify_(model, "2:4", preset="all")
    nofm.attach(nofm.SRSTE(0.5), model, torch.optim.SGD(model.parameters(), lr=0.1))
    gc.collect()
    assert len(following._followed) == before + 1  # the optimizer is gone, the layer is not
    del model
    gc.collect()
    assert len(following._followed) == before
