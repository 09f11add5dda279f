"""`attach`: which optimizers it takes, whose learning rate it uses, what it notices in later steps, and how it ends.

The term of a step is told from the data gradient by leaving the latter out: gradients are set to zero by hand, so all that moves a
weight is the method. With decay d and plain SGD a pruned weight w then becomes w - lr * d * w, and a kept one stays.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import nofm

DECAY = 0.125
SRSTE = nofm.SRSTE(decay=DECAY)
PLACEMENTS = ["gradient", "decoupled"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).double()
    nofm.sparsify_(model, "2:4", preset="all")
    return model


def weights(model: nn.Module) -> list[Tensor]:
    return [site.weight.detach().clone() for site in nofm.sites(model)]


def zero_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def decayed(weight: Tensor, lr: float, decay: float = DECAY) -> Tensor:
    return torch.where(nofm.mask(weight, "2:4"), weight, weight - lr * decay * weight)


# ---- whose learning rate, and when ----


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_weight_has_the_learning_rate_of_its_group(placement):
    model = network()
    before = weights(model)
    groups = [{"params": model[1].parameters(), "lr": 0.25}, {"params": model[0].parameters(), "lr": 2.0}]
    optimizer = torch.optim.SGD(groups, lr=100.0)
    nofm.attach(nofm.SRSTE(decay=DECAY, placement=placement), model, optimizer)
    zero_gradients(model)
    optimizer.step()
    torch.testing.assert_close(weights(model), [decayed(before[0], 2.0), decayed(before[1], 0.25)], rtol=1e-12, atol=0)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_eq_6_has_the_learning_rate_of_its_group(placement):
    model = network()
    before = weights(model)
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 2.0}]
    optimizer = torch.optim.SGD(groups, lr=100.0)
    nofm.attach(nofm.SRSTE(decay=DECAY, refine="gradient", placement=placement), model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    expected = [w - lr * (1 + DECAY * lr * ~nofm.mask(w, "2:4")) for w, lr in zip(before, (0.5, 2.0), strict=True)]
    torch.testing.assert_close(weights(model), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_learning_rate_as_a_tensor_follows_its_schedule(placement, fused):
    """A learning rate that must not be read on the host is a tensor, changed in place."""
    model = network()
    expected = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), foreach=False, fused=fused or None)
    nofm.attach(nofm.SRSTE(decay=DECAY, placement=placement), model, optimizer)
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"].fill_(lr)
        zero_gradients(model)
        optimizer.step()
        expected = [decayed(weight, lr) for weight in expected]
    torch.testing.assert_close(weights(model), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("call", [lambda o, c: o.step(c), lambda o, c: o.step(closure=c)], ids=["positional", "keyword"])
@pytest.mark.parametrize("method", [SRSTE, nofm.SRSTE(decay=DECAY, placement="decoupled"), nofm.SRSTE(decay=DECAY, refine="gradient")])
def test_a_closure_makes_the_gradients_inside_the_step(call, method):
    """The hook before a step runs before the closure: what it would add is zeroed away, and what it would read is the last step's."""
    steps = {}
    for with_closure in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        handle = nofm.attach(method, model, optimizer)
        torch.manual_seed(1)
        for _ in range(3):
            x = torch.randn(4, 8, dtype=torch.double)

            def closure(model=model, optimizer=optimizer, x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if with_closure:
                assert call(optimizer, closure).item() > 0
            else:
                closure()
                optimizer.step()
        assert handle.step == 3
        steps[with_closure] = weights(model)
    assert all(torch.equal(a, b) for a, b in zip(steps[False], steps[True], strict=True))


# ---- which weights take part ----


def test_several_optimizers_each_move_their_own():
    model = network()
    before = weights(model)
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.5), torch.optim.SGD(model[1].parameters(), lr=2.0)
    handle = nofm.attach(SRSTE, model, [first, second])
    zero_gradients(model)
    second.step()
    assert torch.equal(weights(model)[0], before[0])
    zero_gradients(model)
    first.step()
    torch.testing.assert_close(weights(model), [decayed(before[0], 0.5), decayed(before[1], 2.0)], rtol=1e-12, atol=0)
    assert handle.step == 1


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_weight_without_gradient_is_left_alone(placement):
    model = network()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    nofm.attach(nofm.SRSTE(decay=DECAY, placement=placement), model, optimizer)
    zero_gradients(model)
    model[0].weight.grad = None
    optimizer.step()
    assert torch.equal(weights(model)[0], before[0])
    assert not torch.equal(weights(model)[1], before[1])


def test_a_weight_that_does_not_train_needs_no_optimizer_until_it_does():
    model = network()
    before = weights(model)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.5)
    nofm.attach(SRSTE, model, optimizer)
    zero_gradients(model)  # also for the frozen one: left over from an earlier training
    optimizer.step()
    assert torch.equal(weights(model)[0], before[0])

    model[0].weight.requires_grad_(True)
    with pytest.raises(nofm.OptimizerError, match=r"0\.weight trains but is not in the optimizer"):
        optimizer.step()
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 2.0})
    zero_gradients(model)
    optimizer.step()
    torch.testing.assert_close(weights(model)[0], decayed(before[0], 2.0), rtol=1e-12, atol=0)


def attach_twice(model):
    optimizer = torch.optim.SGD(model.parameters())
    nofm.attach(SRSTE, model, optimizer)
    nofm.attach(SRSTE, model, torch.optim.SGD(model.parameters()))


def attach_to_a_weight_tied_to_an_attached_one(model):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = torch.optim.SGD(model.parameters())
    nofm.attach(SRSTE, model, optimizer)
    nofm.attach(SRSTE, model[1], optimizer)


REFUSED = {
    "owns none": (lambda m: nofm.attach(SRSTE, m, torch.optim.SGD(nn.Linear(2, 2).parameters())), "this SGD owns no sparse weight"),
    "owns a part": (lambda m: nofm.attach(SRSTE, m, torch.optim.SGD(m[0].parameters())), r"no optimizer given to attach owns 1\.weight"),
    "nothing trains": (
        lambda m: nofm.attach(SRSTE, m.requires_grad_(False), torch.optim.SGD(nn.Linear(2, 2).parameters())),
        r"no sparse weight of this model trains \(0\.weight has requires_grad=False\)",
    ),
    "one of two owns none": (
        lambda m: nofm.attach(SRSTE, m, [torch.optim.SGD(m.parameters()), torch.optim.AdamW(nn.Linear(2, 2).parameters())]),
        "this AdamW owns no sparse weight",
    ),
    "both own it": (
        lambda m: nofm.attach(SRSTE, m, [torch.optim.SGD(m.parameters()), torch.optim.SGD(m[1].parameters())]),
        r"1\.weight is in 2 of the optimizers",
    ),
    "on meta": (lambda m: nofm.attach(nofm.ASP(), m.to("meta"), torch.optim.SGD(m.parameters())), r"0\.weight is on the meta device"),
    "none given": (lambda m: nofm.attach(SRSTE, m, []), "at least one optimizer"),
    "LBFGS": (lambda m: nofm.attach(SRSTE, m, torch.optim.LBFGS(m.parameters())), "LBFGS evaluates the loss many times"),
    "no optimizer": (lambda m: nofm.attach(SRSTE, m, [m]), "attach needs torch optimizers, got Sequential"),
    "a number": (lambda m: nofm.attach(SRSTE, m, 3), "attach needs torch optimizers, got int"),
    "a text": (lambda m: nofm.attach(SRSTE, m, "sgd"), "attach needs torch optimizers, got str"),
    "not sparse": (lambda m: nofm.attach(SRSTE, p := nn.Linear(4, 4), torch.optim.SGD(p.parameters())), "call sparsify_ before attach"),
    "attached already": (attach_twice, r"0 has a method attached already; call detach\(\)"),
    "attached already, tied": (attach_to_a_weight_tied_to_an_attached_one, "weight has a method attached already"),
}


@pytest.mark.parametrize(("attach", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(attach, message):
    with pytest.raises(nofm.OptimizerError, match=message):
        attach(network())


@pytest.mark.parametrize("method", [SRSTE, nofm.ASP(), nofm.Dense()], ids=["srste", "asp", "dense"])
def test_a_refused_attach_leaves_nothing_behind(method):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    healthy = weights(model)
    with torch.no_grad():
        model[1].weight[3, 5] = torch.nan
    with pytest.raises(nofm.NonFiniteWeightError, match=r"1\.weight\[3, 5\] is nan;"):
        nofm.attach(method, model, optimizer)
    with torch.no_grad():
        model[1].weight[3, 5] = healthy[1][3, 5]
    assert all(torch.equal(a, b) for a, b in zip(weights(model), healthy, strict=True))
    zero_gradients(model)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), healthy, strict=True))
    nofm.attach(method, model, optimizer)


# ---- what later steps notice ----


def swap_parameter(model):
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


def sparse_anew(model):
    nofm.densify_(model)
    nofm.sparsify_(model, "1:4", preset="all")


LATER = {
    "load_state_dict(assign=True)": (swap_parameter, r"0\.weight is no longer the parameter that the optimizer owns"),
    "pruned by torch": (
        lambda model: prune.l1_unstructured(model[0], "weight", amount=0.5),
        r"0\.weight is no longer the parameter that the optimizer owns",
    ),
    "fold_": (
        nofm.fold_,
        "0 is a plain module again .* while a method is attached; call detach.. before that. After fold_ the dense values of pruned "
        r"weights are gone, .*: go on from a checkpoint, and take a folded copy .* by nofm\.fold_\(copy\.deepcopy\(model\)\)",
    ),
    "densify_": (nofm.densify_, "0 is a plain module again .* while a method is attached; call detach"),
    "sparse anew": (sparse_anew, "0 was made plain and sparse again while a method is attached, .* detach.. and attach again"),
}


@pytest.mark.parametrize(("change", "message"), LATER.values(), ids=LATER)
@pytest.mark.parametrize("method", [SRSTE, nofm.STE(), nofm.ASP()], ids=["srste", "ste", "asp"])
def test_a_model_changed_under_a_method_is_noticed_in_the_next_step(method, change, message):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nofm.attach(method, model, optimizer)
    zero_gradients(model)
    optimizer.step()
    change(model)
    with pytest.raises(nofm.OptimizerError, match=message):
        optimizer.step()


def test_a_folded_copy_in_the_middle_of_training_changes_nothing():
    """What the error above advises."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nofm.attach(SRSTE, model, optimizer)
    zero_gradients(model)
    optimizer.step()
    before = [weight.clone() for weight in weights(model)]
    assert nofm.verify(nofm.fold_(copy.deepcopy(model)), "2:4").ok
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    optimizer.step()


@pytest.mark.parametrize("method", [nofm.Dense(), nofm.STE(), SRSTE, nofm.ASP(prune_at=5)], ids=["dense", "ste", "srste", "asp"])
def test_a_weight_that_explodes_is_named(method):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = nofm.attach(method, model, optimizer)
    for _ in range(2):
        zero_gradients(model)
        optimizer.step()
    zero_gradients(model)
    model[1].weight.grad[2, 6] = -torch.inf
    with pytest.raises(nofm.NonFiniteWeightError, match=r"1\.weight\[2, 6\] is inf after step 3;") as error:
        optimizer.step()
    assert (error.value.parameter, error.value.index, error.value.step, handle.step) == ("1.weight", (2, 6), 3, 3)


def test_a_learning_rate_too_large_is_noticed_before_training_goes_on():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
    handle = nofm.attach(SRSTE, model, optimizer)
    x = torch.ones(2, 8, dtype=torch.double)

    def train() -> None:
        for _ in range(100):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    with pytest.raises(nofm.NonFiniteWeightError, match=r"[01]\.weight\[\d, \d\] is (-?inf|nan) after step \d+;") as error:
        train()
    assert error.value.step == handle.step > 1


def trained_with(method, optimizer_of, lr, steps=400):
    """What was warned of in steps without a gradient of the loss, and the error at their end, if there was one."""
    model = network()
    optimizer = optimizer_of(model.parameters(), lr=lr)
    nofm.attach(method, model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(steps):
                zero_gradients(model)
                optimizer.step()
        except nofm.NonFiniteWeightError as error:
            return [str(w.message) for w in caught], str(error)
    assert {w.filename for w in caught} <= {__file__}
    return [str(w.message) for w in caught], None


TOO_STRONG = (
    "SRSTE's decay times the learning rate is 50 * 0.1 = 5 and must be below 1, or pruned weights swing instead of shrinking, and from "
    "twice that on (without momentum) they grow; clipping gradients does not help, since the term is added after it"
)


@pytest.mark.parametrize("placement", ["gradient", "decoupled"])
def test_a_lambda_too_large_for_the_learning_rate_is_named(placement):
    said, error = trained_with(nofm.SRSTE(decay=50.0, placement=placement), torch.optim.SGD, 0.1, steps=1500)
    assert said == [TOO_STRONG]
    assert error.endswith(f"an N:M mask needs finite weights. {TOO_STRONG}")


def test_a_lambda_is_too_large_from_where_it_says():
    """Plain SGD without a loss: 400 steps multiply a weight that grows by 5 % in each by 3e8."""
    for strength, warns, grows in ((0.99, 0, False), (1.5, 1, False), (1.99, 1, False), (2.1, 1, True)):
        model = network()
        before = torch.stack([weight.abs().max() for weight in weights(model)]).max()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        nofm.attach(nofm.SRSTE(decay=strength / 0.5), model, optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(400):
                zero_gradients(model)
                optimizer.step()
        after = torch.stack([weight.abs().max() for weight in weights(model)]).max()
        assert (len(caught), bool(after > before)) == (warns, grows)


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        (nofm.SRSTE(decay=50.0), torch.optim.Adam),  # which divides by the size of the gradient
        (nofm.SRSTE(decay=50.0, refine="sign"), torch.optim.SGD),  # by which a weight goes to and fro, as far each time
        (nofm.SRSTE(decay=50.0, refine="gradient"), torch.optim.SGD),
        (nofm.SRSTE(decay=9.0), torch.optim.SGD),
        (nofm.SRSTE(decay=-0.1), torch.optim.SGD),
        (nofm.SRSTE(decay=9.0, placement="decoupled"), torch.optim.AdamW),
        (nofm.STE(), torch.optim.SGD),
    ],
    ids=str,
)
def test_where_lambda_is_not_too_large_nothing_is_said(method, optimizer):
    assert trained_with(method, optimizer, 0.1, steps=20) == ([], None)


def test_a_learning_rate_that_rises_too_far_for_lambda_is_named_once():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nofm.attach(nofm.SRSTE(decay=5.0), model, optimizer)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=3.0)
    said = []
    for _ in range(5):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            zero_gradients(model)
            optimizer.step()
        said.append([(str(w.message)[:53], w.filename) for w in caught])
        schedule.step()
    assert said == [[], [], [("SRSTE's decay times the learning rate is 5 * 0.3 = 1.", __file__)], [], []]


def test_a_dense_start_has_no_lambda_to_blame():
    said, error = trained_with(nofm.SRSTE(decay=50.0, begin_at=21), torch.optim.SGD, 0.1, steps=20)
    assert (said, error) == ([], None)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e5)
    nofm.attach(nofm.SRSTE(begin_at=100), model, optimizer)
    zero_gradients(model)
    model[1].weight.grad[2, 6] = torch.inf
    with pytest.raises(nofm.NonFiniteWeightError, match="clip gradients"):
        optimizer.step()


def test_weights_that_the_loss_has_made_infinite_are_not_blamed_on_lambda():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nofm.attach(SRSTE, model, optimizer)
    zero_gradients(model)
    model[1].weight.grad[2, 6] = torch.inf
    with pytest.raises(nofm.NonFiniteWeightError, match=r"finite weights\. Lower the learning rate, clip gradients, or load"):
        optimizer.step()


# ---- the end ----


@pytest.mark.parametrize("placement", ["gradient", "decoupled", "backward"])
def test_detach_ends_it_and_another_method_may_follow(placement):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.ones(2, 8, dtype=torch.double)
    seen_before = model(x)
    handle = nofm.attach(nofm.SRSTE(decay=DECAY, placement=placement), model, optimizer)
    handle.detach()
    before = weights(model)
    (0 * model(x).sum()).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert handle.step == 0

    second = nofm.attach(nofm.Dense(), model, optimizer)
    torch.testing.assert_close(model(x), x @ before[0].T @ before[1].T)
    handle.detach()  # again: it must not disturb the second
    torch.testing.assert_close(model(x), x @ before[0].T @ before[1].T)
    second.detach()
    assert torch.equal(model(x), seen_before)


def test_a_late_detach_leaves_layers_that_were_made_sparse_anew_alone():
    """The second ASP begins with the masks of the first, which are gone."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nofm.attach(nofm.ASP(), model, optimizer).detach()
    handle = nofm.attach(nofm.ASP(), model, optimizer)
    sparse_anew(model)
    seen = model(torch.ones(2, 8, dtype=torch.double))
    with pytest.warns(UserWarning, match="ASP has taken 0 steps"):
        handle.detach()
    assert torch.equal(model(torch.ones(2, 8, dtype=torch.double)), seen)


def test_after_asp_only_asp_goes_on_with_its_frozen_masks():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nofm.attach(nofm.ASP(), model, optimizer).detach()
    frozen = weights(model)
    for other in (SRSTE, nofm.STE(), nofm.Dense()):
        with pytest.raises(nofm.OptimizerError, match=r"0 has a frozen mask, which .* would pass by; densify_ and sparsify_"):
            nofm.attach(other, model, optimizer)
    with torch.no_grad():
        model[0].weight[frozen[0] == 0] = 9.0  # larger than what is kept: a mask made anew would be another
    nofm.attach(nofm.ASP(prune_at=7), model, optimizer)
    zero_gradients(model)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), frozen, strict=True))


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        (nofm.SRSTE, None, "attach needs a method such as nofm.SRSTE"),
        ("srste", None, "attach needs a method such as nofm.SRSTE"),
        (nofm.STE(), "optimizer", "attach needs a model, got SGD"),
    ],
    ids=["a class", "a name", "the optimizer in the model's place"],
)
def test_what_is_no_method_or_no_model_is_named(method, model, message):
    layer = nn.Linear(8, 8)
    nofm.sparsify_(layer, "2:4", preset="all")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    with pytest.raises(nofm.OptimizerError, match=message):
        nofm.attach(method, optimizer if model == "optimizer" else layer, optimizer)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_method_without_its_state_points_at_the_loop(scheduled: bool) -> None:
    """A step comes through wrappers of torch's, one more with a schedule, and through ours: none of them is what a user has to change."""
    model = nn.Sequential(nn.Linear(8, 8))
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    nofm.attach(nofm.ASP(prune_at=3), model, optimizer)
    with pytest.warns(UserWarning, match="ASP begins at step 0.*; if the method is to begin now, all is well") as caught:
        optimizer.step()
    assert [warning.filename for warning in caught] == [__file__]


def test_an_optimizer_that_remembers_something_before_its_first_step_has_taken_none() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    nofm.sparsify_(model, "2:4", preset="all")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    nofm.attach(nofm.ASP(prune_at=5), model, optimizer)
    zero_gradients(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [str(warning.message) for warning in caught] == []


def test_a_network_in_the_place_of_a_method_is_told_by_its_type() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(nofm.OptimizerError, match=r"^attach needs a method such as nofm.SRSTE\(decay=2e-4\), got a Sequential; attach\("):
        nofm.attach(model, nofm.STE(), torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
