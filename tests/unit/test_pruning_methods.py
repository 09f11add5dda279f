"""Methods that prune by rank (GMP, SNIP, lottery tickets, top-k STE, DNW) and by a learned threshold (STR).

First with a pencil, as in test_methods.py: one layer of eight weights whose loss is its output, so that the gradient of the weight it
computes with is its input. All numbers are sums of few powers of two and are compared with ==. Then what must hold at every step of
a small network: how many weights are kept, that pruned ones are +0.0, when masks may move, that a resumed run is the run.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from functools import partial

import pytest
import torch
from own_optimizer import OwnAdam
from torch import Tensor, nn

import nofm
from nofm import DNW, GMP, SNIP, STR, LotteryTicket, UnstructuredSTE
from nofm.methods.budget import allocate
from nofm.methods.pruning import strongest

pytestmark = pytest.mark.usefixtures("one_thread")

W = [4.0, -3.0, 2.0, -1.0, 0.5, -0.25, 1.0, -2.0]
G = [1.0, 2.0, -1.0, 4.0, -2.0, 0.5, 1.0, -1.0]
STEPPED = [3.5, -4.0, 2.5, -3.0, 1.5, -0.5, 0.5, -1.5]  # W - G / 2
TWICE = [3.0, -5.0, 3.0, -5.0, 2.5, -0.75, 0.0, -1.0]  # W - G


def layer() -> nn.Linear:
    linear = nn.Linear(8, 1, bias=False)
    linear.weight.data = torch.tensor([W])
    nofm.sparsify_(linear, "1:1")
    return linear


def pencil_step(model: nn.Linear, optimizer: torch.optim.Optimizer, gradient: list[float]) -> float:
    optimizer.zero_grad()
    output = model(torch.tensor([gradient])).sum()
    output.backward()
    optimizer.step()
    return output.item()


def kept_places(model: nn.Module) -> list[int]:
    (site,) = nofm.sites(model)
    return [0, 1, 2, 3, 4, 5, 6, 7] if site.stored_mask is None else site.stored_mask.flatten().nonzero().flatten().tolist()


# A method, and after each step: the output of its forward, the weights, the places of kept weights. Learning rate 1/2, no momentum.
BY_HAND = {
    "gmp, all at once": (GMP(sparsity=0.5, end_at=1), [(-6.125, [3.5, -4.0, 2.5, -3.0, 0, 0, 0, 0], [0, 1, 2, 3])]),
    # Places 5 and 6 tie after the step, at 1/2, and one must go: the later one.
    "gmp, a tie": (GMP(sparsity=0.125, end_at=1), [(-6.125, [3.5, -4.0, 2.5, -3.0, 1.5, -0.5, 0, -1.5], [0, 1, 2, 3, 4, 5, 7])]),
    # In the middle 1 - (1/2)^3 = 7/8 of the six that go in the end: 5.25.
    "gmp, in two prunings": (
        GMP(sparsity=0.75, end_at=2, every=1),
        [(-6.125, [3.5, -4.0, 0, -3.0, 0, 0, 0, 0], [0, 1, 3]), (-16.5, [0, -5.0, 0, -5.0, 0, 0, 0, 0], [1, 3])],
    ),
    "gmp, not yet": (GMP(sparsity=0.5, begin_at=1, end_at=3), [(-6.125, STEPPED, [0, 1, 2, 3, 4, 5, 6, 7])]),
    # |W|: 4, 3, 2, 2. After the step 4, 3.5, 3, 2.5; all weights have moved.
    "ste": (UnstructuredSTE(sparsity=0.5), [(-2.0, STEPPED, [0, 1, 2, 3]), (-19.0, TWICE, [0, 1, 2, 3])]),
    "dnw": (DNW(sparsity=0.5), [(-2.0, STEPPED, [0, 1, 2, 3]), (-19.0, TWICE, [0, 1, 2, 3])]),
    # |G * W|: 4, 6, 2, 4, 1, 1/8, 1, 2: the tie at 2 goes to place 2. The first step only looks.
    "snip": (
        SNIP(sparsity=0.5),
        [(-6.125, [4.0, -3.0, 2.0, -1.0, 0, 0, 0, 0], [0, 1, 2, 3]), (-8.0, [3.5, -4.0, 2.5, -3.0, 0, 0, 0, 0], [0, 1, 2, 3])],
    ),
    "snip, two batches": (SNIP(sparsity=0.5, batches=2), [(-6.125, W, [0, 1, 2, 3, 4, 5, 6, 7])]),
    # Four of |TWICE| are largest: 5, 5, 3, 3. They go back to where they were after step 1, or at the start.
    "lottery, back to step 1": (
        LotteryTicket(sparsity=0.5, rounds=1, every=2, rewind_to=1),
        [(-6.125, STEPPED, [0, 1, 2, 3, 4, 5, 6, 7]), (-20.25, [3.5, -4.0, 2.5, -3.0, 0, 0, 0, 0], [0, 1, 2, 3])],
    ),
    "lottery, back to the start": (
        LotteryTicket(sparsity=0.5, rounds=1, every=2),
        [(-6.125, STEPPED, [0, 1, 2, 3, 4, 5, 6, 7]), (-20.25, [4.0, -3.0, 2.0, -1.0, 0, 0, 0, 0], [0, 1, 2, 3])],
    ),
    # Two rounds keep 8 * (1/4)^(1/2) = 4 and then 2. The second training is one step shorter, for it starts at step 1.
    "lottery, two rounds": (
        LotteryTicket(sparsity=0.75, rounds=2, every=2, rewind_to=1),
        [
            (-6.125, STEPPED, [0, 1, 2, 3, 4, 5, 6, 7]),
            (-20.25, [3.5, -4.0, 2.5, -3.0, 0, 0, 0, 0], [0, 1, 2, 3]),
            (-19.0, [0, -4.0, 0, -3.0, 0, 0, 0, 0], [1, 3]),
        ],
    ),
    # The threshold is sigmoid(0) = 1/2, and place 4 lies on it. S = [3.5, -2.5, 1.5, -0.5, 0, 0, 0.5, -1.5].
    "str": (STR(initial=0.0), [(-3.0, [3.5, -4.0, 2.5, -3.0, 0.5, -0.25, 0.5, -1.5], [0, 1, 2, 3, 4, 6, 7])]),
}


@pytest.mark.parametrize(("method", "steps"), BY_HAND.values(), ids=BY_HAND)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_by_hand(method, steps, fused):
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    nofm.attach(method, model, optimizer)
    for output, weights, kept in steps:
        assert pencil_step(model, optimizer, G) == output
        assert model.weight.tolist() == [weights]
        assert kept_places(model) == kept


def test_snip_adds_up_the_gradients_of_its_batches():
    """G plus the second is 2, 0, 0, 0, 0, 1/2, 4, -2; times W: 8, 0, 0, 0, 0, 1/8, 4, 4."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, weight_decay=0.5)
    nofm.attach(SNIP(sparsity=0.5, batches=2), model, optimizer)
    pencil_step(model, optimizer, G)
    assert model.weight.tolist() == [W]
    pencil_step(model, optimizer, [1.0, -2.0, 1.0, -4.0, 2.0, 0.0, 3.0, -1.0])
    assert model.weight.tolist() == [[4.0, 0, 0, 0, 0, -0.25, 1.0, -2.0]]
    assert not any(value.any() for value in optimizer.state[model.weight].values() if value is not None)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "under a loss scale"])
@pytest.mark.parametrize("ascends", [False, True], ids=["", "ascending"])
def test_str_draws_its_threshold_to_zero_and_leaves_weights_alone(ascends, scaled):
    """Without a gradient s moves by 1/2 * 1/4 of itself."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, maximize=ascends, fused=True)
    handle = nofm.attach(STR(initial=-8.0, decay=0.25), model, optimizer)
    (s,) = handle.memory.learned.values()
    before = model.weight.tolist()
    model.weight.grad = torch.zeros_like(model.weight)
    if scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(1))
        scaler.step(optimizer)
    else:
        optimizer.step()
    assert (s.item(), model.weight.tolist()) == (-7.0, before)


def test_str_learns_its_threshold():
    """sigmoid'(0) = 1/4; the sum of sign(W) * G over kept weights is 1 - 2 - 1 - 4 + 1 + 1 = -4, so s moves by -1/2 * 1."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = nofm.attach(STR(initial=0.0), model, optimizer)
    (s,) = handle.memory.learned.values()
    pencil_step(model, optimizer, G)
    assert s.item() == -0.5


def test_a_ticket_takes_the_steps_of_the_first_training_again():
    """With momentum 1/2, which goes back as well: the second step of what is kept is the second step of the first training."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    nofm.attach(LotteryTicket(sparsity=0.5, rounds=1, every=2, rewind_to=1), model, optimizer)
    pencil_step(model, optimizer, G)
    pencil_step(model, optimizer, G)  # to W - 5/4 G = [2.75, -5.5, 3.25, -6, 3, -0.875, -0.25, -0.75], of which places 1 to 4 are kept
    assert model.weight.tolist() == [[0, -4.0, 2.5, -3.0, 1.5, 0, 0, 0]]
    pencil_step(model, optimizer, G)
    assert model.weight.tolist() == [[0, -5.5, 3.25, -6.0, 3.0, 0, 0, 0]]


def test_a_ticket_from_the_start_has_no_momentum():
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    nofm.attach(LotteryTicket(sparsity=0.5, rounds=1, every=2), model, optimizer)
    for _ in range(3):
        pencil_step(model, optimizer, G)
    assert model.weight.tolist() == [[0, -4.0, 2.5, -3.0, 1.5, 0, 0, 0]]


# Of which not all starts as zero, or as a tensor.
UNUSUAL = {
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adagrad": torch.optim.Adagrad,
    "sgd with dampening": partial(torch.optim.SGD, momentum=0.5, dampening=0.5),  # whose first momentum is the whole gradient
    "own": OwnAdam,
}


@pytest.mark.parametrize("rewind_to", [0, 1])
@pytest.mark.parametrize("make_optimizer", UNUSUAL.values(), ids=UNUSUAL)
def test_a_ticket_trains_as_its_optimizer_has_trained(make_optimizer, rewind_to):
    """The gradient is the same in every step, so what a step does to a weight is what the optimizer remembers of it."""
    model = layer()
    optimizer = make_optimizer(model.parameters(), lr=0.25)
    nofm.attach(LotteryTicket(sparsity=0.5, rounds=1, every=4, rewind_to=rewind_to), model, optimizer)
    first = []
    for _ in range(3):
        pencil_step(model, optimizer, G)
        first.append(model.weight.detach().clone())
    pencil_step(model, optimizer, G)
    (site,) = nofm.sites(model)
    assert site.kept() == 4
    for weights in first[rewind_to:]:
        pencil_step(model, optimizer, G)
        torch.testing.assert_close(model.weight.detach(), torch.where(site.mask(), weights, 0.0))


@pytest.mark.parametrize("make_optimizer", UNUSUAL.values(), ids=UNUSUAL)
def test_after_snip_the_optimizer_begins(make_optimizer):
    model, dense = layer(), nofm.densify_(layer())
    optimizer, of_dense = (make_optimizer(each.parameters(), lr=0.25) for each in (model, dense))
    nofm.attach(SNIP(sparsity=0.5, batches=3), model, optimizer)
    for _ in range(3):
        pencil_step(model, optimizer, G)
    for _ in range(2):
        pencil_step(model, optimizer, G)
        pencil_step(dense, of_dense, G)
    (site,) = nofm.sites(model)
    torch.testing.assert_close(model.weight, torch.where(site.mask(), dense.weight, 0.0))


def test_a_parameter_that_a_ticket_cannot_take_back_is_told_at_once():
    model, late = layer(), nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nofm.attach(LotteryTicket(sparsity=0.5, rounds=1, every=9, rewind_to=1), model, optimizer)
    pencil_step(model, optimizer, G)
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(nofm.OptimizerError, match=r"of shape \(2, 3\) that it had not at step 1 \(rewind_to\)"):
        pencil_step(model, optimizer, G)


# ---- a small network ----

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}
STEPS = 40
METHODS = {
    "gmp": GMP(sparsity=0.75, begin_at=3, end_at=25, every=4),
    "gmp erk": GMP(sparsity=0.75, begin_at=3, end_at=25, every=4, allocation="erk"),
    "gmp global": GMP(sparsity=0.75, begin_at=3, end_at=25, every=4, allocation="global"),
    "snip": SNIP(sparsity=0.75, batches=2),
    "lottery": LotteryTicket(sparsity=0.75, rounds=3, every=12, rewind_to=3),
    "lottery erk": LotteryTicket(sparsity=0.75, rounds=2, every=12, allocation="erk"),
    "ste": UnstructuredSTE(sparsity=0.75),
    "ste erk": UnstructuredSTE(sparsity=0.75, allocation="erk"),
    "ste global": UnstructuredSTE(sparsity=0.75, allocation="global"),
    "dnw": DNW(sparsity=0.75),
    "str": STR(initial=-4.0),
}
FROZEN = [name for name in METHODS if name.split()[0] in ("gmp", "snip", "lottery")]
SHAPES = [(16, 16), (8, 16)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    nofm.sparsify_(model, "1:1", preset="all")
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=generator) for _ in range(STEPS)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = (model(x) - x[:, :8]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def masks(model: nn.Module) -> list[Tensor]:
    stored = [site.stored_mask for site in nofm.sites(model)]
    return [torch.ones(shape, dtype=torch.bool) if mask is None else mask.clone() for shape, mask in zip(SHAPES, stored, strict=True)]


def expected_kept(name: str, number: int) -> int:
    """Of 384 weights, after step `number`."""
    if name.startswith("gmp"):
        last = min(25, 3 + (number - 3) // 4 * 4) if number < 25 else 25
        return 384 - round(288 * (1 - (1 - max(0, last - 3) / 22) ** 3))
    if name == "snip":
        return 384 if number < 2 else 96
    if name == "lottery":
        return round(384 * 0.25 ** ((number >= 12) / 3 + (number >= 21) / 3 + (number >= 30) / 3))
    if name == "lottery erk":
        return round(384 * 0.25 ** ((number >= 12) / 2 + (number >= 24) / 2))
    return 96


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "str"])
def test_the_budget_is_kept_at_every_step(name, make_optimizer):
    model = network()
    optimizer = make_optimizer(model.parameters())
    nofm.attach(METHODS[name], model, optimizer)
    for number, x in enumerate(batches(), start=1):
        step(model, optimizer, x)
        kept = [site.kept() for site in nofm.sites(model)]
        slack = 1 if number < 25 and ("erk" in name or name == "gmp") else 0  # two layers, each rounded on its own, on the way
        assert abs(sum(kept) - expected_kept(name, number)) <= slack
        assert [int(mask.sum()) for mask in masks(model)] == kept
    if "global" not in name and name not in ("snip", "lottery"):
        assert kept == allocate(SHAPES, 0.75, "erk" if "erk" in name else "uniform")


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", FROZEN)
def test_what_is_pruned_stays_pruned_and_masks_move_when_they_say_so(name, make_optimizer):
    model = network()
    optimizer = make_optimizer(model.parameters())
    nofm.attach(METHODS[name], model, optimizer)
    before = masks(model)
    for number, x in enumerate(batches(), start=1):
        step(model, optimizer, x)
        now = masks(model)
        for site, old, new in zip(nofm.sites(model), before, now, strict=True):
            assert not (new & ~old).any(), "a pruned weight came back"
            assert torch.equal(old, new) or METHODS[name].phase(number) is None
            assert not site.weight.detach()[~new].view(torch.int32).any(), "a pruned weight is not +0.0"
            if site.stored_mask is not None:
                assert not site.weight.grad[~old].any(), "a pruned weight got a gradient"
        before = now


@pytest.mark.parametrize("name", ["ste", "ste erk", "ste global", "dnw"])
def test_all_weights_learn_straight_through_the_largest(name):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    nofm.attach(METHODS[name], model, optimizer)
    together = masks(model)
    for x in batches():
        step(model, optimizer, x)
        assert (model[2].weight.grad != 0).all()  # in front of it, units whose outputs are all pruned learn nothing
        scores = [site.weight.detach().abs() for site in nofm.sites(model)]
        floors = [score[mask].min() for score, mask in zip(scores, masks(model), strict=True)]
        ceilings = [score[~mask].max() for score, mask in zip(scores, masks(model), strict=True)]
        if "global" in name:
            assert min(floors) >= max(ceilings)
        assert all(floor >= ceiling for floor, ceiling in zip(floors, ceilings, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(together, masks(model), strict=True)), "masks follow the weights"


def test_dnw_on_layers_is_top_k_ste():
    losses = []
    for method in (DNW(sparsity=0.75), UnstructuredSTE(sparsity=0.75, allocation="uniform")):
        model = network()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        nofm.attach(method, model, optimizer)
        losses.append([step(model, optimizer, x) for x in batches()])
    assert losses[0] == losses[1]


def test_gmp_global_prunes_the_smallest_of_the_whole_network():
    """The second layer is made ten times smaller, so that it goes first."""
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    nofm.attach(GMP(sparsity=0.25, end_at=1, allocation="global"), model, optimizer)
    step(model, optimizer, batches()[0])
    in_first, in_second = (site.kept() for site in nofm.sites(model))
    assert in_first + in_second == 288
    assert in_second < 64
    assert in_first > 224


def test_gmp_does_not_take_a_pruned_weight_for_a_kept_one_that_is_zero():
    """Without a learning rate, and all weights zero after the first pruning, only the mask tells which is which."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    nofm.attach(METHODS["gmp"], model, optimizer)
    for number, x in enumerate(batches(), start=1):
        if number == 8:
            before = masks(model)
            with torch.no_grad():
                model[0].weight.zero_()
        step(model, optimizer, x)
    assert [int(mask.sum()) for mask in masks(model)] == [64, 32]
    assert not any((new & ~old).any() for old, new in zip(before, masks(model), strict=True))


def test_a_kept_weight_of_zero_is_kept_before_a_pruned_one():
    """Magnitudes tie at zero, and the pruned one comes first; the one that is still there must stay."""
    weight, among = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([False, True, True, True])
    assert strongest([weight], [2], [among])[0].tolist() == [False, True, False, True]
    assert strongest([weight, weight], [3], [among, among])[1].tolist() == [False, False, False, True]
    assert strongest([weight], [4], [among])[0].tolist() == among.tolist(), "nothing outside is kept"


def test_snip_looks_at_all_layers_together():
    """A layer without influence on the loss, but for a little, is pruned away whatever its weights are."""
    model = network()
    model[0].register_forward_hook(lambda module, args, output: output * 1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    nofm.attach(SNIP(sparsity=0.75), model, optimizer)
    step(model, optimizer, batches()[0])
    assert [site.kept() for site in nofm.sites(model)] != allocate(SHAPES, 0.75, "uniform")


# ---- STR ----


def test_the_gradient_of_the_threshold_is_that_of_autograd():
    """Over two micro-batches, which add up in the weight's gradient."""
    model, x, y = network(), batches()[0], batches()[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = nofm.attach(STR(initial=-3.0), model, optimizer)
    weights = [site.weight.detach() for site in nofm.sites(model)]
    s = [torch.tensor(-3.0, requires_grad=True) for _ in weights]

    def reference(x: Tensor) -> Tensor:
        seen = [w.sign() * torch.relu(w.abs() - t.sigmoid()) for w, t in zip(weights, s, strict=True)]
        return nn.functional.linear(torch.tanh(nn.functional.linear(x, seen[0], model[0].bias)), seen[1], model[2].bias)

    for batch in (x, y):
        (reference(batch) - batch[:, :8]).square().mean().backward()
        (model(batch) - batch[:, :8]).square().mean().backward()
    optimizer.step()
    for learned, wanted in zip(handle.memory.learned.values(), s, strict=True):
        torch.testing.assert_close(learned.grad, wanted.grad, rtol=1e-5, atol=1e-7)
    assert [t.grad.item() != 0 for t in s] == [True, True]


def test_weight_decay_opens_thresholds_and_everyone_sees_what_is_kept():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    nofm.attach(STR(initial=-100.0), model, optimizer)
    densities, sad = [], nofm.SAD(model)
    for number, x in enumerate(batches() * 3, start=1):
        sad.record(number)
        step(model, optimizer, x)
        densities.append(sum(site.kept() for site in nofm.sites(model)) / 384)
    assert densities[0] == 1.0
    assert densities[-1] < 0.7
    assert sad.between(1, 120).total > 0
    assert nofm.summary(model).density == densities[-1]
    assert nofm.cost(model, (1, 16)).macs_sparse == 384 * densities[-1]
    seen = [site.seen().clone() for site in nofm.sites(model)]
    assert sum(int((tensor != 0).sum()) for tensor in seen) == densities[-1] * 384
    stored = [site.stored_mask for site in nofm.sites(model)]  # what states hold, and what is counted where weights are spread
    assert all(torch.equal(mask, tensor != 0) for mask, tensor in zip(stored, seen, strict=True))
    output = model(batches()[0])
    nofm.fold_(model)
    assert all(torch.equal(module.weight, tensor) for module, tensor in zip((model[0], model[2]), seen, strict=True))
    assert torch.equal(model(batches()[0]), output)


def test_a_threshold_whose_weight_has_no_gradient_rests_with_it():
    """Also where the loop clears the gradients of the model, which knows nothing of thresholds."""
    model = network()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    handle = nofm.attach(STR(initial=-3.0), model, optimizer)
    step(model, optimizer, batches()[0])
    resting, moving = (s for s in handle.memory.learned.values())
    before = [resting.item(), moving.item()]
    model.zero_grad()
    model[2](batches()[1]).sum().backward()
    optimizer.step()
    assert resting.item() == before[0]
    assert moving.item() != before[1]


def test_what_str_has_learned_stays_when_it_is_detached_and_goes_on_when_attached_again():
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    handle = nofm.attach(STR(initial=-3.0), model, optimizer)
    step(model, optimizer, batches()[0])
    learned, output = [s.item() for s in handle.memory.learned.values()], model(batches()[0])
    handle.detach()
    assert torch.equal(model(batches()[0]), output)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
    again = nofm.attach(STR(initial=7.0), model, optimizer)
    assert [s.item() for s in again.memory.learned.values()] == learned
    with pytest.raises(nofm.OptimizerError, match="attached already"):
        nofm.attach(nofm.Dense(), model, optimizer)
    again.detach()
    for other in (nofm.Dense(), GMP(sparsity=0.75, end_at=2), UnstructuredSTE(sparsity=0.75)):
        with pytest.raises(nofm.OptimizerError, match=r"0 has a threshold that STR has learned, which .* would pass by; fold_"):
            nofm.attach(other, model, optimizer)
        assert torch.equal(model(batches()[0]), output)


def test_a_copy_of_an_str_network_has_thresholds_of_its_own():
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    nofm.attach(STR(initial=-3.0), model, optimizer)
    twin, output = copy.deepcopy(model), model(batches()[0])
    for x in batches():
        step(model, optimizer, x)
    assert torch.equal(twin(batches()[0]), output)


# ---- all of them ----


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_the_run(name, make_optimizer):
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor]) -> list[float]:
        return [step(model, optimizer, x) for x in data]

    model, method, data = network(), METHODS[name], batches()[:30]
    optimizer = make_optimizer(model.parameters())
    handle = nofm.attach(method, model, optimizer)
    run(model, optimizer, data[:15])
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), handle.state_dict()])
    losses = run(model, optimizer, data[15:])

    torch.manual_seed(7)  # nothing may depend on it
    resumed = network()
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.normal_()
    optimizer = make_optimizer(resumed.parameters())
    handle = nofm.attach(method, resumed, optimizer)
    for part, state in zip((resumed, optimizer, handle), saved, strict=True):
        part.load_state_dict(state)
    assert run(resumed, optimizer, data[15:]) == losses
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(masks(model), masks(resumed), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", METHODS)
def test_folding_writes_what_layers_computed_with(name):
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    handle = nofm.attach(METHODS[name], model, optimizer)
    for x in batches():
        step(model, optimizer, x)
    kept, output = [site.kept() for site in nofm.sites(model)], model(batches()[0])
    handle.detach()
    assert torch.equal(model(batches()[0]), output), "detached, layers see the same"
    nofm.fold_(model)
    assert [int((module.weight != 0).sum()) for module in (model[0], model[2])] == kept
    assert torch.equal(model(batches()[0]), output)


@pytest.mark.parametrize("name", METHODS)
def test_layers_must_be_free_of_groups(name):
    model = nn.Linear(8, 8)
    nofm.sparsify_(model, "2:4")
    with pytest.raises(nofm.OptimizerError, match="is unstructured"):
        nofm.attach(METHODS[name], model, torch.optim.SGD(model.parameters()))


def test_layers_that_do_not_train_are_pruned_with_the_others():
    for method in (GMP(sparsity=0.75, end_at=2), UnstructuredSTE(sparsity=0.75), LotteryTicket(sparsity=0.75, rounds=1, every=2)):
        model = network()
        model[2].weight.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        nofm.attach(method, model, optimizer)
        for x in batches()[:3]:
            step(model, optimizer, x)
        assert sum(site.kept() for site in nofm.sites(model)) == 96


OTHERS_MASKS = {
    "more than snip would keep": (GMP(sparsity=0.75, end_at=9), SNIP(sparsity=0.75), "the network keeps 384 weights .* and 96 are to"),
    "fewer than snip would keep": (DNW(sparsity=0.75), SNIP(sparsity=0.5), "the network keeps 96 weights .* and 192 are to be kept"),
    "fewer in a layer": (DNW(sparsity=0.75), GMP(sparsity=0.75, end_at=9, allocation="erk"), "2 keeps 32 weights .* and 41 are to be kept"),
    "fewer in all": (DNW(sparsity=0.75), LotteryTicket(sparsity=0.5, every=9), "the network keeps 96 weights .* and 192 are to be kept"),
}


@pytest.mark.parametrize(("first", "second", "message"), OTHERS_MASKS.values(), ids=OTHERS_MASKS)
def test_masks_of_another_method_that_cannot_be_gone_on_with_are_refused(first, second, message):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = nofm.attach(first, model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GMP has not finished
        handle.detach()
    with pytest.raises(nofm.OptimizerError, match=message):
        nofm.attach(second, model, optimizer)


def test_masks_of_another_method_are_pruned_further():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    nofm.attach(DNW(sparsity=0.5), model, optimizer).detach()
    before = masks(model)
    nofm.attach(GMP(sparsity=0.75, end_at=2), model, optimizer)
    for x in batches()[:2]:
        step(model, optimizer, x)
    assert sum(int(mask.sum()) for mask in masks(model)) == 96
    assert not any((now & ~then).any() for now, then in zip(masks(model), before, strict=True))


def test_snip_names_a_layer_of_which_it_knows_nothing():
    model = network()
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    nofm.attach(SNIP(), model, optimizer)
    with pytest.raises(nofm.OptimizerError, match=r"2\.weight had no gradient in the first batches"):
        step(model, optimizer, batches()[0])


def test_what_is_ranked_together_moves_together():
    model = network()
    apart = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model[0], model[2])]
    for method in (SNIP(), LotteryTicket(every=9), GMP(end_at=9, allocation="global"), UnstructuredSTE(allocation="global")):
        with pytest.raises(nofm.OptimizerError, match="2 optimizers step apart"):
            nofm.attach(method, model, apart)
    nofm.attach(GMP(sparsity=0.75, end_at=1), model, apart)
    for number, optimizer in enumerate(apart):
        step(model, optimizer, batches()[number])
    assert [site.kept() for site in nofm.sites(model)] == [64, 32]


REFUSED = {
    "sparsity": [
        (method, {"sparsity": value}) for method in (GMP, UnstructuredSTE, DNW, SNIP, LotteryTicket) for value in (0, 1.0, True, "x")
    ],
    "allocation": [(method, {"allocation": "some"}) for method in (GMP, UnstructuredSTE, DNW, LotteryTicket)],
    "begin_at": [(GMP, {"begin_at": -1}), (GMP, {"begin_at": 0.5})],
    "end_at": [(GMP, {"end_at": -1}), (GMP, {"end_at": 0.5}), (GMP, {"begin_at": 5, "end_at": 4})],
    "every": [(GMP, {"every": 0}), (LotteryTicket, {"every": -1})],
    "batches": [(SNIP, {"batches": 0})],
    "rounds": [(LotteryTicket, {"rounds": 0})],
    "rewind_to": [(LotteryTicket, {"rewind_to": -1}), (LotteryTicket, {"every": 5, "rewind_to": 5})],
    "initial": [(STR, {"initial": math.nan}), (STR, {"initial": True}), (STR, {"initial": "low"})],
}


@pytest.mark.parametrize(("option", "method", "given"), [(option, *case) for option, cases in REFUSED.items() for case in cases])
def test_bad_options_are_refused_by_name(option, method, given):
    with pytest.raises(nofm.OptimizerError, match=f"{option}="):
        method(**{GMP: {"end_at": 9}, LotteryTicket: {"every": 9}}.get(method, {}) | given)


@pytest.mark.parametrize(("method", "option"), [(GMP, "end_at"), (LotteryTicket, "every")], ids=["gmp", "lottery"])
def test_a_length_that_only_the_loop_knows_must_be_given(method, option):
    with pytest.raises(nofm.OptimizerError, match=f"^{method.__name__} needs {option}: the steps? "):
        method(sparsity=0.8)


def test_more_than_everything_cannot_be_pruned():
    with pytest.raises(nofm.OptimizerError, match=r"sparsity=0\.999 keeps no weight"):
        nofm.attach(SNIP(sparsity=0.999), model := network(), torch.optim.SGD(model.parameters()))


def test_phases_name_the_steps_that_masks_move_in():
    gmp = GMP(begin_at=3, end_at=12, every=4)
    assert [number for number in range(1, 20) if gmp.phase(number) is None] == [7, 11, 12]
    lottery = LotteryTicket(rounds=3, every=10, rewind_to=4)
    assert [number for number in range(1, 40) if lottery.phase(number) is None] == [4, 10, 16, 22]
    assert [number for number in range(1, 40) if LotteryTicket(rounds=2, every=10).phase(number) is None] == [1, 10, 20]
    assert [SNIP(batches=2).phase(number) for number in (1, 2, 3)] == [None, None, "frozen"]
    assert {method.phase(n) for method in (UnstructuredSTE(), DNW(), STR()) for n in range(1, 9)} == {"train"}
    assert len(set(itertools.chain.from_iterable({method.phase(n) for n in range(1, 50)} for method in (gmp, lottery)))) == 2


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "method", [nofm.UnstructuredSTE(0.75), nofm.GMP(0.75, end_at=2, every=1), nofm.SET(0.75, every=2)], ids=["ste", "gmp", "set"]
)
def test_a_stored_mask_lies_in_memory_as_its_weight_does(method, layout):
    """The two are read together in every step, and layouts side by side cost a GPU several times as long; the values are the same."""
    masks = []
    for memory_format in (torch.contiguous_format, layout):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Conv2d(12, 4, 3)).to(memory_format=memory_format)
        nofm.sparsify_(model, "1:1", preset="all")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nofm.attach(method, model, optimizer)
        for _ in range(3):  # the first mask, and those that are written in its place
            model(torch.linspace(-1, 1, 2 * 8 * 36).view(2, 8, 6, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for site in nofm.sites(model):
            assert site.stored_mask.stride() == site.weight.stride(), site.name
        masks.append([site.stored_mask.contiguous() for site in nofm.sites(model)])
    assert all(torch.equal(one, other) for one, other in zip(*masks, strict=True))
