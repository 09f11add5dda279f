"""SAD against masks counted by hand and by brute force, on recorded steps, dropped steps and the paper's Fig. 3 set-up."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nofm
from nofm.masks import unpack


def one_layer(weights: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(len(weights[0]), len(weights), bias=False)
    set_weights(layer, weights)
    nofm.sparsify_(layer, "2:4")
    return layer


def set_weights(layer: nn.Linear, weights: list[list[float]]) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weights))


def test_counts_weights_whose_state_changed_by_pencil():
    layer = one_layer([[4.0, 3.0, 2.0, 1.0, 1.0, 2.0, 3.0, 4.0]])
    sad = nofm.SAD(layer)
    sad.record(0)  # kept 0 1 | 6 7
    set_weights(layer, [[4.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]])
    sad.record(1)  # kept 0 3 | 6 7: one left, one came
    set_weights(layer, [[1.0, 1.5, 2.0, 3.0, 5.0, 5.0, 3.0, 4.0]])
    sad.record(3)  # kept 2 3 | 4 5: 0 -> 2, 6 -> 4, 7 -> 5
    assert sad.between(0, 1) == {"weight": 2}
    assert repr(sad.between(0, 1)) == "Divergence({'weight': 2}: 2 of 8 weights)"
    assert sad.between(1, 3) == {"weight": 6}
    assert sad.between(0, 3).total == 8  # nothing of the first mask is left
    assert sad.between(3, 0) == sad.between(0, 3)
    assert sad.between(1, 1).total == 0
    assert sad.flip_rate() == {1: 2 / 8, 3: 6 / 8 / 2}
    # 4 weights are kept for 3 steps; 1 + 3 departures
    assert sad.lifetime() == {"weight": 4 * 3 / 4}


def test_equals_the_l1_distance_of_masks_in_every_layer():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.ConvTranspose2d(16, 8, 2), nn.Flatten(), nn.Linear(72, 32), nn.Linear(32, 4)
    )
    nofm.sparsify_(model, {"1": "1:8", "4": "2:8", "*": "2:4"})
    sad, masks = nofm.SAD(model), {}
    for step in (0, 1, 5):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        sad.record(step)
        masks[step] = {site.name: site.mask().clone() for site in nofm.sites(model)}
    for i, j in ((0, 1), (1, 5), (0, 5)):
        expected = {name: int((masks[i][name].int() - masks[j][name].int()).abs().sum()) for name in masks[i]}
        assert sad.between(i, j) == expected
        assert sad.between(i, j).total == sum(expected.values()) > 0
    for name, packed in sad.packed(5).items():
        assert torch.equal(unpack(packed, masks[5][name].shape), masks[5][name])


def test_masks_are_held_as_one_bit_a_weight_and_dropped_beyond_keep():
    layer = one_layer(torch.randn(64, 64).tolist())
    sad = nofm.SAD(layer, keep=2)
    for step in range(5):
        set_weights(layer, torch.randn(64, 64).tolist())
        sad.record(step)
    assert sad.packed(4)["weight"].numel() * 8 == layer.weight.numel()
    assert sum(record.masks is not None for record in sad._records) == 2
    assert len(sad.flip_rate()) == 4, "what changed is held although the masks are not"
    assert sad.between(3, 4).total > 0
    with pytest.raises(nofm.NofmError, match=r"step 1 was dropped: keep=2.*only for steps 3, 4"):
        sad.between(1, 4)


def test_a_frozen_mask_never_moves():
    layer = one_layer(torch.randn(8, 8).tolist())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    nofm.attach(nofm.ASP(), layer, optimizer)
    sad = nofm.SAD(layer)
    sad.record(0)
    for step in range(1, 20):
        layer(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        sad.record(step)
    assert sad.between(0, 19).total == 0
    assert sad.lifetime() == {"weight": math.inf}


def test_a_lifetime_counts_the_weights_that_a_stored_mask_keeps():
    layer = nn.Linear(8, 2, bias=False)
    nofm.sparsify_(layer, "1:1")
    (site,) = nofm.sites(layer)
    kept = torch.zeros(2, 8, dtype=torch.bool)
    sad = nofm.SAD(layer)
    for step in range(5):
        kept.fill_(False)[:, [0, 1, 2 + step % 2]] = True  # of three kept in each row, one changes its place at every step
        site.freeze(kept)
        sad.record(step)
    assert sad.lifetime() == {"weight": 6 * 4 / 8}, "6 kept, 4 steps, 8 departures"


def test_a_lifetime_counts_departures_where_more_leave_than_come():
    layer = nn.Linear(8, 2, bias=False)
    nofm.sparsify_(layer, "1:1")
    (site,) = nofm.sites(layer)
    sad = nofm.SAD(layer)
    for step, places in ((0, range(8)), (1, range(4)), (3, (0, 1, 2, 4))):
        kept = torch.zeros(2, 8, dtype=torch.bool)
        kept[:, list(places)] = True
        site.freeze(kept)
        sad.record(step)
    assert sad.lifetime() == {"weight": (16 * 1 + 8 * 2) / (8 + 2)}, "16 kept for a step, 8 for two; 8 departures, then 2 with 2 arrivals"


def test_masks_of_a_dense_method_are_those_that_pruning_would_give():
    layer = one_layer(torch.randn(8, 8).tolist())
    nofm.attach(nofm.Dense(), layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    sad = nofm.SAD(layer)
    sad.record(0)
    set_weights(layer, torch.randn(8, 8).tolist())
    sad.record(1)
    assert sad.between(0, 1).total > 0
    assert torch.equal(unpack(sad.packed(1)["weight"], layer.weight.shape), nofm.mask(layer.weight, "2:4"))


@pytest.mark.parametrize("undo", [nofm.fold_, nofm.densify_])
@pytest.mark.parametrize("method", [nofm.STE(), nofm.ASP()], ids=["masks of the moment", "stored masks"])
def test_records_can_be_read_when_the_network_is_plain_again(undo, method):
    """Train, fold, print: the order in which one does it."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nofm.sparsify_(model, "2:4", preset="all")
    handle = nofm.attach(method, model, optimizer)
    sad = nofm.SAD(model)
    for step in range(3):
        sad.record(step)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()

    def read() -> tuple[object, ...]:
        return dict(sad.between(0, 2)), sad.between(0, 2).weights, sad.flip_rate(), sad.lifetime(), repr(sad)

    before = read()
    handle.detach()
    undo(model)
    assert read() == before
    with pytest.raises(nofm.NofmError, match="no sparse layer any more"):
        sad.record(3)


def test_a_record_that_is_refused_leaves_those_before_it():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    nofm.sparsify_(model, "2:4", preset="all")
    sad = nofm.SAD(model)
    for step in range(3):
        sad.record(step)
        set_weights(model[0], torch.randn(16, 16).tolist())
    before = dict(sad.between(0, 2)), sad.flip_rate(), sad.lifetime()
    nofm.fold_(model[0])
    for _ in range(2):
        with pytest.raises(nofm.NofmError, match="0 is no sparse layer any more, and its masks were recorded before"):
            sad.record(3)
        assert (dict(sad.between(0, 2)), sad.flip_rate(), sad.lifetime()) == before


def test_a_lifetime_goes_by_the_pattern_of_each_record():
    layer = nn.Linear(16, 1, bias=False)
    nofm.sparsify_(layer, "2:4", preset="all")
    sad = nofm.SAD(layer)
    set_weights(layer, [[4.0, 3.0, 2.0, 1.0] * 4])
    sad.record(0)
    nofm.densify_(layer)
    nofm.sparsify_(layer, "1:16", preset="all")
    sad.record(1)  # 8 were kept and 1 is: 7 left
    set_weights(layer, [[1.0] * 15 + [5.0]])
    sad.record(2)  # 1 left and 1 came
    assert sad.lifetime() == {"weight": (8 + 1) / 8}


def after_fold(model, part):
    nofm.sparsify_(model, "2:4", preset="all")
    sad = nofm.SAD(model)
    sad.record(0)
    nofm.fold_(part(model))
    sad.record(1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda sad: sad.record(2), "step 2 is recorded after step 2"),
        (lambda sad: sad.record(1), "steps must grow"),
        (lambda sad: sad.between(0, 7), r"no mask is held for step 7, only for steps 0, 2$"),
        (lambda sad: nofm.SAD(one_layer([[1.0] * 4])).between(0, 5), "for step 0, nor for any other; record"),
        (lambda sad: nofm.SAD(nn.Linear(4, 4)), "no sparse layer to record"),
        (lambda sad: nofm.SAD(one_layer([[1.0] * 4]), keep=0), "holds no mask"),
        (lambda sad: nofm.SAD(one_layer([[1.0] * 4])).lifetime(), "at least two recorded steps"),
        (lambda sad: after_fold(nn.Sequential(nn.Linear(4, 4)), lambda model: model), "has no sparse layer any more"),
        (lambda sad: after_fold(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lambda model: model[1]), "1 is no sparse layer any more"),
    ],
    ids=[
        "same-step",
        "earlier-step",
        "unknown-step",
        "no-step",
        "dense-model",
        "keep-0",
        "lifetime-of-nothing",
        "folded",
        "folded-in-part",
    ],
)
def test_refuses(wrong, message):
    sad = nofm.SAD(one_layer([[1.0, 2.0, 3.0, 4.0]]))
    sad.record(0)
    sad.record(2)
    with pytest.raises(nofm.NofmError, match=message):
        wrong(sad)


def test_a_step_is_not_read_as_a_count():
    sad = nofm.SAD(one_layer([[1.0, 2.0, 3.0, 4.0]]))
    sad.record(0)
    with pytest.raises(nofm.NofmError, match=r"no mask is held for step 5, only for step 0$"):
        sad.between(0, 5)


def test_dense_and_sparse_forward_are_compared_as_in_figure_3():
    """SAD_{0:t} at t = 1 and 10 of two plain training loops, one with the dense weight and one with the masked one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    nofm.sparsify_(model, "1:16")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batches = [(torch.randn(64, 32), torch.randint(10, (64,))) for _ in range(10)]
    result = nofm.sad_of_forwards(
        model, lambda m: torch.optim.SGD(m.parameters(), lr=0.5), lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), batches
    )
    assert set(result) == {"dense", "sparse"}
    for forward, by_step in result.items():
        plain = nofm.densify_(copy.deepcopy(model))
        first = {name: nofm.mask(plain.get_submodule(name).weight, "1:16") for name in ("0", "3")}
        for step, (x, y) in enumerate(batches, start=1):
            plain_sgd_step(plain, x, y, sparse=forward == "sparse")
            if step in by_step:
                moved = {name: int((nofm.mask(plain.get_submodule(name).weight, "1:16") != first[name]).sum()) for name in first}
                assert by_step[step] == moved
        assert by_step[10].total > 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items()), "the model itself is not trained"
    with pytest.raises(nofm.NofmError, match="needs 10 batches, got 3"):
        nofm.sad_of_forwards(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), lambda m, b: m(b[0]).sum(), batches[:3])


def plain_sgd_step(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, sparse: bool) -> None:
    """Eq. 3 without any of the library's layers: gradients at the (masked) weights, applied to the dense ones."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    used = dict(weights)
    for name in ("0.weight", "3.weight") if sparse else ():
        used[name] = torch.where(nofm.mask(weights[name], "1:16"), weights[name], 0.0)
    used = {name: w.requires_grad_() for name, w in used.items()}
    loss = F.cross_entropy(torch.func.functional_call(model, used, (x,)), y)
    gradients = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name].detach() - 0.5 * gradients[name])


def test_printed_it_says_what_it_holds():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nofm.sparsify_(model, "2:4", preset="all")
    sad = nofm.SAD(model)
    assert repr(sad) == "SAD(2 layers, nothing recorded)"
    for step in (0, 10, 20):
        sad.record(step)
    assert repr(sad) == "SAD(2 layers, 3 records, steps 0 to 20)"
