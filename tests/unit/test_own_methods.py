"""Methods of a user's own: the page that shows how to write one, and what `attach` says of those whose states could not be trusted."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from enum import Enum, IntEnum
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import nofm
from nofm import ste

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


@cache
def blocks() -> tuple[str, ...]:
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == 2
    return tuple(found)


def random_masks(**options: int) -> nofm.Method:
    """The method of the page."""
    given: dict[str, Any] = {"__name__": "page"}
    exec(compile(blocks()[0], "docs/methods.md", "exec", dont_inherit=True), given)
    method: nofm.Method = given["RandomMasks"](**options)
    return method


# ---- the page ----


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"__name__": "page"}
    for block in blocks():
        exec(compile(block, "docs/methods.md", "exec", dont_inherit=True), given)
    assert "2 of 2 weights are N:M" in capsys.readouterr().out


def network(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(72, 10), nn.Tanh(), nn.Linear(10, 3))
    nofm.sparsify_(model, "2:4", preset="all", **options)
    return model


def trained(first: int, last: int, method: nofm.Method, states: list | None = None, **options: Any) -> tuple[nn.Module, list]:
    """The network after the steps from `first` to `last`, and its states, also that before each step."""
    model = network(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = (model, optimizer, nofm.attach(method, model, optimizer))
    for part, state in zip(parts, states or (), strict=states is not None):
        part.load_state_dict(state)
    along = []
    for i in range(first, last):
        along.append(
            torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, [p.state_dict() for p in parts])
        )
        optimizer.zero_grad()
        model(torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimizer.step()
    return model, along


@pytest.mark.parametrize("options", [{"pad": True}, {"pad": True, "axis": "flat"}], ids=["inputs", "flat"])
def test_the_example_resumes_bitwise_from_every_step(options):
    method = random_masks(every=3, seed=1)
    model, along = trained(0, 8, method, **options)
    for step, states in enumerate(along):
        resumed, _ = trained(step, 8, method, states, **options)
        for site, again in zip(nofm.sites(model), nofm.sites(resumed), strict=True):
            assert torch.equal(site.weight, again.weight), (step, site.key)
            assert torch.equal(site.mask(), again.mask()), (step, site.key)


@pytest.mark.parametrize("options", [{"pad": True}, {"pad": True, "axis": "flat"}], ids=["inputs", "flat"])
def test_the_example_draws_masks_of_the_layers_own_pattern(options):
    _, along = trained(0, 8, random_masks(every=3), **options)
    masks = [states[2]["masks"] for states in along]
    changes = [step for step in range(1, 8) if any(not torch.equal(masks[step][key], masks[step - 1][key]) for key in masks[0])]
    assert changes == [3, 6]
    model, _ = trained(0, 4, random_masks(every=3), **options)
    for site in nofm.sites(model):
        assert int(site.mask().sum()) == site.grouping.kept(site.weight.shape), site.key
        assert int(site.grouping.violations(site.seen())) == 0, site.key
        assert not torch.equal(site.mask(), site.grouping.mask(site.weight)), site.key  # by chance, not by weights
    nofm.fold_(model)


def test_the_example_is_of_its_seed():
    _, along = trained(0, 4, random_masks(every=3), pad=True)
    with pytest.raises(nofm.OptimizerError, match=r"RandomMasks\(seed=0\), the attached one has seed=1"):
        trained(3, 4, random_masks(every=3, seed=1), along[3], pad=True)
    with pytest.warns(UserWarning, match=r"RandomMasks\(every=3\), the attached one has every=9, which holds from step 3 on"):
        trained(3, 4, random_masks(every=9), along[3], pad=True)


# ---- options ----


def attached(method: nofm.Method) -> nofm.Handle:
    model = network(pad=True)
    return nofm.attach(method, model, torch.optim.SGD(model.parameters(), lr=0.1))


class Plain(nofm.Method):
    def __init__(self, every: int) -> None:
        self.every = every

    def begun_with(self) -> tuple[str, ...]:
        return ("every",)


class Undecorated(nofm.Method):
    every: int = 4


class NotGiven(nofm.SRSTE):
    """Its own default is not the one that it trains with."""

    decay = 0.5


@dataclass(frozen=True)
class ByHand(nofm.Method):
    def __init__(self, every: int) -> None:
        object.__setattr__(self, "every", every)


@dataclass(frozen=True)
class GivenOnly(nofm.Method):
    every: InitVar[int] = 4

    def __post_init__(self, every: int) -> None:
        object.__setattr__(self, "every", every)


class BelowUndecorated(Undecorated):
    """Adds nothing to a class that is refused."""


@dataclass(frozen=True)
class Untyped(nofm.SRSTE):
    """A dataclass, and yet its own default is not the one that it trains with."""

    decay = 0.5
    every: int = 4


@dataclass(frozen=True)
class BelowUntyped(Untyped):
    """Adds nothing to a class that is refused."""


LOST: dict[str, Callable[[], nofm.Method]] = {
    "an __init__": lambda: Plain(4),
    "annotations": Undecorated,
    "a default of an option that it inherits": NotGiven,
    "an __init__ in a dataclass": lambda: ByHand(4),
    "given to __post_init__": GivenOnly,
    "below": BelowUndecorated,
    "a default without a type": Untyped,
    "below a default without a type": BelowUntyped,
}


@pytest.mark.parametrize("make", LOST.values(), ids=LOST)
def test_options_that_no_state_would_hold_are_refused(make):
    method = make()
    name = "decay" if isinstance(method, nofm.SRSTE) else "every"
    with pytest.raises(nofm.OptimizerError) as refused:
        attached(method)
    assert str(refused.value) == (
        f"{type(method).__name__} keeps {name} outside of its dataclass fields, so that its states would not hold what is given there; put "
        f"@dataclass(frozen=True) above the class, write each option as a field such as {name}: int = 1, and leave out __init__ "
        "(__post_init__ may check them)"
    )


class Renamed(nofm.SRSTE):
    """Adds no options."""

    kind: ClassVar[str] = "mild"


class Mild(nofm.SRSTE):
    """An __init__ that only chooses among the options there are."""

    def __init__(self, strength: float) -> None:
        super().__init__(decay=strength / 10)


@dataclass(frozen=True)
class WithTable(nofm.Method):
    """Works something out from its options."""

    every: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", range(self.every))


class RenamedTable(WithTable):
    """Adds no options to what works something out."""


@dataclass(frozen=True)
class Redeclared(Undecorated):
    every: int = 5


@dataclass(frozen=True, slots=True)
class Slotted(nofm.SRSTE):
    """Has places for all fields, those that it inherits too."""

    every: int = 6


@dataclass(frozen=True)
class Retyped(Untyped):
    decay: float = 0.7


KEPT: dict[str, tuple[Callable[[], nofm.Method], dict[str, Any]]] = {
    "a subclass": (lambda: Renamed(0.5), {"decay": 0.5}),
    "a subclass that chooses": (lambda: Mild(5.0), {"decay": 0.5}),
    "a table": (WithTable, {"every": 4}),
    "a subclass of one with a table": (RenamedTable, {"every": 4}),
    "declared again below": (Redeclared, {"every": 5}),
    "slots": (Slotted, {"every": 6}),
    "a default that is typed below": (Retyped, {"decay": 0.7, "every": 4}),
    "none": (nofm.Method, {}),
}


@pytest.mark.parametrize(("make", "options"), KEPT.values(), ids=KEPT)
def test_methods_whose_options_are_in_their_states_are_taken(make, options):
    assert options.items() <= attached(make()).state_dict()["options"].items()


@dataclass(frozen=True)
class Misspelt(nofm.Method):
    every: int = 4
    seed: int = 0
    names: ClassVar[tuple[str, ...]] = ("every", "sed")

    def begun_with(self) -> tuple[str, ...]:
        return self.names


def test_begun_with_names_options():
    with pytest.raises(nofm.OptimizerError) as refused:
        attached(Misspelt())
    assert str(refused.value) == (
        "Misspelt.begun_with() names 'sed', and Misspelt has no such option (every, seed); return a tuple of names of its fields"
    )


@dataclass(frozen=True)
class MadeBy(nofm.Method):
    made_by: Any = None
    beside: Any = None

    def begun_with(self) -> tuple[str, ...]:
        return ("made_by",)


UNSAVED = {"a pattern": nofm.Pattern("2:4"), "a method": nofm.STE(), "a function": torch.cos, "a tensor": torch.ones(2), "a dict": {"a": 1}}


@pytest.mark.parametrize("value", [*UNSAVED.values(), (1, UNSAVED["a pattern"])], ids=[*UNSAVED, "in a tuple"])
def test_what_masks_were_made_by_is_something_that_states_hold(value):
    """A state of another value would be gone on from without a word."""
    with pytest.raises(nofm.OptimizerError) as refused:
        attached(MadeBy(value))
    assert str(refused.value) == (
        f"MadeBy.begun_with() names 'made_by', which is a {type(value).__name__} here. States hold numbers, strings, booleans, None and "
        "tuples of these, so that a state of another made_by could not be told from one of this; give it as such (a pattern as "
        '"2:4", an object as the numbers that it is made of), or do not name it'
    )
    attached(MadeBy(beside=value))  # an option that nothing was made by may be anything


TUPLES = {"a tuple": (1, "a", None, (0.5, True)), "a list": [1, "a", None, [0.5, True]], "none of it": ()}


@pytest.mark.parametrize("value", TUPLES.values(), ids=TUPLES)
@pytest.mark.parametrize(
    "file", [copy.deepcopy, lambda state: state | json.loads(json.dumps({"options": state["options"]}))], ids=["", "JSON"]
)
def test_tuples_are_compared(value, file):
    state = file(attached(MadeBy(value)).state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached(MadeBy(value)).load_state_dict(state)
    with pytest.raises(nofm.OptimizerError) as refused:
        attached(MadeBy((1, "a", None, (0.5, False)))).load_state_dict(state)
    before = "()" if value == () else "(1, 'a', None, (0.5, True))"
    assert f"MadeBy(made_by={before}), the attached one has made_by=(1, 'a', None, (0.5, False)), and what" in str(refused.value)
    with pytest.warns(UserWarning, match=r"MadeBy\(beside=None\), the attached one has beside=\(1, 2\), which holds from step 0 on"):
        attached(MadeBy(value, beside=(1, 2))).load_state_dict(state)


class Kind(str, Enum):  # noqa: UP042 (a StrEnum is written as its value by itself)
    MILD = "mild"


class Level(IntEnum):
    LOW = 1


OF_OTHERS = {
    "a number of numpy": (np.float64(0.5), 0.5),
    "a string of numpy": (np.str_("mild"), "mild"),
    "an Enum of strings": (Kind.MILD, "mild"),
    "an Enum of numbers": (Level.LOW, 1),
    "a boolean": (True, True),
    "none of it": (math.nan, math.nan),
    "in tuples": ([np.float64(0.5), (Kind.MILD, math.nan)], (0.5, ("mild", math.nan))),
}


@pytest.mark.parametrize(("value", "plain"), OF_OTHERS.values(), ids=OF_OTHERS)
def test_states_hold_pythons_own_kinds(value, plain):
    """torch.load takes these only, unless it is told to trust a file with all it may do."""
    torch.save(attached(MadeBy(value)).state_dict(), file := io.BytesIO())
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    saved = state["options"]["made_by"]
    assert (type(saved), repr(saved)) == (type(plain), repr(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attached(MadeBy(value)).load_state_dict(state)
    with pytest.raises(nofm.OptimizerError, match=r"attached one has made_by=0\.25, and what"):
        attached(MadeBy(np.float64(0.25))).load_state_dict(state)


def test_a_list_that_is_changed_later_is_not_changed_in_the_state():
    given = [1, [2]]
    state = attached(MadeBy(given)).state_dict()
    given[1].append(3)
    assert state["options"]["made_by"] == (1, (2,))


# ---- what it remembers ----


@dataclass(frozen=True)
class Forgetful(nofm.Method):
    def begin(self, site: Any) -> None:
        site.look_through(ste.dense)

    def remembers(self) -> tuple[str, ...]:
        return ("never",)


def test_what_is_remembered_is_there_from_the_start():
    model = network(pad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(nofm.OptimizerError) as refused:
        nofm.attach(Forgetful(), model, optimizer)
    assert str(refused.value) == (
        "Forgetful.remembers() names 'never', which Forgetful.start has not put into the memory, so that none of its states could be "
        "loaded; set memory.tensors['never'] in start(sites, memory), or do not name it"
    )
    assert not any(site.keeps_more for site in nofm.sites(model))  # as before
    nofm.attach(nofm.STE(), model, optimizer)


@dataclass(frozen=True)
class Learns(nofm.Method):
    def start(self, sites: Any, memory: Any) -> None:
        super().start(sites, memory)
        memory.learn(sites[0], torch.zeros(()))

    def remembers(self) -> tuple[str, ...]:
        return ("0.weight:0",)


def test_a_learned_parameter_may_be_remembered():
    state = attached(Learns()).state_dict()
    assert any("0.weight:0" in held for held in state["memory"].values())
    attached(Learns()).load_state_dict(state)
