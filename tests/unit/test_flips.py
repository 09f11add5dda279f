"""SR-STE with decay="auto": lambda found by the flip rate.

The search is checked on its own arithmetic by hand, on what it promises (a rate near the one wanted, a lambda that stays), and on
what it must not do (decay the control, wait for chance, cost a captured step anything).
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import nofm
from nofm import SRSTE
from nofm.methods import flips

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 240
SHORT = (
    'decay="auto" searches in {} steps (probe), and so short a search may find too large a lambda; give 100 or more, beyond the warm-up of '
)
SHORT += "the learning rate, or set decay yourself"


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    nofm.sparsify_(model, "1:4", preset="all")
    return model


def batches(count: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 64, generator=generator) for _ in range(count)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - x[:, :32]).square().mean().backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def trained(method: nofm.Method, count: int = STEPS) -> tuple[nn.Module, nofm.Handle, list[float], list[float]]:
    """A model, its handle, and for each step the flip rate and the lambda after it."""
    model = network()
    optimizer, sad, decays = sgd(model), nofm.SAD(model, keep=2), []
    handle = nofm.attach(method, model, optimizer)
    sad.record(0)
    for number, x in enumerate(batches(count), start=1):
        step(model, optimizer, x)
        sad.record(number)
        decays.append(float(handle.memory.tensors.get("decay", torch.nan)))
    return model, handle, list(sad.flip_rate().values()), decays


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# ---- one step by hand ----

# Three outputs, one group of 1:4 each: outputs 0 and 2 are even. FLIP moves an output's mask from place 0 to place 1, two bits.
W = [[4.0, 3.0, 0.0, 0.0]] * 3
FLIP, STILL = [4.0, -4.0, 0.0, 0.0], [0.0] * 4


def one_step(method: nofm.Method, pulled: list[list[float]]) -> tuple[nn.Linear, nofm.Handle]:
    linear = nn.Linear(4, 3, bias=False)
    linear.weight.data = torch.tensor(W)
    nofm.sparsify_(linear, "1:4", preset="all")
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)
    handle = nofm.attach(method, linear, optimizer)
    linear.weight.grad = torch.tensor(pulled)
    optimizer.step()
    return linear, handle


# Rates of 8 even and 4 odd weights, each rate and goal with one weight of the 12 more. The reach of 20 is spread over 10 steps.
BY_HAND = {
    "only decayed outputs flip": (SRSTE(decay="auto", probe=10), [FLIP, STILL, FLIP], 2.0),  # 3 * log((4/8 + 1/12) / (1/12)) > 1
    "only the control flips": (SRSTE(decay="auto", probe=10), [STILL, FLIP, STILL], -2.0),
    "both flip": (SRSTE(decay="auto", probe=10), [FLIP, FLIP, STILL], 2.0 * 3 * math.log((2 / 8 + 1 / 12) / (0.6 * 2 / 4 + 1 / 12))),
    "nothing flips": (SRSTE(decay="auto", probe=10), [STILL] * 3, 0.0),
    "a target": (SRSTE(decay="auto", probe=10, target=0.3), [FLIP, FLIP, STILL], 2.0 * 3 * math.log((4 / 12 + 1 / 12) / (0.3 + 1 / 12))),
    "a target that is far": (SRSTE(decay="auto", probe=10, target=0.001), [FLIP, STILL, STILL], 2.0),
}


@pytest.mark.parametrize(("method", "pulled", "moved"), BY_HAND.values(), ids=BY_HAND)
def test_one_step_of_the_search_by_hand(method, pulled, moved):
    _, handle = one_step(method, pulled)
    assert math.isclose(flips.decay_of(handle.memory), 2e-4 * math.exp(moved), rel_tol=1e-6)


@pytest.mark.parametrize("placement", ["gradient", "decoupled"])
def test_the_control_is_ste(placement):
    """The first lambda is 2e-4; only places 1 to 3 of even outputs, which are pruned, feel it."""
    linear, _ = one_step(SRSTE(decay="auto", placement=placement), [STILL] * 3)
    pull = [0.0, 0.5 * 2e-4 * 3.0, 0.0, 0.0]
    torch.testing.assert_close(torch.tensor(W) - linear.weight.detach(), torch.tensor([pull, STILL, pull]), rtol=1e-3, atol=0)
    linear, _ = one_step(SRSTE(decay="auto", placement=placement, target=0.01), [STILL] * 3)
    torch.testing.assert_close(torch.tensor(W) - linear.weight.detach(), torch.tensor([pull] * 3), rtol=1e-3, atol=0)


def test_outputs_are_split_along_the_axis_that_groups_do_not_run_along():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ConvTranspose2d(8, 5, 3))
    nofm.sparsify_(model, "2:4", preset="all")
    nofm.attach(SRSTE(decay="auto"), model, torch.optim.SGD(model.parameters(), lr=0.1))
    owned = [nofm.methods.OwnedWeight(site, site.weight, 0.1, True) for site in nofm.sites(model)]
    conv, transposed = (flips._even(one) for one in owned)
    assert [bool(conv[i].all()) for i in range(6)] == [True, False] * 3
    assert [bool(transposed[:, i].all()) for i in range(5)] == [True, False, True, False, True]


# ---- what it promises ----


def test_it_finds_a_lambda_that_calms_the_mask_and_keeps_it():
    _, _, auto, decays = trained(SRSTE(decay="auto", probe=120))
    assert len(set(decays[119:])) == 1, "after the probe it stays"
    assert len(set(decays[:119])) > 100, "in the probe it moves"
    assert math.isclose(decays[-1], math.exp(mean([math.log(decay) for decay in decays[60:119]])), rel_tol=0.05)
    _, _, ste, _ = trained(nofm.STE())
    assert mean(auto[120:]) < 0.8 * mean(ste[120:])


def test_the_decayed_outputs_flip_a_share_of_the_control():
    model = network()
    optimizer, flipped = sgd(model), []
    nofm.attach(SRSTE(decay="auto", probe=STEPS), model, optimizer)
    for x in batches():
        before = [site.mask().clone() for site in nofm.sites(model)]
        step(model, optimizer, x)
        changed = [old != site.mask() for old, site in zip(before, nofm.sites(model), strict=True)]
        flipped.append([sum(int(rows[first::2].sum()) for rows in changed) for first in (0, 1)])
    even, odd = (sum(counts) for counts in zip(*flipped[STEPS // 2 :], strict=True))
    assert 0.5 < even / odd < 0.7, f"{even} flips where lambda works, {odd} where it does not: the share should be {flips.SHARE}"


def test_it_comes_to_a_target():
    _, _, ste, _ = trained(nofm.STE())
    target = 0.5 * mean(ste[60:120])
    _, _, rates, decays = trained(SRSTE(decay="auto", probe=120, target=target))
    assert 0.8 < mean(rates[60:120]) / target < 1.25
    assert decays[-1] > 2e-4


def test_calmer_needs_more():
    found = [trained(SRSTE(decay="auto", probe=60, target=target), 60)[3][-1] for target in (0.03, 0.01, 0.003)]
    assert found == sorted(found)
    assert found[0] < found[-1]


@pytest.mark.parametrize("target", [None, 0.01])
def test_a_step_in_which_no_sparse_weight_has_a_gradient_says_nothing(target):
    model = network()
    optimizer = sgd(model)
    handle = nofm.attach(SRSTE(decay="auto", probe=8, target=target), model, optimizer)
    for x in batches(3):
        step(model, optimizer, x)
    before = flips.decay_of(handle.memory)
    optimizer.zero_grad()
    optimizer.step()
    assert flips.decay_of(handle.memory) == pytest.approx(before, rel=1e-12)
    for _ in range(4):
        optimizer.step()
    assert handle.found == {"decay": pytest.approx(before, rel=1e-6)}  # the search ends all the same


def test_it_stays_within_bounds():
    unreachable = trained(SRSTE(decay="auto", probe=40, target=1e-9), 40)[3]
    assert max(unreachable) <= 1.0 + 1e-9
    met = trained(SRSTE(decay="auto", probe=40, target=0.999), 40)[3]
    assert min(met) >= 1e-7 - 1e-15
    assert met[-1] < 2e-4


# ---- after a dense start, and in a gradual one ----


@pytest.mark.parametrize("target", [None, 0.05])
@pytest.mark.filterwarnings("ignore:SRSTE begins at step 0")
def test_after_a_dense_start_it_is_the_search_of_a_run_that_begins_there(target):
    data = batches(100)
    model, whole = network(), network()
    optimizer, its_optimizer = sgd(model), sgd(whole)
    handle = nofm.attach(SRSTE(decay="auto", probe=60, begin_at=40, target=target), whole, its_optimizer)
    dense = nofm.attach(nofm.Dense(), model, optimizer)
    for x in data[:40]:
        step(model, optimizer, x)
        step(whole, its_optimizer, x)
        assert flips.decay_of(handle.memory) == 2e-4, "there is nothing to look at yet"
    dense.detach()
    later = nofm.attach(SRSTE(decay="auto", probe=60, target=target), model, optimizer)
    for x in data[40:]:
        assert not handle.found
        step(model, optimizer, x)
        step(whole, its_optimizer, x)
        assert flips.decay_of(handle.memory) == flips.decay_of(later.memory)
    assert handle.found == later.found != {"decay": 2e-4}


@pytest.mark.filterwarnings("ignore:SRSTE begins at step 0")
def test_in_a_gradual_start_it_waits_for_the_pattern():
    """Until then the term has the first lambda, that of the paper; then the search is that of a run that begins there."""
    data, models = batches(100), (network(), network())
    optimizers = [sgd(model) for model in models]
    start = {"ramp_at": 0, "begin_at": 40}
    handle = nofm.attach(SRSTE(decay="auto", probe=60, **start), models[0], optimizers[0])
    fixed = nofm.attach(SRSTE(decay=2e-4, **start), models[1], optimizers[1])
    for number, x in enumerate(data):
        if number == 40:
            fixed.detach()
            later = nofm.attach(SRSTE(decay="auto", probe=60), models[1], optimizers[1])
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, x)
        assert flips.decay_of(handle.memory) == (2e-4 if number < 40 else flips.decay_of(later.memory))
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    assert handle.found == later.found != {"decay": 2e-4}


def test_the_host_is_needed_in_the_probe_after_a_start():
    method = SRSTE(decay="auto", probe=20, begin_at=40)
    phases = [method.phase(number) for number in range(1, 62)]
    assert phases == ["dense"] * 39 + [None] * 21 + ["train"]
    method = SRSTE(decay="auto", probe=8, ramp_at=10, begin_at=40)
    phases = [method.phase(number) for number in range(1, 50)]
    narrow = [phase for stage in (1, 2, 3) for phase in (f"narrowing {stage}",) * 9 + (None,)]
    assert phases == ["dense"] * 9 + [None] + narrow + [None] * 8 + ["train"]


# ---- resumed ----


@pytest.mark.parametrize("start", [{}, {"begin_at": 20}, {"begin_at": 60, "ramp_at": 10}], ids=["at once", "dense start", "gradual start"])
@pytest.mark.parametrize("saved_at", [15, 30, 90], ids=["early", "in the probe", "after it"])
def test_a_resumed_run_is_the_run(saved_at, start):
    method, data = SRSTE(decay="auto", probe=60, **start), batches(120)
    model = network()
    optimizer = sgd(model)
    handle = nofm.attach(method, model, optimizer)
    for number, x in enumerate(data, start=1):
        step(model, optimizer, x)
        if number == saved_at:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), handle.state_dict()])
    resumed = network()
    optimizer = sgd(resumed)
    second = nofm.attach(method, resumed, optimizer)
    for part, state in zip((resumed, optimizer, second), saved, strict=True):
        part.load_state_dict(state)
    for x in data[saved_at:]:
        step(resumed, optimizer, x)
    assert flips.decay_of(second.memory) == flips.decay_of(handle.memory)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_state_without_a_search_is_refused_before_anything_is_changed():
    models = network(), network()
    fixed, searched = (nofm.attach(SRSTE(decay), model, sgd(model)) for decay, model in zip((1e-3, "auto"), models, strict=True))
    with pytest.raises(
        nofm.OptimizerError, match="this state of SRSTE has no decay, which the attached one goes on from: it is of other options, or"
    ):
        searched.load_state_dict({**fixed.state_dict(), "steps": [7], "options": {}})  # as before options were saved
    assert searched.step == 0


def test_the_host_is_only_needed_in_the_probe():
    method = SRSTE(decay="auto", probe=60)
    assert {method.phase(number) for number in range(1, 61)} == {None}
    assert {method.phase(number) for number in (61, 1000)} == {"train"}
    assert SRSTE(decay="auto").phase(flips.PROBE) is None
    assert SRSTE(decay="auto").phase(flips.PROBE + 1) == "train"
    assert SRSTE().phase(1) == "train"


REFUSED = {
    "another word": ({"decay": "automatic"}, "decay='automatic' is no finite number"),
    "target without auto": ({"target": 0.1}, "target=0.1 has no effect with decay=0.0002"),
    "probe without auto": ({"probe": 100}, "probe=100 has no effect with decay=0.0002"),
    "target of everything": ({"decay": "auto", "target": 1.0}, "target=1.0 must be 0 < target < 1"),
    "no probe": ({"decay": "auto", "probe": 0}, "probe=0 must be a whole number, 8 or more"),
    "backward": ({"decay": "auto", "placement": "backward"}, "which backward does not know"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_options_are_refused(given, message):
    with pytest.raises(nofm.OptimizerError, match=message):
        SRSTE(**given)


def test_one_optimizer_only():
    model = network()
    apart = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model[0], model[2])]
    with pytest.raises(nofm.OptimizerError, match="2 optimizers step apart"):
        nofm.attach(SRSTE(decay="auto"), model, apart)


def test_what_it_has_found_is_told_once_it_has_settled():
    model = network()
    optimizer = sgd(model)
    handle = nofm.attach(SRSTE(decay="auto", probe=8), model, optimizer)
    for x in batches(7):
        step(model, optimizer, x)
    assert handle.found == {}
    assert "found" not in repr(handle)
    step(model, optimizer, batches(1)[0])
    decay = flips.decay_of(handle.memory)
    assert handle.found == {"decay": decay}
    assert repr(handle).endswith(f"step=8, 2 sparse weights, decay found: {decay:.3g})")
    handle.detach()
    assert nofm.attach(SRSTE(decay=1e-3), model, optimizer).found == {}


@pytest.mark.parametrize(("probe", "said"), [(8, [SHORT.format(8)]), (99, [SHORT.format(99)]), (100, []), (None, [])])
def test_a_search_that_is_too_short_says_so(probe, said):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nofm.attach(SRSTE(decay="auto", probe=probe), model, optimizer)
    assert [str(warning.message) for warning in caught] == said
    assert {warning.filename for warning in caught} <= {__file__}
