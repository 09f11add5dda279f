"""Each method against numbers worked out with a pencil: eight weights, one gradient, the update written down.

The loss is the output itself, so the gradient of the weight a layer computes with is its input, whatever the weight is. All
numbers are sums of few powers of two: every operation is exact, and results are compared with ==.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nofm

pytestmark = pytest.mark.usefixtures("one_thread")

#        kept  kept  pruned  pruned | pruned  pruned  kept  kept       2 of 4, by magnitude
W = [4.0, -3.0, 2.0, -1.0, 0.5, -0.25, 1.0, -2.0]
G = [1.0, 2.0, -1.0, 4.0, -2.0, 0.5, 1.0, -1.0]
KEPT = [True, True, False, False, False, False, True, True]

STRAIGHT = [3.5, -4.0, 2.5, -3.0, 1.5, -0.5, 0.5, -1.5]  # W - G / 2
BY_WEIGHT = [3.5, -4.0, 2.25, -2.875, 1.4375, -0.46875, 0.5, -1.5]  # pruned: W - (G + W / 4) / 2
BY_SIGN = [3.5, -4.0, 2.375, -2.875, 1.375, -0.375, 0.5, -1.5]  # pruned: W - (G + sign(W) / 4) / 2
BY_GRADIENT = [3.5, -4.0, 2.5625, -3.25, 1.625, -0.53125, 0.5, -1.5]  # pruned: W - (G + (G / 2) / 4) / 2
PUSHED_BACK = [3.5, -4.0, 2.75, -3.125, 1.5625, -0.53125, 0.5, -1.5]  # pruned: W - (G - W / 4) / 2
PRUNED_FIRST = [3.5, -4.0, 0.0, 0.0, 0.0, 0.0, 0.5, -1.5]  # kept: W - G / 2
PRUNED_AFTER = [3.5, -4.0, 0.0, 0.0, 1.5, 0.0, 0.0, -1.5]  # STRAIGHT with its own two largest of each four

SRSTE = nofm.SRSTE
ONE_STEP = {
    "dense": (nofm.Dense(), -6.125, STRAIGHT),  # the output of W on G, then W after the step
    "ste": (nofm.STE(), 1.0, STRAIGHT),
    "srste, decay 0": (SRSTE(decay=0), 1.0, STRAIGHT),
    "srste, negative decay": (SRSTE(decay=-0.25), 1.0, PUSHED_BACK),
    "srste, negative decay, decoupled": (SRSTE(decay=-0.25, placement="decoupled"), 1.0, PUSHED_BACK),
    "asp, prune at once": (nofm.ASP(), 1.0, PRUNED_FIRST),
    "asp, prune after step 1": (nofm.ASP(prune_at=1), -6.125, PRUNED_AFTER),
    "asp, prune later": (nofm.ASP(prune_at=2), -6.125, STRAIGHT),
    "weight, gradient": (SRSTE(decay=0.25, refine="weight", placement="gradient"), 1.0, BY_WEIGHT),
    "weight, decoupled": (SRSTE(decay=0.25, refine="weight", placement="decoupled"), 1.0, BY_WEIGHT),
    "weight, backward": (SRSTE(decay=0.25, refine="weight", placement="backward"), 1.0, BY_WEIGHT),
    "sign, gradient": (SRSTE(decay=0.25, refine="sign", placement="gradient"), 1.0, BY_SIGN),
    "sign, decoupled": (SRSTE(decay=0.25, refine="sign", placement="decoupled"), 1.0, BY_SIGN),
    "sign, backward": (SRSTE(decay=0.25, refine="sign", placement="backward"), 1.0, BY_SIGN),
    "gradient, gradient": (SRSTE(decay=0.25, refine="gradient", placement="gradient"), 1.0, BY_GRADIENT),
    "gradient, decoupled": (SRSTE(decay=0.25, refine="gradient", placement="decoupled"), 1.0, BY_GRADIENT),
}


def layer() -> nn.Linear:
    linear = nn.Linear(8, 1, bias=False)
    linear.weight.data = torch.tensor([W])
    nofm.sparsify_(linear, "2:4")
    return linear


def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    output = model(torch.tensor([G])).sum()
    output.backward()
    optimizer.step()
    return output.item()


def test_the_mask_that_all_of_this_rests_on():
    assert nofm.mask(torch.tensor([W]), "2:4").tolist() == [KEPT]


@pytest.mark.parametrize(("method", "output", "expected"), ONE_STEP.values(), ids=ONE_STEP)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_one_step(method, output, expected, fused):
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    handle = nofm.attach(method, model, optimizer)
    assert step(model, optimizer) == output
    assert model.weight.tolist() == [expected]
    assert handle.step == 1


# After step 1 the weight at 4 has overtaken the one at 6, so step 2 prunes 2, 3, 5 and 6. Momentum 1/2.
TWO_STEPS = {
    # through momentum: buffer = (G + term_1) / 2 + (G + term_2)
    "gradient": [2.75, -5.5, 2.59375, -5.453125, 2.90625, -0.76953125, -0.3125, -0.75],
    "backward": [2.75, -5.5, 2.59375, -5.453125, 2.90625, -0.76953125, -0.3125, -0.75],
    # beside it: buffer = G / 2 + G
    "decoupled": [2.75, -5.5, 2.71875, -5.515625, 2.9375, -0.78515625, -0.3125, -0.75],
}


@pytest.mark.parametrize(("placement", "expected"), TWO_STEPS.items(), ids=TWO_STEPS)
def test_only_the_decoupled_term_goes_past_momentum(placement, expected):
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    nofm.attach(SRSTE(decay=0.25, placement=placement), model, optimizer)
    step(model, optimizer)
    assert model.weight.tolist() == [BY_WEIGHT]
    step(model, optimizer)
    assert model.weight.tolist() == [expected]


# The optimizer climbs: W + (G ...) / 2. The decay of Eq. 4 and 5 still goes to zero; Eq. 6 makes the climb steeper, not flatter.
MAXIMIZE = {
    "weight": [4.5, -2.0, 1.25, 1.125, -0.5625, 0.03125, 1.5, -2.5],  # pruned: W + (G - W / 4) / 2
    "sign": [4.5, -2.0, 1.375, 1.125, -0.625, 0.125, 1.5, -2.5],  # pruned: W + (G - sign(W) / 4) / 2
    "gradient": [4.5, -2.0, 1.4375, 1.25, -0.625, 0.03125, 1.5, -2.5],  # pruned: W + (G + (G / 2) / 4) / 2
}


@pytest.mark.parametrize("placement", ["gradient", "decoupled"])
@pytest.mark.parametrize(("refine", "expected"), MAXIMIZE.items(), ids=MAXIMIZE)
def test_maximize(refine, placement, expected):
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, maximize=True)
    nofm.attach(SRSTE(decay=0.25, refine=refine, placement=placement), model, optimizer)
    step(model, optimizer)
    assert model.weight.tolist() == [expected]


def test_the_term_is_not_clipped():
    """Documented: clipping happens before the step, the term is added in it. G clipped to norm 1/2 of its own, then the term."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nofm.attach(SRSTE(decay=0.25), model, optimizer)
    model(torch.tensor([G])).sum().backward()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm=0.5, total_norm=torch.tensor(1.0))
    optimizer.step()
    clipped = [w - g / 4 - (0 if kept else w / 8) for w, g, kept in zip(W, G, KEPT, strict=True)]
    torch.testing.assert_close(model.weight.detach(), torch.tensor([clipped]), rtol=1e-5, atol=0)


# ---- methods that must be the same as something else, bit for bit ----


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(8 * 4, 16),
        nn.Linear(16, 4),
    )


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True),
}


def train(model: nn.Module, method: nofm.Method | None, make_optimizer, steps: int = 20) -> list[torch.Tensor]:
    optimizer = make_optimizer(model.parameters())
    if method is not None:
        nofm.attach(method, model, optimizer)
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, 4, 4)).square().mean().backward()
        optimizer.step()
    return list(model.state_dict().values())


def assert_same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_dense_is_plain_torch(make_optimizer):
    plain, sparse = network(), network()
    nofm.sparsify_(sparse, "2:4", preset="all")
    assert_same_bits(train(plain, None, make_optimizer), train(sparse, nofm.Dense(), make_optimizer))


@pytest.mark.parametrize("placement", ["gradient", "decoupled", "backward"])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_ste_is_srste_without_decay(make_optimizer, placement):
    model = network()
    nofm.sparsify_(model, "2:4", preset="all")
    straight = train(copy.deepcopy(model), nofm.STE(), make_optimizer)
    dense = train(copy.deepcopy(model), nofm.Dense(), make_optimizer)
    assert not all(torch.equal(x, y) for x, y in zip(straight, dense, strict=True))
    assert_same_bits(straight, train(model, SRSTE(decay=0.0, placement=placement), make_optimizer))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SRSTE(refine="norm"), "refine='norm' is not one of 'weight', 'sign', 'gradient'"),
        (lambda: SRSTE(placement="forward"), "placement='forward' is not one of 'gradient', 'decoupled', 'backward'"),
        (lambda: SRSTE(decay=float("nan")), "decay=nan is no finite number"),
        (lambda: SRSTE(decay="2e-4"), "decay='2e-4' is no finite number"),
        (lambda: SRSTE(decay=True), "decay=True is no finite number"),
        (lambda: SRSTE(refine="gradient", placement="backward"), "needs the learning rate, which backward does not know"),
        (lambda: nofm.ASP(prune_at=-1), "prune_at=-1 is no step"),
        (lambda: nofm.ASP(prune_at=1.5), "prune_at=1.5 is no step"),
        (lambda: nofm.ASP(prune_at=True), "prune_at=True is no step"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, message):
    with pytest.raises(nofm.OptimizerError, match=message):
        make()


def test_registry_rows_are_the_methods():
    assert {name: row.method for name, row in nofm.METHODS.items()} == {
        "dense": nofm.Dense,
        "ste": nofm.STE,
        "srste": SRSTE,
        "asp": nofm.ASP,
        "set": nofm.SET,
        "rigl": nofm.RigL,
        "snfs": nofm.SNFS,
        "dsr": nofm.DSR,
        "deepr": nofm.DeepRewiring,
        "gmp": nofm.GMP,
        "str": nofm.STR,
        "ste_unstructured": nofm.UnstructuredSTE,
        "dnw": nofm.DNW,
        "snip": nofm.SNIP,
        "lottery": nofm.LotteryTicket,
    }
    lengths = {"gmp": {"end_at": 9}, "rigl": {"end_at": 900}, "lottery": {"every": 9}}  # which only the loop knows
    for name, row in nofm.METHODS.items():
        assert row.method(**lengths.get(name, {})) == row.method(**lengths.get(name, {}))  # frozen values, made without other arguments
