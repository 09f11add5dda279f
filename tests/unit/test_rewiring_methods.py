"""SET, RigL, SNFS, DSR and DEEP R: what must hold in every step, that a resumed run is the run, and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from own_optimizer import OwnAdam
from torch import Tensor, nn

import nofm
from nofm.engine.config import ConfigError, EngineConfig, MethodConfig, RunConfig, SparsityConfig
from nofm.engine.validate import UNSTRUCTURED, check
from nofm.methods.budget import allocate
from nofm.methods.rewiring import best, chance

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- in every step ----

METHODS: dict[str, nofm.Method] = {
    "set": nofm.SET(sparsity=0.8, every=4),
    "rigl, erk": nofm.RigL(sparsity=0.8, every=4, end_at=33),
    "rigl, uniform": nofm.RigL(sparsity=0.8, allocation="uniform", every=4, end_at=33),
    "snfs": nofm.SNFS(sparsity=0.8, every=4),
    "snfs, cosine": nofm.SNFS(sparsity=0.8, every=4, end_at=33),
    "dsr": nofm.DSR(sparsity=0.8, every=4, drop=0.05),
    "deepr": nofm.DeepRewiring(sparsity=0.8, l1=1e-2, temperature=1e-4),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-3, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, amsgrad=True),
    "own": OwnAdam,
}
MOMENTS = {"sgd": {"momentum_buffer"}, "adamw": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, "own": {"first", "second"}}
SHAPES = [(24, 16), (24, 24), (8, 24)]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(inputs, outputs) for outputs, inputs in SHAPES]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    nofm.sparsify_(model, "1:1", preset="all")
    return model


def batches(seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    for _ in itertools.count():
        yield torch.randn(8, 16, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - x[:, :8]).square().mean().backward()
    optimizer.step()


def stored_masks(model: nn.Module) -> list[Tensor]:
    return [site.stored_mask.clone() for site in nofm.sites(model)]


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_in_every_step(method, optimizer_name):
    """The budget is exact; pruned weights are +0.0; masks move in steps that say so; what is new is 0 and has no momentum."""
    model = network()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    handle = nofm.attach(method, model, optimizer)
    budget = allocate(SHAPES, method.sparsity, method.allocation)
    before, moved, born = stored_masks(model), 0, 0
    assert [int(mask.sum()) for mask in before] == budget
    for number, x in enumerate(itertools.islice(batches(), 42), start=1):
        step(model, optimizer, x)
        masks = stored_masks(model)
        counts = [int(mask.sum()) for mask in masks]
        assert sum(counts) == sum(budget)
        if not isinstance(method, nofm.SNFS | nofm.DSR):
            assert counts == budget
        for site, mask, old in zip(nofm.sites(model), masks, before, strict=True):
            weight, new = site.weight.detach(), mask & ~old
            assert not weight[~mask].view(torch.int32).any()  # -0.0 has a bit set
            assert not weight[new].any()
            for name in MOMENTS[optimizer_name]:
                assert not optimizer.state[site.weight][name][new].any()
            born += int(new.sum())
        if any(not torch.equal(a, b) for a, b in zip(before, masks, strict=True)):
            assert method.phase(number) is None or isinstance(method, nofm.DeepRewiring)
            moved += 1
        before = masks
    assert moved >= 7  # steps 4, 8, ..., 32 are eight
    assert born > 20
    assert handle.step == 42
    assert all((site.weight != 0).sum() > 0.8 * site.kept() for site in nofm.sites(model))  # and what is alive trains


@pytest.mark.parametrize(
    ("method", "rewires"), [(METHODS["set"], [4, 8, 12]), (nofm.RigL(every=4, end_at=12), [4, 8])], ids=["set", "rigl"]
)
def test_steps_that_rewire_are_not_captured(method, rewires):
    assert [number for number in range(1, 14) if method.phase(number) is None] == rewires
    assert {method.phase(number) for number in range(1, 14)} == {None, "train"}


def test_steps_of_deep_rewiring_are_alike_though_all_rewire():
    assert {METHODS["deepr"].phase(number) for number in range(1, 9)} == {"train"}


@pytest.mark.parametrize("lr", [0.03125, torch.tensor(0.03125)], ids=["a number", "a tensor"])
def test_a_step_of_deep_rewiring_needs_nothing_of_the_host_that_changes(lr):
    """A CUDA graph replays it with the number of the step that it was captured in, and a learning rate that lies on the device. (At this
    temperature its square root in fp32 and the rounded one of fp64 differ.)"""
    trained = []
    for captured in (False, True):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr if captured else 0.03125, momentum=0.9, foreach=False)
        handle = nofm.attach(nofm.DeepRewiring(sparsity=0.8, l1=1e-2, temperature=9e-5), model, optimizer)
        model[2].weight.requires_grad_(False)  # and one that rests is counted for as well
        for x in itertools.islice(batches(), 8):
            handle._drivers[0].number = 4 if captured else handle.step
            step(model, optimizer, x)
        assert {name: int(count) for name, count in handle.memory.tensors.items() if name.startswith("number:")} == {
            f"number:{site.key}": 8 for site in nofm.sites(model)
        }
        trained.append([*model.parameters(), *stored_masks(model)])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_weight_that_is_no_number_is_named(method):
    """In a step that rewires, which must not drop it first."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    nofm.attach(method, model, optimizer)
    for x in itertools.islice(batches(), 3):
        step(model, optimizer, x)
    place = stored_masks(model)[1].nonzero()[-1].tolist()
    model[2].weight.data[*place] = float("nan")
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(nofm.NonFiniteWeightError, match=r"2\.weight.*nan"):
        optimizer.step()


class Forgetful(torch.optim.SGD):
    """Never calls the closure that computes its gradients."""

    def step(self, closure=None):
        return None


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_step_whose_gradients_nobody_computed(method):
    model = network()
    optimizer = Forgetful(model.parameters(), lr=0.1)
    handle = nofm.attach(method, model, optimizer)
    step(model, optimizer, next(batches()))
    for _ in range(4):
        optimizer.step(lambda: None)
    assert handle.step == 5
    assert sum(site.kept() for site in nofm.sites(model)) == sum(allocate(SHAPES, method.sparsity, method.allocation))


def test_weights_without_a_gradient_stay_as_they_are():
    model = network()
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    nofm.attach(nofm.SNFS(sparsity=0.8, every=2), model, optimizer)
    resting, mask = model[2].weight.detach().clone(), stored_masks(model)[1]
    for x in itertools.islice(batches(), 6):
        step(model, optimizer, x)
    assert torch.equal(model[2].weight, resting)
    assert torch.equal(stored_masks(model)[1], mask)
    assert sum(site.kept() for site in nofm.sites(model)) == sum(allocate(SHAPES, 0.8, "uniform"))


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_resumed_run_is_the_run(method, optimizer_name):
    """Saved after step 15, so that step 16 rewires by what was saved. The new network has other starting weights."""
    model = network()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    handle, data = nofm.attach(method, model, optimizer), list(itertools.islice(batches(), 30))
    for number, x in enumerate(data, start=1):
        step(model, optimizer, x)
        if number == 15:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), handle.state_dict()])

    resumed = network(seed=9)
    optimizer = OPTIMIZERS[optimizer_name](resumed.parameters())
    other = nofm.attach(method, resumed, optimizer)
    for part, state in zip((resumed, optimizer, other), saved, strict=True):
        part.load_state_dict(state)
    for x in data[15:]:
        step(resumed, optimizer, x)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(stored_masks(model), stored_masks(resumed), strict=True):
        assert torch.equal(a, b)
    assert {name: tensor.tolist() for name, tensor in handle.memory.tensors.items()} == {
        name: tensor.tolist() for name, tensor in other.memory.tensors.items()
    }


# ---- chance ----


def test_chance_is_by_seed_step_and_layer_and_leaves_torchs_own_alone():
    site, other = itertools.islice(nofm.sites(network()), 1, 3)
    before = torch.get_rng_state()
    draws = [chance(0, 1, site), chance(1, 1, site), chance(0, 2, site), chance(0, 1, other)]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(draws[0], chance(0, 1, site))
    flat = [draw.flatten()[:128] for draw in draws]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(flat, 2))
    assert all(abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.3 for a, b in itertools.combinations(flat, 2))


def test_the_first_connections_are_by_seed_not_by_weight():
    masks = {}
    for seed, weights in ((0, 0), (0, 9), (1, 0)):
        model = network(seed=weights)
        nofm.attach(nofm.RigL(sparsity=0.8, end_at=200, seed=seed), model, torch.optim.SGD(model.parameters(), lr=0.1))
        masks[seed, weights] = stored_masks(model)
    assert all(torch.equal(a, b) for a, b in zip(masks[0, 0], masks[0, 9], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(masks[0, 0], masks[1, 0], strict=True))


@pytest.mark.parametrize("count", [0, 1, 3, 4, torch.tensor(2)], ids=str)
def test_the_best_are_taken_from_those_allowed(count):
    """Also where they are zero: a zero that is allowed goes before everything that is not."""
    scores, among = torch.tensor([0.0, 9.0, -0.0, 2.0, -3.0, 9.0]), torch.tensor([True, False, True, True, True, False])
    expected = [4, 3, 0, 2][: int(count)]
    assert best(scores, among, count).nonzero().flatten().tolist() == sorted(expected)


# ---- options, and what is there already ----

REFUSED = {
    "sparsity": (lambda: nofm.SET(sparsity=1.0), r"sparsity=1\.0 must be 0 < sparsity < 1"),
    "allocation": (lambda: nofm.RigL(allocation="er", end_at=900), "allocation='er' is not one of 'uniform', 'erk'"),
    "seed": (lambda: nofm.DeepRewiring(seed=-1), "seed=-1 must be a whole number, 0 or more"),
    "every": (lambda: nofm.DSR(every=0), "every=0 must be a whole number, 1 or more"),
    "end_at": (lambda: nofm.SET(end_at=0), "end_at=0 must be a whole number, 1 or more"),
    "an end before the first rewiring": (
        lambda: nofm.RigL(end_at=50),
        r"end_at=50 comes before the first rewiring, after 100 steps \(every\)",
    ),
    "an end at the first rewiring": (lambda: nofm.SET(every=7, end_at=7), "masks would stay as they were drawn; give a smaller every"),
    "rigl without an end": (lambda: nofm.RigL(sparsity=0.9), "RigL needs end_at: the step from which on its masks stay"),
    "rigl with half an end": (lambda: nofm.RigL(end_at=0.5), r"end_at=0\.5 must be a whole number, 1 or more"),
    "drop": (lambda: nofm.SNFS(drop=0), "drop=0 must be 0 < drop < 1"),
    "smoothing": (lambda: nofm.SNFS(smoothing=1), "smoothing=1 must be 0 < smoothing < 1"),
    "threshold": (lambda: nofm.DSR(threshold=-1), "threshold=-1 must be a finite number, 0 or more"),
    "threshold 0": (lambda: nofm.DSR(threshold=0), "threshold=0 would stay 0"),
    "tolerance": (lambda: nofm.DSR(tolerance=2), "tolerance=2 must be 0 < tolerance < 1"),
    "dsr drops all": (lambda: nofm.DSR(sparsity=0.9, drop=0.2), r"drop=0\.2 of all weights is no part of the 0\.1 that sparsity=0\.9"),
    "l1": (lambda: nofm.DeepRewiring(l1=float("nan")), "l1=nan must be a finite number, 0 or more"),
    "temperature": (lambda: nofm.DeepRewiring(temperature=float("inf")), "temperature=inf must be a finite number"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_mean_nothing_are_refused(make, message):
    with pytest.raises(nofm.OptimizerError, match=message):
        make()


def test_a_method_goes_on_with_the_masks_of_another():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nofm.attach(nofm.RigL(sparsity=0.8, end_at=900), model, optimizer).detach()
    masks = stored_masks(model)
    nofm.attach(nofm.SET(sparsity=0.8), model, optimizer).detach()
    assert all(torch.equal(a, b) for a, b in zip(masks, stored_masks(model), strict=True))
    with pytest.raises(
        nofm.OptimizerError, match=r"0 has a frozen mask, and with such masks 230 weights are kept, not 576 as sparsity=0\.5"
    ):
        nofm.attach(nofm.SET(sparsity=0.5), model, optimizer)


CONFIGS = {
    "a pattern": ({"pattern": "2:4"}, {"kind": "rigl"}, "sparsity.pattern = 2:4: must be 1:1 for rigl"),
    "a rule": ({"pattern": None, "rules": ("*=2:4",)}, {"kind": "dsr"}, "must be 1:1 for dsr"),
    "sparsity": ({"pattern": "1:1"}, {"kind": "set", "sparsity": 1.5}, "sparsity.method.sparsity = 1.5: must be 0 < sparsity < 1"),
    "every": ({"pattern": "1:1"}, {"kind": "snfs", "every": 0}, "sparsity.method.every = 0: must be every > 0"),
    "l1": ({"pattern": "1:1"}, {"kind": "deepr", "l1": -1.0}, "sparsity.method.l1 = -1.0: must be l1 >= 0"),
    "threshold": ({"pattern": "1:1"}, {"kind": "dsr", "threshold": 0.0}, "sparsity.method.threshold = 0.0: must be threshold > 0"),
    "an option of another": ({"pattern": "1:1"}, {"kind": "deepr", "drop": 0.1}, "drop = 0.1: has no effect on deepr"),
}


@pytest.mark.parametrize(("sparsity", "method", "message"), CONFIGS.values(), ids=CONFIGS)
def test_configurations_that_mean_nothing_are_refused(sparsity, method, message):
    config = RunConfig(sparsity=SparsityConfig(**sparsity, method=MethodConfig(**method)), engine=EngineConfig(steps=10))
    with pytest.raises(ConfigError) as told:
        check(config)
    assert message in str(told.value)


def test_methods_that_need_1_1_are_the_unstructured_ones():
    assert {name for name, row in nofm.METHODS.items() if row.method.unstructured} == set(UNSTRUCTURED)
