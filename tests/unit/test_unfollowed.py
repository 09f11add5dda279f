"""Layers that become sparse when a method is attached already are not followed by it, and whoever makes them so is told."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import nofm

SAID = (
    "{} sparse in a model that SRSTE is attached to already. It follows the layers that were sparse then, and takes no part in training "
    "{}: call sparsify_ before attach, or detach() and attach again; if {} to have a method of {} own, attach that"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def sparse(model: nn.Module) -> None:
    nofm.sparsify_(model, "2:4", preset="all")


def attached() -> tuple[Net, torch.optim.Optimizer, nofm.Handle]:
    model = Net()
    sparse(model.body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, nofm.attach(nofm.SRSTE(0.5), model, optimizer)


def warned(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    assert {warning.filename for warning in caught} <= {__file__}, "it points at who has called it"
    return [str(warning.message) for warning in caught]


def test_a_layer_that_is_plain_for_a_while_stays_with_its_method() -> None:
    """Another method, of a model around it, does not take it over: that one does not train it."""
    model = Net()
    sparse(model.body[0])
    optimizer = torch.optim.SGD(model.body[0].parameters(), lr=0.5)
    handle = nofm.attach(nofm.SRSTE(0.5), model.body[0], optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nofm.fold_(model.body[0])
        sparse(model.head[0])
        around = nofm.attach(nofm.STE(), model, torch.optim.SGD(model.parameters(), lr=0.5))
        sparse(model.body[0])
    with pytest.raises(nofm.OptimizerError, match="attached already"):
        nofm.attach(nofm.STE(), model.body[0], torch.optim.SGD(model.body[0].parameters(), lr=0.5))
    around.detach()
    handle.detach()


def test_layers_that_become_sparse_after_attach_are_named() -> None:
    model, optimizer, handle = attached()
    assert warned(lambda: sparse(model.head[0])) == [SAID.format("head.0 becomes", "it", "it is", "its")]
    assert warned(lambda: sparse(model.head[1:3])) == [SAID.format("head.1, head.2 become", "them", "they are", "their")]
    # What it says is so: those that were sparse before decay, the others do not; and what it tells to do helps.
    before = {site.name: site.weight.detach().clone() for site in nofm.sites(model)}
    for site in nofm.sites(model):
        site.weight.grad = torch.zeros_like(site.weight)
    optimizer.step()
    moved = {site.name for site in nofm.sites(model) if not torch.equal(site.weight, before[site.name])}
    assert moved == {"body.0", "body.1.0", "body.1.1"}
    handle.detach()
    assert warned(lambda: nofm.attach(nofm.SRSTE(0.5), model, optimizer)) == []
    optimizer.step()
    assert all(not torch.equal(site.weight, before[site.name]) for site in nofm.sites(model))


def test_many_are_counted() -> None:
    model, _optimizer, _handle = attached()
    assert warned(lambda: sparse(model.head)) == [SAID.format("head.0, head.1, head.2 and 1 more become", "them", "they are", "their")]


def test_a_part_that_came_later_is_a_part_of_it() -> None:
    model, _optimizer, _handle = attached()
    model.body[1].append(nn.Sequential(nn.Linear(16, 16)))
    assert warned(lambda: sparse(model.body[1][-1])) == [SAID.format("body.1.2.0 becomes", "it", "it is", "its")]


def test_a_model_that_was_made_for_attach_alone_is_remembered_by_its_parts() -> None:
    model = Net()
    sparse(model.body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _handle = nofm.attach(nofm.SRSTE(0.5), nn.ModuleList([model.body, model.head]), optimizer)
    assert warned(lambda: sparse(model.head[0])) == [SAID.format("0 becomes", "it", "it is", "its")]


def test_a_whole_model_that_was_made_plain_meanwhile() -> None:
    model, _optimizer, _handle = attached()
    nofm.densify_(model)
    assert warned(lambda: nofm.sparsify_(model, {"body.*": "2:4", "head.3": "2:4"})) == [
        SAID.format("head.3 becomes", "it", "it is", "its")
    ]


def detached(model: Net, optimizer: torch.optim.Optimizer, handle: nofm.Handle) -> Net:
    handle.detach()
    model.kept = optimizer, handle
    return model


def copied(model: Net, *_: object) -> Net:
    return copy.deepcopy(model)


def forgotten(model: Net, optimizer: torch.optim.Optimizer, handle: nofm.Handle) -> Net:
    return model


@pytest.mark.parametrize("then", [detached, copied, forgotten])
def test_where_no_method_is_at_work_nothing_is_said(then: Callable[..., Net]) -> None:
    gc.disable()  # what nobody has any more may be there still
    try:
        model = then(*attached())
        assert warned(lambda: sparse(model.head)) == []
    finally:
        gc.enable()


def test_where_nothing_new_is_in_the_model_of_a_method_nothing_is_said() -> None:
    model, optimizer, _handle = attached()
    other = Net()
    assert warned(lambda: sparse(other)) == []
    with pytest.raises(nofm.LayerError, match="sparse already"):
        warned(lambda: sparse(model))
    # A part with a method of its own: the first one was attached to the other part alone.
    apart = Net()
    sparse(apart.body)
    optimizer = torch.optim.SGD(apart.parameters(), lr=0.5)
    _first = nofm.attach(nofm.SRSTE(0.5), apart.body, optimizer)
    assert warned(lambda: sparse(apart.head)) == []
    assert warned(lambda: nofm.attach(nofm.STE(), apart.head, optimizer)) == []
    assert len(list(nofm.sites(apart))) == 7


def test_layers_that_are_sparse_again_are_told_by_the_next_step() -> None:
    model, optimizer, _handle = attached()
    nofm.densify_(model.body)
    assert warned(lambda: sparse(model.body)) == []
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(nofm.OptimizerError, match="made plain and sparse again"):
        optimizer.step()
