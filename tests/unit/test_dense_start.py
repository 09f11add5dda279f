"""SR-STE with a dense or gradual start: by pencil, step by step, and from a state that was saved before, at and after the change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nofm
from nofm.errors import OptimizerError

START = [[4.0, 3.0, 2.0, 1.0]]


def made(begin_at: int = 2, placement: str = "gradient"):
    """One output, one group of 2:4, and a loss that is its output: the gradient is the input."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    model[0].weight.data = torch.tensor(START)
    nofm.sparsify_(model, {"0": "2:4"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, nofm.attach(nofm.SRSTE(decay=0.4, begin_at=begin_at, placement=placement), model, optimizer)


def step(model, optimizer) -> float:
    optimizer.zero_grad()
    out = model(torch.tensor([[0.2, 0.2, 0.2, 0.2]])).sum()
    out.backward()
    optimizer.step()
    return out.item()


@pytest.mark.parametrize("placement", ["gradient", "decoupled", "backward"])
def test_dense_then_sparse_by_hand(placement):
    model, optimizer, handle = made(placement=placement)
    # Two steps of plain SGD on all weights: each falls by lr * 0.2 = 0.1.
    assert step(model, optimizer) == pytest.approx(0.2 * 10)
    assert step(model, optimizer) == pytest.approx(0.2 * (10 - 0.4))
    assert model[0].weight.tolist() == [pytest.approx([3.8, 2.8, 1.8, 0.8])]
    assert handle.phase == "train"
    # From now on two of four count, and the others shrink by lr * decay = 0.2 of themselves too.
    assert step(model, optimizer) == pytest.approx(0.2 * (3.8 + 2.8))
    assert model[0].weight.tolist() == [pytest.approx([3.7, 2.7, 1.8 * 0.8 - 0.1, 0.8 * 0.8 - 0.1])]


def test_the_step_of_the_change_is_the_hosts():
    _, _, handle = made(begin_at=3)
    assert [handle.method.phase(number) for number in (1, 2, 3, 4, 5)] == ["dense", "dense", None, "train", "train"]
    assert nofm.SRSTE().phase(1) == "train"


def ramped(placement: str = "gradient"):
    """One output, one group of 1:8, whose weights are 8 to 1."""
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    model[0].weight.data = torch.tensor([[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    nofm.sparsify_(model, {"0": "1:8"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    method = nofm.SRSTE(decay=0.4, ramp_at=1, begin_at=4, placement=placement)
    return model, optimizer, nofm.attach(method, model, optimizer)


@pytest.mark.parametrize("placement", ["gradient", "decoupled"])
def test_fewer_and_fewer_weights_by_hand(placement):
    """8, then 8^(3/4), 8^(1/2) and 8^(1/4), rounded, then 1. What does not count shrinks by lr * decay = 0.2 of itself; all fall by 0.1."""
    model, optimizer, _ = ramped(placement)
    weights = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    for kept in (8, 5, 3, 2, 1, 1):
        optimizer.zero_grad()
        out = model(torch.full((1, 8), 0.2)).sum()
        assert out.item() == pytest.approx(0.2 * sum(weights[:kept]))
        out.backward()
        optimizer.step()
        weights = [w - 0.1 - (0.2 * w if place >= kept else 0) for place, w in enumerate(weights)]
        assert model[0].weight.tolist() == [pytest.approx(weights)]
    assert nofm.fold_(model)[0].weight.count_nonzero() == 1


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [("1:16", [8, 4, 2, 1]), ("2:4", [3, 3, 3, 2]), ("1:4", [3, 2, 2, 1]), ("1:2", [2, 2, 2, 1]), ("2:8", [6, 4, 3, 2])],
)
def test_groups_narrow_by_equal_factors(pattern, kept):
    model = nn.Sequential(nn.Linear(16, 2))
    nofm.sparsify_(model, {"0": pattern})
    handle = nofm.attach(nofm.SRSTE(ramp_at=2, begin_at=11), model, torch.optim.SGD(model.parameters(), lr=0.1))
    (site,) = nofm.sites(model)
    seen = []
    for number in range(13):
        handle.method.go_on([site], number)
        seen.append(int(site.seen().count_nonzero()) // 2 // (16 // site.grouping.pattern.m))
    m = site.grouping.pattern.m
    assert seen == [m] * 2 + [kept[0]] * 3 + [kept[1]] * 3 + [kept[2]] * 3 + [kept[3]] * 2
    assert not site.keeps_more


def test_steps_in_which_groups_narrow_are_the_hosts():
    phases = [nofm.SRSTE(ramp_at=1, begin_at=7).phase(number) for number in range(1, 10)]
    assert phases == [None, "narrowing 1", None, "narrowing 2", None, "narrowing 3", None, "train", "train"]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_saved_state_knows_how_far_the_groups_have_narrowed(steps):
    model, optimizer, handle = ramped()
    inputs = torch.full((1, 8), 0.2)

    def outputs(model, optimizer, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.zero_grad()
            out = model(inputs).sum()
            out.backward()
            optimizer.step()
            found.append(out.item())
        return found

    outputs(model, optimizer, steps)
    other, its_optimizer, its_handle = ramped()
    other.load_state_dict(model.state_dict())
    its_handle.load_state_dict(handle.state_dict())
    assert outputs(other, its_optimizer, 4) == outputs(model, optimizer, 4)


def two_layers():
    model = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False), nn.Linear(16, 4, bias=False))
    nofm.sparsify_(model, {"0": "1:16", "1": None, "2": "1:16"})
    return model, list(nofm.sites(model))


def test_layers_go_on_by_the_steps_of_their_own_optimizers():
    def made():
        model, sites = two_layers()
        optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
        return sites, optimizers, nofm.attach(nofm.SRSTE(ramp_at=0, begin_at=6), model, optimizers), model

    sites, optimizers, handle, model = made()
    for number in range(6):
        model(torch.randn(2, 16)).sum().backward()
        for optimizer in optimizers if number < 2 else optimizers[:1]:
            optimizer.step()
    assert [str(site.seen_grouping.pattern) for site in sites] == ["1:16", "4:16"]
    its_sites, _, its_handle, other = made()
    other.load_state_dict(model.state_dict())
    its_handle.load_state_dict(handle.state_dict())
    assert [str(site.seen_grouping.pattern) for site in its_sites] == ["1:16", "4:16"]


def test_weights_that_rest_narrow_with_the_others():
    model, sites = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nofm.attach(nofm.SRSTE(ramp_at=1, begin_at=4), model, optimizer)
    model[0].weight.requires_grad_(False)
    for kept in (8, 4, 2, 1):
        optimizer.zero_grad()
        model(torch.randn(2, 16)).sum().backward()
        optimizer.step()
        assert [int(site.seen().count_nonzero()) // 4 for site in sites] == [kept, kept]


def test_who_counts_by_the_pattern_says_what_layers_compute_with_until_then():
    model, _ = two_layers()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    before = str(nofm.summary(model)), str(nofm.cost(model, (1, 16)))
    nofm.attach(nofm.SRSTE(ramp_at=1, begin_at=4), model, optimizers)
    counted = "pattern keeps ({}); what is kept is counted by the pattern"
    said = [f"now 2 of 2 sparse layers compute with more weights than their {counted.format(now)}" for now in ("dense", "8:16", "4:16")]
    said += [f"now 1 of 2 sparse layers computes with more weights than its {counted.format('4:16')}"]
    for sentence, stepping in zip(said, [optimizers, optimizers, optimizers[:1] * 2, optimizers[1:] * 2], strict=True):
        assert (str(nofm.summary(model)), str(nofm.cost(model, (1, 16)))) == tuple(f"{text}\n{sentence}" for text in before)
        for optimizer in stepping:
            optimizer.zero_grad()
            model(torch.randn(2, 16)).sum().backward()
            optimizer.step()
    assert (str(nofm.summary(model)), str(nofm.cost(model, (1, 16)))) == before


def test_a_single_layer_is_not_counted():
    model, *_ = made()
    said = "now the sparse layer computes with more weights than its pattern keeps (dense); what is kept is counted by the pattern"
    assert (nofm.summary(model).now, nofm.cost(model, (1, 4)).now) == (said, said)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_saved_state_knows_whether_the_start_is_over(steps):
    model, optimizer, handle = made()
    for _ in range(steps):
        step(model, optimizer)
    other, its_optimizer, its_handle = made()
    other.load_state_dict(model.state_dict())
    its_handle.load_state_dict(handle.state_dict())
    assert [step(other, its_optimizer) for _ in range(3)] == [step(model, optimizer) for _ in range(3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"begin_at": -1}, "begin_at=-1"),
        ({"begin_at": 2.5}, "begin_at=2.5"),
        ({"ramp_at": 0}, "ramp_at=0: needs a later begin_at, where the pattern is reached"),
        ({"ramp_at": 5, "begin_at": 5}, "ramp_at=5: must be below begin_at, 5"),
        ({"ramp_at": -1, "begin_at": 5}, "ramp_at=-1"),
        ({"ramp_at": 2, "begin_at": 5, "placement": "backward"}, "not in the released code"),
    ],
)
def test_a_start_that_means_nothing_is_refused(options, message):
    with pytest.raises(OptimizerError, match=message):
        nofm.SRSTE(**options)
