"""Optimizers that are not what they seem: one whose step calls another step, one that took the place of another, one that is gone."""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict

import pytest
import torch
from test_attach import DECAY, PLACEMENTS, SRSTE, decayed, network, weights, zero_gradients
from torch import nn

import nofm


def step_with(optimizer, model, times):
    """Take steps, and return what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            zero_gradients(model)
            optimizer.step()
    return [str(warning.message) for warning in caught]


# ---- steps inside steps ----


class OwnStep(torch.optim.SGD):
    """As people write them: something of one's own around the step of torch."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise InterruptedError("in the middle of a step")
        return super().step(closure)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("fails_first", [False, True], ids=["", "after a step that failed"])
def test_a_step_that_calls_its_parents_step_is_one_step(placement, fails_first):
    """torch calls the hooks of both, as soon as somebody has made an SGD as well."""
    model = network()
    before = weights(model)
    torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = OwnStep(model.parameters(), lr=0.5)
    handle = nofm.attach(nofm.SRSTE(decay=DECAY, placement=placement), model, optimizer)
    if fails_first:
        optimizer.fails = True
        zero_gradients(model)
        with pytest.raises(InterruptedError):
            optimizer.step()
        optimizer.fails = False
    for number in (1, 2, 3):
        assert step_with(optimizer, model, 1) == []
        before = [decayed(weight, 0.5) for weight in before]
        assert handle.step == number
    torch.testing.assert_close(weights(model), before, rtol=1e-12, atol=0)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another that leaves out `Optimizer.__init__`, as timm's Lookahead does. torch puts hooks there, or in the first
    `zero_grad`."""

    def __init__(self, inner):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, inner.defaults, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


def test_the_first_step_of_a_wrapper_is_not_missed():
    model = network()
    before = weights(model)
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.5))
    handle = nofm.attach(SRSTE, model, optimizer)
    zero_gradients(model)
    optimizer.step()
    assert handle.step == 1
    torch.testing.assert_close(weights(model), [decayed(weight, 0.5) for weight in before], rtol=1e-12, atol=0)


# ---- another optimizer half way ----


@pytest.mark.parametrize("keeps_the_old", [True, False], ids=["", "the old one is gone"])
def test_an_optimizer_that_the_method_does_not_hang_on_is_named_once(keeps_the_old):
    model = network()
    old = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = nofm.attach(SRSTE, model, old)
    assert step_with(old, model, 3) == []
    if not keeps_the_old:
        del old, handle
        gc.collect()
    new = torch.optim.Adam(model.parameters(), lr=0.5)
    assert step_with(new, model, 4) == [
        "this Adam moves 0.weight, but SRSTE was attached to another optimizer and takes no part in its steps; "
        "detach() the old handle and attach to this one"
    ]


def test_an_optimizer_of_other_weights_or_after_detach_is_none_of_our_business():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = nofm.attach(SRSTE, model, optimizer)
    other = nn.Linear(4, 4)
    assert step_with(torch.optim.SGD(other.parameters(), lr=0.5), other, 3) == []
    handle.detach()
    assert step_with(torch.optim.SGD(model.parameters(), lr=0.5), model, 3) == []


def test_a_folded_model_is_trained_by_any_optimizer():
    """Without detach(): there is nothing left that the method could be attached to."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _handle = nofm.attach(SRSTE, model, optimizer)
    beside = torch.optim.SGD(model.parameters(), lr=0.5)  # one that has stepped beside the method's, and is not told of it for that
    for _ in range(2):
        assert step_with(optimizer, model, 1) + step_with(beside, model, 1) == []
    nofm.fold_(model)
    for each in (beside, torch.optim.SGD(model.parameters(), lr=0.5)):
        assert step_with(each, model, 3) == []


@pytest.mark.parametrize("inside", [True, False], ids=["attached to the inner one", "attached to the wrapper"])
def test_an_optimizer_that_calls_the_one_that_the_method_hangs_on_is_quiet(inside):
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    wrapper = Wrapper(inner)
    handle = nofm.attach(SRSTE, model, inner if inside else wrapper)
    wrapper._patch_step_function()  # as its first zero_grad does
    assert step_with(wrapper, model, 4) == []
    assert handle.step == 4


@pytest.mark.parametrize("first", [SRSTE, nofm.SRSTE(decay=DECAY, placement="backward"), nofm.SRSTE(decay=DECAY, begin_at=5)], ids=str)
def test_a_method_whose_optimizer_is_gone_stands_in_nobodys_way(first):
    """The handle was not kept, so there is nobody to call detach()."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nofm.attach(first, model, optimizer)
    del optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = nofm.attach(SRSTE, model, optimizer)
    before = weights(model)
    assert step_with(optimizer, model, 1) == []
    torch.testing.assert_close(weights(model), [decayed(weight, 0.5) for weight in before], rtol=1e-12, atol=0)
    handle.detach()
    assert [site.lens for site in nofm.sites(model)] == [site.lens for site in nofm.sites(network())]
