"""ASP: a frozen mask stays frozen whatever the optimizer does, the stages change at their step, and a resumed run is the same run.

"Stays frozen" is checked on the bits after every step: a pruned weight that momentum moves and that is then pruned again in
forward only would look right from outside and come back when the mask goes away.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import nofm

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-3),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-3, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    nofm.sparsify_(model, "2:4", preset="all")
    return model


def batches(seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    for _ in itertools.count():
        yield torch.randn(8, 16, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - x[:, :8]).square().mean().backward()
    optimizer.step()


def stored_masks(model: nn.Module) -> list[Tensor]:
    return [site.stored_mask.clone() for site in nofm.sites(model)]


def assert_pruned_are_positive_zero(model: nn.Module, masks: list[Tensor]) -> None:
    for site, mask in zip(nofm.sites(model), masks, strict=True):
        assert torch.equal(site.stored_mask, mask)
        assert not site.weight.detach()[~mask].view(torch.int32).any()  # -0.0 has a bit set


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_weight_comes_back_in_a_thousand_steps(make_optimizer):
    model, optimizer_steps = network(), 1000
    optimizer = make_optimizer(model.parameters())
    handle = nofm.attach(nofm.ASP(prune_at=5), model, optimizer)
    data = batches()
    for _ in range(5):  # momentum of all weights, which would carry pruned ones on
        step(model, optimizer, next(data))
    masks, before = stored_masks(model), copy.deepcopy(model.state_dict())
    assert_pruned_are_positive_zero(model, masks)
    for _ in range(optimizer_steps):
        step(model, optimizer, next(data))
        assert_pruned_are_positive_zero(model, masks)
    assert handle.step == 5 + optimizer_steps
    for site, mask in zip(nofm.sites(model), masks, strict=True):
        assert mask.sum() == mask.numel() / 2
        assert (site.weight[mask] != before[site.key][mask]).all()  # what is kept did train


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_stage_one_is_dense_training_and_ends_at_its_step(make_optimizer):
    prune_at, models = 10, {"dense": network(), "asp": network()}
    optimizers = {name: make_optimizer(model.parameters()) for name, model in models.items()}
    nofm.attach(nofm.Dense(), models["dense"], optimizers["dense"])
    nofm.attach(nofm.ASP(prune_at), models["asp"], optimizers["asp"])
    data = batches()
    for number in range(1, prune_at + 1):
        x = next(data)
        for name, model in models.items():
            step(model, optimizers[name], x)
        same = [torch.equal(a, b) for a, b in zip(models["dense"].parameters(), models["asp"].parameters(), strict=True)]
        assert all(same) == (number < prune_at)
    for dense, pruned in zip(nofm.sites(models["dense"]), nofm.sites(models["asp"]), strict=True):
        mask = nofm.mask(dense.weight.detach(), "2:4")
        assert torch.equal(pruned.stored_mask, mask)
        assert torch.equal(pruned.weight, torch.where(mask, dense.weight, 0.0))
    x = next(data)
    seen = nn.functional.linear(x, models["asp"][0].weight, models["asp"][0].bias)
    assert torch.equal(models["asp"][0](x), seen)


def test_pruned_weights_get_no_gradient():
    """By the stored mask, also where kept weights have become zero and a mask made anew would choose others."""
    model = network()
    nofm.attach(nofm.ASP(), model, torch.optim.SGD(model.parameters()))
    with torch.no_grad():
        model[0].weight.zero_()
    model(next(batches())).sum().backward()
    for site in nofm.sites(model):
        assert torch.equal(site.weight.grad != 0, site.stored_mask)


def test_weights_that_the_optimizer_leaves_alone_are_pruned_with_the_others():
    model = network()
    model[2].weight.requires_grad_(False)  # and not in the optimizer
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    nofm.attach(nofm.ASP(prune_at=2), model, optimizer)
    data = batches()
    step(model, optimizer, next(data))
    assert [site.stored_mask for site in nofm.sites(model)] == [None, None]
    model[0].weight.grad = None
    optimizer.step()  # nothing has a gradient, but it is step 2
    assert_pruned_are_positive_zero(model, [nofm.mask(site.weight.detach(), "2:4") for site in nofm.sites(model)])


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("saved_at", [3, 12], ids=["in stage 1", "in stage 2"])
def test_a_resumed_run_is_the_run(make_optimizer, saved_at):
    """A kept weight that happens to be exactly zero ties with the pruned ones: only the stored bits tell which was kept."""
    method, steps = nofm.ASP(prune_at=6), 20
    model = network()
    optimizer = make_optimizer(model.parameters())
    handle, data = nofm.attach(method, model, optimizer), list(itertools.islice(batches(), steps))
    for number, x in enumerate(data, start=1):
        step(model, optimizer, x)
        if number == saved_at:
            with torch.no_grad():
                model[0].weight[:, ::2] = 0.0
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), handle.state_dict()])

    resumed = network()
    optimizer = make_optimizer(resumed.parameters())
    handle = nofm.attach(method, resumed, optimizer)
    for part, state in zip((resumed, optimizer, handle), saved, strict=True):
        part.load_state_dict(state)
    assert handle.step == saved_at
    for x in data[saved_at:]:
        step(resumed, optimizer, x)
    assert handle.step == steps
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(stored_masks(model), stored_masks(resumed), strict=True):
        assert torch.equal(a, b)


def test_the_state_of_a_method_is_small_and_holds_no_objects():
    model = network()
    handle = nofm.attach(nofm.ASP(), model, torch.optim.SGD(model.parameters()))
    state = handle.state_dict()
    assert state["method"] == "ASP"
    assert state["steps"] == [0]
    assert {key: (packed.dtype, packed.numel()) for key, packed in state["masks"].items()} == {
        "0.weight": (torch.uint8, 16 * 16 // 8),
        "2.weight": (torch.uint8, 16 * 8 // 8),
    }


WRONG_STATES = {
    "a model's": ({"0.weight": torch.zeros(16, 16)}, r"this is no state of a handle, .*; load what handle\.state_dict\(\) has given"),
    "none": (None, "this is no state of a handle"),
    "another method": ({"method": "STE", "steps": [3], "masks": {}}, "this state is of method STE, the attached one is ASP"),
    "other optimizers": ({"method": "ASP", "steps": [3, 3], "masks": {}}, "this state is of 2 optimizers, 1 are attached"),
    "other layers": (
        {"method": "ASP", "steps": [3], "masks": {"9.weight": torch.zeros(4, dtype=torch.uint8)}},
        r"this state has masks for 9\.weight, which are not sparse weights",
    ),
}


@pytest.mark.parametrize(("state", "message"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_a_state_of_something_else_is_refused(state, message):
    model = network()
    handle = nofm.attach(nofm.ASP(), model, torch.optim.SGD(model.parameters()))
    masks = stored_masks(model)
    with pytest.raises(nofm.OptimizerError, match=message):
        handle.load_state_dict(state)
    assert handle.step == 0
    assert_pruned_are_positive_zero(model, masks)
