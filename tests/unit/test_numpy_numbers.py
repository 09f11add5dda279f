"""Numbers of numpy's as options: what a sweep over np.logspace or a row of a table gives. They are Python's own from the beginning, so
that what is printed, saved and compared is the same as without numpy."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nofm
from nofm.plain import plain_number


class Four(IntEnum):
    FOUR = 4


@pytest.mark.parametrize(
    ("given", "plain"),
    [(np.float32(0.5), 0.5), (np.float64(2e-4), 2e-4), (np.float16(-3), -3.0), (np.int64(4), 4), (np.uint8(7), 7), (np.bool_(True), True)],
    ids=repr,
)
def test_a_number_is_pythons_own(given, plain):
    found = plain_number(given)
    assert (found, type(found)) == (plain, type(plain))


@pytest.mark.parametrize("value", [True, 3, 2.5, "2:4", None, Four.FOUR, np.array([1.0, 2.0]), np.str_("a"), torch.tensor(1.0), 1j])
def test_anything_else_is_as_it_is(value):
    assert plain_number(value) is value


# With numbers of numpy's, with plain ones, and a pattern.
METHODS: dict[str, Callable[[], tuple[nofm.Method, nofm.Method, str]]] = {
    "SRSTE": lambda: (
        nofm.SRSTE(np.float64(2e-4), begin_at=np.int64(8), ramp_at=np.int16(2)),
        nofm.SRSTE(2e-4, begin_at=8, ramp_at=2),
        "2:4",
    ),
    "SRSTE, fp32": lambda: (nofm.SRSTE(np.float32(0.25)), nofm.SRSTE(0.25), "2:4"),
    "SRSTE, auto": lambda: (
        nofm.SRSTE("auto", probe=np.int64(9), target=np.float32(0.25)),
        nofm.SRSTE("auto", probe=9, target=0.25),
        "2:4",
    ),
    "ASP": lambda: (nofm.ASP(np.int32(3)), nofm.ASP(3), "2:4"),
    "GMP": lambda: (nofm.GMP(np.float32(0.75), end_at=np.int64(9)), nofm.GMP(0.75, end_at=9), "1:1"),
    "STE": lambda: (nofm.UnstructuredSTE(np.float32(0.75)), nofm.UnstructuredSTE(0.75), "1:1"),
    "DNW": lambda: (nofm.DNW(np.float32(0.75)), nofm.DNW(0.75), "1:1"),
    "SNIP": lambda: (nofm.SNIP(np.float32(0.75), batches=np.int64(2)), nofm.SNIP(0.75, batches=2), "1:1"),
    "STR": lambda: (nofm.STR(initial=np.float16(-3), decay=np.float32(0.5)), nofm.STR(initial=-3.0, decay=0.5), "1:1"),
    "ticket": lambda: (
        nofm.LotteryTicket(np.float32(0.75), rounds=np.int64(2), every=np.int64(5), rewind_to=np.int64(1)),
        nofm.LotteryTicket(0.75, rounds=2, every=5, rewind_to=1),
        "1:1",
    ),
    "RigL": lambda: (nofm.RigL(np.float32(0.75), end_at=np.int64(900), seed=np.int64(3)), nofm.RigL(0.75, end_at=900, seed=3), "1:1"),
    "SET": lambda: (nofm.SET(np.float32(0.75), every=np.int64(5), drop=np.float32(0.25)), nofm.SET(0.75, every=5, drop=0.25), "1:1"),
    "SNFS": lambda: (nofm.SNFS(np.float32(0.75), smoothing=np.float32(0.5)), nofm.SNFS(0.75, smoothing=0.5), "1:1"),
    "DSR": lambda: (
        nofm.DSR(np.float32(0.75), threshold=np.float32(0.5), tolerance=np.float32(0.25), drop=np.float32(0.125)),
        nofm.DSR(0.75, threshold=0.5, tolerance=0.25, drop=0.125),
        "1:1",
    ),
    "Deep Rewiring": lambda: (nofm.DeepRewiring(np.float32(0.75), l1=np.float32(0.5)), nofm.DeepRewiring(0.75, l1=0.5), "1:1"),
}


def attached(method: nofm.Method, pattern: str) -> nofm.Handle:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    nofm.sparsify_(model, pattern, preset="all")
    return nofm.attach(method, model, torch.optim.SGD(model.parameters(), lr=0.1))


def reloaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("case", METHODS.values(), ids=METHODS)
def test_a_method_of_them_is_that_of_pythons_own(case):
    given, plain, pattern = case()
    assert (repr(given), given) == (repr(plain), plain)
    kinds = [[type(getattr(method, option.name)) for option in fields(method)] for method in (given, plain)]
    assert kinds[0] == kinds[1]
    state = attached(given, pattern).state_dict()
    attached(plain, pattern).load_state_dict(reloaded(state))
    assert json.loads(json.dumps(state["options"])) == attached(plain, pattern).state_dict()["options"]


def test_what_is_no_step_or_share_is_still_refused():
    with pytest.raises(nofm.OptimizerError, match=r"end_at=9\.0 must be a whole number"):
        nofm.GMP(end_at=np.float64(9))
    with pytest.raises(nofm.OptimizerError, match=r"sparsity=1\.5 must be 0 < sparsity < 1"):
        nofm.GMP(np.float32(1.5), end_at=9)
    with pytest.raises(nofm.OptimizerError, match="GMP needs end_at"):
        nofm.GMP(end_at=np.int64(0))
    with pytest.raises(nofm.OptimizerError, match="RigL needs end_at"):
        nofm.RigL(end_at=np.int64(0))
    with pytest.raises(nofm.OptimizerError, match=r"decay=array\(\[1\., 2\.\]\) is no finite number"):
        nofm.SRSTE(np.array([1.0, 2.0]))


@dataclass(frozen=True)
class Own(nofm.Method):
    """That checks its options, and does not think of numpy."""

    every: int = 3
    parts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert self.every > 0

    def begun_with(self) -> tuple[str, ...]:
        return ("every", "parts")


@dataclass(frozen=True)
class Computed(nofm.Method):
    """That makes one option of another."""

    every: int = 3
    half: float = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "half", self.every / 2)


def test_a_method_of_ones_own_may_compute_an_option():
    assert (Computed(np.int64(5)).every, Computed(np.int64(5)).half) == (5, 2.5)


def test_a_method_of_ones_own_can_be_saved_with_them():
    state = reloaded(attached(Own(np.int64(5), (np.float32(0.5), np.int64(2))), "2:4").state_dict())
    assert repr(state["options"]) == "{'every': 5, 'parts': (0.5, 2)}"
    attached(Own(5, (0.5, 2)), "2:4").load_state_dict(state)
    with pytest.raises(nofm.OptimizerError, match=r"this state is of Own\(every=5\), the attached one has every=6"):
        attached(Own(np.int64(6), (0.5, 2)), "2:4").load_state_dict(state)


@pytest.mark.parametrize("given", [(2, 4), (np.int64(2), np.int64(4))], ids=repr)
def test_a_pattern_of_two_numbers_is_told_how_it_is_written(given):
    with pytest.raises(nofm.PatternError, match=r'a pattern is one text, and 2 values are given \(did you mean "2:4"\?\)'):
        nofm.Pattern(*given)
    with pytest.raises(nofm.PatternError, match=r'is no pattern \(did you mean "2:4"\?\): a pattern is "N:M"'):
        nofm.Pattern(given)
    with pytest.raises(nofm.PatternError, match="3 values are given: a pattern is"):
        nofm.Pattern(*given, 8)


def test_where_else_numbers_are_asked_for():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    assert nofm.allocate_patterns(model, np.float32(0.25)) == nofm.allocate_patterns(model, 0.25)
    nofm.sparsify_(model, "2:4", preset="all")
    assert nofm.cost(model, (np.int64(2), np.int64(16))) == nofm.cost(model, (2, 16))
    weight = model[0].weight.detach()
    assert torch.equal(nofm.mask(weight, "2:4", axis=np.int64(0)), nofm.mask(weight, "2:4", axis=0))
    sad = nofm.SAD(model, keep=np.int64(1))
    for step in np.arange(1, 3):
        sad.record(step)
    assert [type(step) for step in (*sad.steps, *sad.flip_rate())] == [int, int, int]
    packing = nofm.pack_(nofm.fold_(model).eval(), (np.int64(3), np.int64(16)))
    assert {row.input for row in packing.rows} == {(3, 16)}
