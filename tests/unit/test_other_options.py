"""A state that was saved under other options: refused where it cannot mean anything any more, with a word where an option was changed."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import nofm

LINES = """0.weight: {} in this state, {} in this model{}; sparsify_ it as it was, or leave this state out to begin anew"""


def attached(method: nofm.Method, pattern: str | dict = "2:4", steps: int = 0, width: int = 16, axis: str = "input") -> list:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))
    nofm.sparsify_(model, pattern, preset="all", axis=axis)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parts = [model, optimizer, nofm.attach(method, model, optimizer)]
    for _ in range(steps):
        step(*parts[:2])
    return parts


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()


def all_that_may_change(model: nn.Module, handle: nofm.Handle) -> list:
    known = copy.deepcopy(handle.state_dict())
    return [known["steps"], known["masks"], known["memory"], [site.seen() for site in nofm.sites(model)]]


SRSTE, GMP = nofm.SRSTE, nofm.GMP
REFUSED = {
    "another method": (
        nofm.STE(), "2:4", SRSTE(0.1), "2:4", "this state is of method STE, the attached one is SRSTE; attach the same method"
    ),
    "another pattern": (SRSTE(0.1), "2:4", SRSTE(0.1), "1:4", LINES.format("2:4", "1:4", " (and 1 more)")),
    "one layer more": (SRSTE(0.1), "2:4", SRSTE(0.1), {"0": None, "*": "2:4"}, LINES.format("2:4", "not sparse", "")),
    "one layer less": (SRSTE(0.1), {"0": None, "*": "2:4"}, SRSTE(0.1), "2:4", LINES.format("not sparse", "2:4", "")),
    "a search, where there was none": (
        SRSTE(0.1), "2:4", SRSTE("auto"), "2:4",
        "this state is of SRSTE(decay=0.1), the attached one has decay='auto', and what the state holds was made by the former; "
        "attach the method as it was, or leave this state out to begin anew",
    ),
    "a search that is cut off": (SRSTE("auto"), "2:4", SRSTE("auto", probe=8, begin_at=0), "2:4", "SRSTE(probe=None), "),
    "a search for another goal": (
        SRSTE("auto", probe=8), "2:4", SRSTE("auto", probe=8, target=0.01), "2:4", "by which its search for lambda would go on otherwise; "
    ),
    "another search": (SRSTE("auto", probe=8), "2:4", SRSTE("auto", probe=9), "2:4", "SRSTE(probe=8), the attached one has probe=9"),
    "another budget": (GMP(0.5, end_at=9), "1:1", GMP(0.7, end_at=9), "1:1", "GMP(sparsity=0.5), the attached one has sparsity=0.7"),
    "budgets of layers": (
        nofm.RigL(0.5, end_at=900), "1:1", nofm.RigL(0.5, "uniform", end_at=900), "1:1",
        "RigL(allocation='erk'), the attached one has allocation='uniform'",
    ),
    "thresholds": (nofm.STR(-4.0), "1:1", nofm.STR(-8.0), "1:1", "STR(initial=-4.0), the attached one has initial=-8.0"),
    "of all layers": (nofm.DSR(0.5, threshold=1e-3), "1:1", nofm.DSR(0.5, threshold=1e-2), "1:1", "DSR(threshold=0.001), "),
    "where a ticket goes back to": (
        nofm.LotteryTicket(every=9), "1:1", nofm.LotteryTicket(every=9, rewind_to=4), "1:1", "LotteryTicket(rewind_to=0), "
    ),
    "in how many rounds a ticket is found": (
        nofm.LotteryTicket(rounds=3, every=2), "1:1", nofm.LotteryTicket(rounds=1, every=2), "1:1",
        "LotteryTicket(rounds=3), the attached one has rounds=1, and what the state holds was made by the former",
    ),
    "how long a ticket trains": (nofm.LotteryTicket(every=9), "1:1", nofm.LotteryTicket(every=2), "1:1", "LotteryTicket(every=9), "),
    "batches": (nofm.SNIP(batches=9), "1:1", nofm.SNIP(batches=2), "1:1", "SNIP(batches=9), the attached one has batches=2"),
    "a dense start, where there was none": (
        SRSTE(0.1), "2:4", SRSTE(0.1, begin_at=4), "2:4",
        "this state is of SRSTE(begin_at=0), the attached one has begin_at=4, by which 0 and 1 more go from 2:4 back to dense at step 3, "
        "until step 4 (begin_at, which up to step 3 changes nothing); attach the method as it was, or leave this state out to begin anew",
    ),
    "a gradual start, where there was none": (
        SRSTE(0.1), {"0": "1:16", "2": None}, SRSTE(0.2, ramp_at=0, begin_at=4), {"0": "1:16", "2": None},
        "SRSTE(decay=0.1, begin_at=0, ramp_at=None), the attached one has decay=0.2, begin_at=4, ramp_at=0, by which 0 goes from 1:16 back "
        "to 2:16 at step 3, until step 4 (begin_at, which up to step 3 changes nothing); attach",
    ),
    "a start that has ended put off": (SRSTE(0.1, begin_at=2), "2:4", SRSTE(0.1, begin_at=4), "2:4", "go from 2:4 back to dense at step 3"),
    "a slower start": (
        SRSTE(0.1, ramp_at=0, begin_at=4), "1:16", SRSTE(0.1, ramp_at=0, begin_at=9), "1:16",
        "by which 0 and 1 more go from 2:16 back to 4:16 at step 3, until step 9 (begin_at); attach",
    ),
    "a start that is no longer gradual": (
        SRSTE(0.1, ramp_at=0, begin_at=4), "1:16", SRSTE(0.1, begin_at=4), "1:16",
        "SRSTE(ramp_at=0), the attached one has ramp_at=None, by which 0 and 1 more go from 2:16 back to dense at step 3, until step 4",
    ),
    "of all weights": (nofm.UnstructuredSTE(0.5), "1:1", nofm.UnstructuredSTE(0.7), "1:1", "UnstructuredSTE(sparsity=0.5), "),
}  # fmt: skip


@pytest.mark.parametrize(("saved", "pattern", "method", "its_pattern", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_go_on_is_refused_and_nothing_is_loaded(saved, pattern, method, its_pattern, message):
    state = attached(saved, pattern, steps=3)[-1].state_dict()
    model, _, handle = attached(method, its_pattern, steps=1)
    before = all_that_may_change(model, handle)
    with pytest.raises(nofm.OptimizerError) as refused:
        handle.load_state_dict(state)
    assert message in str(refused.value)
    torch.testing.assert_close(all_that_may_change(model, handle), before, rtol=0, atol=0)


def test_flat_groups_are_another_pattern():
    state = attached(SRSTE(0.1))[-1].state_dict()
    with pytest.raises(nofm.OptimizerError, match=r"^0\.weight: 2:4 in this state, 2:4 flat in this model"):
        attached(SRSTE(0.1), axis="flat")[-1].load_state_dict(state)


STATES_THAT_DO_NOT_FIT = {
    "masks": (nofm.ASP(), "2:4", "0.weight: the mask in this state is not of its 512 weights"),
    "memory": (SRSTE("auto"), "2:4", r"0.weight:mask has shape \(32,\) in this state, \(64,\) in the attached method"),
}


@pytest.mark.parametrize(("method", "pattern", "message"), STATES_THAT_DO_NOT_FIT.values(), ids=STATES_THAT_DO_NOT_FIT)
def test_a_state_of_smaller_layers_is_refused_whole(method, pattern, message):
    state = attached(method, pattern, steps=3)[-1].state_dict()
    model, _, handle = attached(method, pattern, width=32)
    before = all_that_may_change(model, handle)
    with pytest.raises(nofm.OptimizerError, match=message):
        handle.load_state_dict(state)
    torch.testing.assert_close(all_that_may_change(model, handle), before, rtol=0, atol=0)


def test_parameters_that_the_method_does_not_learn_are_refused_before_masks_are_put_on():
    state = copy.deepcopy(attached(nofm.STR(-4.0), "1:1", steps=2)[-1].state_dict())
    state["memory"]["learned"]["9.weight:9"] = torch.zeros(())
    model, _, handle = attached(nofm.STR(-4.0), "1:1")
    before = all_that_may_change(model, handle)
    with pytest.raises(nofm.OptimizerError, match=r"do not learn the same parameters: 9\.weight:9 is in one only"):
        handle.load_state_dict(state)
    torch.testing.assert_close(all_that_may_change(model, handle), before, rtol=0, atol=0)


def test_an_option_that_was_changed_holds_with_a_word():
    state = attached(SRSTE(0.1, begin_at=9), steps=3)[-1].state_dict()
    model, optimizer, handle = attached(SRSTE(0.3, begin_at=4))
    with pytest.warns(UserWarning, match="this state is of") as said:
        handle.load_state_dict(state)
    assert [str(warning.message) for warning in said] == [
        "this state is of SRSTE(decay=0.1, begin_at=9), the attached one has decay=0.3, begin_at=4, which holds from step 3 on; "
        "what was done until then stays. If that is not meant, detach(), attach the method as it was, and load model, optimizer and "
        "handle again, in this order"
    ]
    assert said[0].filename == __file__
    assert handle.step == 3
    assert [site.keeps_more for site in nofm.sites(model)] == [True, True]
    step(model, optimizer)
    assert [site.keeps_more for site in nofm.sites(model)] == [False, False]


STARTS = {
    "in the past": (SRSTE(0.1), SRSTE(0.1, begin_at=3), 3),
    "gradual, in the past": (SRSTE(0.1), SRSTE(0.1, ramp_at=0, begin_at=3), 3),
    "put off before its end": (SRSTE(0.1, begin_at=4), SRSTE(0.1, begin_at=9), 3),
    "earlier": (SRSTE(0.1, begin_at=9), SRSTE(0.1, begin_at=2), 3),
    "gradual instead of dense": (SRSTE(0.1, begin_at=9), SRSTE(0.1, ramp_at=2, begin_at=9), 3),
    "slower, where M has no number between": (SRSTE(0.1, ramp_at=0, begin_at=4), SRSTE(0.1, ramp_at=0, begin_at=9), 3),
    "before the first step": (SRSTE(0.1), SRSTE(0.1, begin_at=3), 0),
}


@pytest.mark.parametrize(("saved", "method", "steps"), STARTS.values(), ids=STARTS)
def test_a_start_that_gives_no_weights_back_holds_with_a_word(saved, method, steps):
    state = attached(saved, steps=steps)[-1].state_dict()
    model, _, handle = attached(method)
    with pytest.warns(UserWarning, match=f"this state is of SRSTE.*which holds from step {steps} on"):
        handle.load_state_dict(state)
    as_attached, _, its_handle = attached(method)
    its_handle.method.go_on(list(nofm.sites(as_attached)), steps)
    assert [site.lens for site in nofm.sites(model)] == [site.lens for site in nofm.sites(as_attached)]


def test_a_start_is_counted_by_the_steps_of_each_optimizer():
    def made(method):
        model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4))
        nofm.sparsify_(model, "2:4", preset="all")
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        return model, optimizers, nofm.attach(method, model, optimizers)

    model, (_, second), handle = made(SRSTE(0.1))
    for _ in range(3):
        model(torch.randn(2, 16)).sum().backward()
        second.step()
    with pytest.raises(nofm.OptimizerError, match="by which 1 goes from 2:4 back to dense at step 3, until step 4"):
        made(SRSTE(0.1, begin_at=4))[-1].load_state_dict(handle.state_dict())


def test_a_search_that_is_given_up_for_a_number_says_so():
    state = attached(SRSTE("auto", probe=8), steps=3)[-1].state_dict()
    with pytest.warns(UserWarning, match=r"SRSTE\(decay='auto', probe=8\), the attached one has decay=0\.1, probe=None"):
        attached(SRSTE(0.1))[-1].load_state_dict(state)


def test_a_default_and_its_value_are_the_same_search():
    state = attached(SRSTE("auto"), steps=2)[-1].state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = attached(SRSTE("auto", probe=1000))[-1]
        other.load_state_dict(state)
    assert other.step == 2


def test_a_search_that_has_ended_is_not_bound_to_its_options():
    handle = attached(SRSTE("auto", probe=8), steps=10)[-1]
    state, found = handle.state_dict(), handle.found
    for probe, target in ((9, None), (10, None), (8, 0.01)):
        other = attached(SRSTE("auto", probe=probe, target=target))[-1]
        with pytest.warns(UserWarning, match="which holds from step 10 on"):
            other.load_state_dict(state)
        assert other.found == found
    with pytest.raises(nofm.OptimizerError, match="by which its search for lambda would begin again; attach"):
        attached(SRSTE("auto", probe=11))[-1].load_state_dict(state)
    early = attached(SRSTE("auto", probe=16), steps=10)[-1].state_dict()
    with pytest.raises(nofm.OptimizerError, match="by which its search for lambda would be cut off; attach"):
        attached(SRSTE("auto", probe=8))[-1].load_state_dict(early)


def test_who_follows_the_advice_goes_on_as_before():
    """STR's thresholds are in the optimizer's state, too, so that it is not enough to load the handle again."""
    states = copy.deepcopy([part.state_dict() for part in attached(nofm.STR(-4.0), "1:1", steps=3)])
    as_it_was, other = attached(nofm.STR(-4.0), "1:1"), attached(nofm.STR(-4.0, decay=0.5), "1:1")
    for parts in (as_it_was, other):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part, state in zip(parts, copy.deepcopy(states), strict=True):
                part.load_state_dict(state)
    other[2].detach()
    other[2] = nofm.attach(nofm.STR(-4.0), *other[:2])
    for part, state in zip(other, copy.deepcopy(states), strict=True):
        part.load_state_dict(state)
    for parts in (as_it_was, other):
        torch.manual_seed(1)
        for _ in range(3):
            step(*parts[:2])
    torch.testing.assert_close(other[2].state_dict()["memory"], as_it_was[2].state_dict()["memory"], rtol=0, atol=0)


@pytest.mark.parametrize("lost", [(), ("options", "patterns")], ids=["of today", "from before options were saved"])
def test_nothing_is_said_where_nothing_has_changed(lost):
    state = attached(SRSTE(0.1, begin_at=2), steps=3)[-1].state_dict()
    handle = attached(SRSTE(0.1, begin_at=2) if not lost else SRSTE(0.3, begin_at=5))[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.load_state_dict({name: value for name, value in state.items() if name not in lost})
    assert handle.step == 3


@dataclass(frozen=True)
class Own(nofm.Method):
    """A method of a user's own, with an option that no file holds."""

    strength: float = 1.0
    schedule: object = None


def test_options_that_are_no_plain_values_stay_out_of_the_state():
    state = attached(Own(2.0, schedule=torch.cos))[-1].state_dict()
    assert (state["options"], state["patterns"]) == ({"strength": 2.0}, {"0.weight": "2:4", "2.weight": "2:4"})
    with pytest.warns(UserWarning, match=r"Own\(strength=2\.0\), the attached one has strength=3\.0, which"):
        attached(Own(3.0))[-1].load_state_dict(state)
