"""SR-STE with a dense start: by pencil, step by step, and from a state that was saved before, at and after the change."""

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
        ({"begin_at": 5, "decay": "auto"}, 'no effect with decay="auto"'),
    ],
)
def test_a_start_that_means_nothing_is_refused(options, message):
    with pytest.raises(OptimizerError, match=message):
        nofm.SRSTE(**options)
