"""Errors come through a process boundary as they are. One that does not leaves a pool waiting for its worker for ever."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import pickle
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

import nofm
from nofm.engine.precision import NonFiniteLossError
from nofm.errors import MaskDivergenceError, NofmError, NonFiniteWeightError, NotCopiedError
from nofm.report.errors import ReportError

OWN: dict[type[NofmError], tuple[Any, ...]] = {  # what those are made of that make their message themselves, and their subclasses
    NonFiniteWeightError: ("layer.weight", (1, 2), float("inf"), 7, "Lower lambda"),
    NonFiniteLossError: (3, float("inf")),
    MaskDivergenceError: (["a", "b"], [1, 3]),
    NotCopiedError: (),
    ReportError: (Path("runs/a/events.jsonl"), "is no JSON", 3),
    NofmError: ("layer4.0: does not divide",),
}


def kinds(of: type[NofmError] = NofmError) -> set[type[NofmError]]:
    return {of}.union(*map(kinds, of.__subclasses__()))


def all_kinds() -> list[type[NofmError]]:
    for module in pkgutil.walk_packages(nofm.__path__, "nofm."):
        if not module.name.endswith("__main__") and ".kernels.triton" not in module.name:
            importlib.import_module(module.name)
    return sorted(kinds(), key=lambda kind: kind.__qualname__)


def made(kind: type[NofmError]) -> NofmError:
    return kind(*next(OWN[each] for each in kind.__mro__ if each in OWN))


@pytest.mark.parametrize(
    "again", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
def test_every_error_is_the_same_after_it(again) -> None:
    for kind in all_kinds():
        error = made(kind)
        error.add_note("in seed 3")
        other = again(error)
        assert (type(other), str(other), other.args, vars(other)) == (kind, str(error), error.args, vars(error)), kind


def diverge(lr: float) -> None:
    model = torch.nn.Linear(8, 8)
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    nofm.attach(nofm.STE(), model, optimizer)
    model.weight.grad = torch.full_like(model.weight, 1e30)
    optimizer.step()


def test_a_worker_that_diverges_says_so() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool, pytest.raises(NonFiniteWeightError) as caught:
        pool.apply_async(diverge, (1e30,)).get(timeout=120)
    assert caught.value.parameter == "weight"
