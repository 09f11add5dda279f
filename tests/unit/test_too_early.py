"""A method that is folded, packed or detached before it has finished says so: what is shipped then is not what was asked for."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import nofm

REST = "It is {} before that: train until then, or attach it with options that fit the steps that you take"
SEARCH = (
    'SRSTE has taken 3 steps, and its search for lambda (decay="auto") ends at step {0} (probe={0}; give a tenth of the steps that you '
    "train): until then lambda is not settled, and every other output of each layer has none. "
)
UNFINISHED = {
    "search": (nofm.SRSTE("auto", probe=8), "2:4", SEARCH.format(8)),
    "search as long as usual": (nofm.SRSTE("auto"), "2:4", SEARCH.format(1000)),
    "GMP": (nofm.GMP(0.5, end_at=4, every=1), "1:1", "GMP has taken 3 steps, and it comes to sparsity 0.5 at step 4 (end_at). "),
    "lottery": (
        nofm.LotteryTicket(0.5, rounds=2, every=3, rewind_to=1),
        "1:1",
        "LotteryTicket has taken 3 steps, and its last pruning is at step 5 (every, rounds). ",
    ),
    "lottery, back at its initial weights": (
        nofm.LotteryTicket(0.5, rounds=1, every=3),
        "1:1",
        "LotteryTicket has taken 3 steps, and its ticket, which its last pruning has taken back to step 0, trains until step 6 "
        "(every, rounds). ",
    ),
}
FINISHED = {
    "search": (nofm.SRSTE("auto", probe=8), "2:4", 8),
    "search with a target": (nofm.SRSTE("auto", probe=8, target=0.01, begin_at=2), "2:4", 10),
    "gradual start": (nofm.SRSTE(ramp_at=0, begin_at=3), "2:4", 3),
    "no start": (nofm.SRSTE(), "2:4", 1),
    "ASP": (nofm.ASP(prune_at=2), "2:4", 2),
    "Dense": (nofm.Dense(), "2:4", 0),
    "GMP": (nofm.GMP(0.5, end_at=4, every=1), "1:1", 4),
    "SNIP": (nofm.SNIP(0.5, batches=2), "1:1", 2),
    "lottery": (nofm.LotteryTicket(0.5, rounds=2, every=3, rewind_to=1), "1:1", 7),
    "RigL, which rewires on": (nofm.RigL(0.5, every=4, end_at=9), "1:1", 1),
}


def trained(method: nofm.Method, pattern: str, steps: int) -> tuple[nn.Module, nofm.Handle]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nofm.sparsify_(model, pattern, preset="all")
    handle = nofm.attach(method, model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
    return model, handle


def warned(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    assert {warning.filename for warning in caught} <= {__file__}, "it points at who has called it"
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("method", "pattern", "said"), UNFINISHED.values(), ids=UNFINISHED)
def test_what_has_not_finished_says_so_once_however_it_ends(method, pattern, said, tmp_path: Path) -> None:
    model, handle = trained(method, pattern, steps=3)
    if pattern != "1:1":
        assert warned(lambda: nofm.save_packed(model, tmp_path / "packed.safetensors")) == [said + REST.format("packed")]
    assert warned(lambda: nofm.fold_(model)) == [said + REST.format("folded")]
    assert warned(lambda: handle.detach()) == []
    model, handle = trained(method, pattern, steps=3)
    assert warned(lambda: handle.detach()) == [said + REST.format("detached")]
    assert warned(lambda: handle.detach()) == []
    assert warned(lambda: nofm.fold_(model)) == []


def test_where_warnings_are_errors_a_method_is_detached_all_the_same() -> None:
    model, handle = trained(nofm.ASP(prune_at=9), "2:4", steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="It is detached before that"):
            handle.detach()
        handle.detach()
        nofm.attach(nofm.STE(), model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("method", "pattern", "steps"), FINISHED.values(), ids=FINISHED)
def test_what_has_finished_says_nothing(method, pattern, steps) -> None:
    model, handle = trained(method, pattern, steps)
    assert warned(lambda: handle.detach()) == []
    assert warned(lambda: nofm.fold_(model)) == []


def test_a_search_with_a_target_spares_no_output() -> None:
    _, handle = trained(nofm.SRSTE("auto", probe=8, target=0.01), "2:4", steps=3)
    (said,) = warned(lambda: handle.detach())
    assert "until then lambda is not settled. It is detached before that" in said


STARTS = {
    "dense": (nofm.SRSTE("auto", begin_at=4), "SRSTE has taken 1 step, and its dense start lasts until step 4 (begin_at). "),
    "ASP": (nofm.ASP(prune_at=4), "ASP has taken 1 step, and it prunes at step 4 (prune_at). "),
}


@pytest.mark.parametrize(("method", "said"), STARTS.values(), ids=STARTS)
def test_a_start_that_is_detached_says_so(method, said) -> None:
    """Layers are pruned then, in a moment in which they were not trained for it."""
    _, handle = trained(method, "2:4", steps=1)
    assert warned(lambda: handle.detach()) == [said + REST.format("detached")]


def test_snip_before_it_prunes() -> None:
    _, handle = trained(nofm.SNIP(0.5, batches=2), "1:1", steps=1)
    assert warned(lambda: handle.detach()) == ["SNIP has taken 1 step, and it prunes at step 2 (batches). " + REST.format("detached")]


def test_a_copy_searches_for_nothing() -> None:
    """An average that was made during a search has no part in it, and may be folded whenever its user likes."""
    model, handle = trained(nofm.SRSTE("auto", probe=8), "2:4", steps=3)
    assert warned(lambda: nofm.fold_(copy.deepcopy(model))) == []
    assert handle.step == 3


def test_an_attach_that_fails_says_nothing_of_an_end() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    nofm.sparsify_(model, "2:4", preset="all")
    apart = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]

    def fails() -> None:
        with pytest.raises(nofm.OptimizerError, match="2 optimizers step apart"):
            nofm.attach(nofm.SRSTE("auto"), model, apart)

    assert warned(fails) == []
