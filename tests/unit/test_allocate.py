"""Mixed N:M: a pattern for each layer under one budget.

The choice is compared with the best one, found by trying them all, on networks small enough for it; and with what must hold for any
network, budget and set of patterns.
"""

from __future__ import annotations

import inspect
import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nofm
from nofm import Pattern, allocate_patterns
from nofm.allocate import CANDIDATES, STRATEGY
from nofm.engine.config import RunConfig, SparsityConfig
from nofm.engine.mixed import allocated

PATTERNS = ("1:16", "1:8", "1:4", "2:4", "dense")


def network(widths: tuple[int, ...] = (16, 32, 48, 16), seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in pairs))
    with torch.no_grad():
        for number, layer in enumerate(model):
            layer.weight.mul_(3.0**number)
    return model


def names(rules: dict[str, Pattern | None]) -> dict[str, str]:
    return {name: "dense" if pattern is None else str(pattern) for name, pattern in rules.items()}


def kept(model: nn.Module, rules: dict[str, Pattern | None]) -> Fraction:
    weights = {name: model.get_submodule(name).weight.numel() for name in rules}
    total = sum(Fraction(1 if p is None else Fraction(p.n, p.m)) * weights[name] for name, p in rules.items())
    return total / max(1, sum(weights.values()))


def dropped(model: nn.Module, rules: dict[str, Pattern | None]) -> float:
    lost = 0.0
    for name, pattern in rules.items():
        if pattern is not None:
            weight = model.get_submodule(name).weight.detach()
            lost += weight.double()[~nofm.mask(weight, pattern)].square().sum().item()
    return lost


# ---- by hand ----


def by_hand() -> nn.Sequential:
    """Two layers of four weights. Of the first, 1:4 drops 1 + 4 + 9 and 2:4 drops 1 + 4; of the second 4 * 3 and 4 * 2."""
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False))
    model[0].weight.data = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    model[1].weight.data = torch.tensor([[2.0, -2.0, 2.0, 2.0]])
    return model


BY_HAND = {
    # In units of one weight: the first layer's losses at 1, 2, 4 weights are 14, 5, 0, its steps save 9 and 2.5 a weight;
    # the second's are 12, 8, 0, its steps 4 and 4.
    "the least there is": (0.25, ["1:4", "1:4"]),
    "one weight more": (0.375, ["2:4", "1:4"]),
    "two more": (0.5, ["2:4", "2:4"]),
    "four more": (0.75, ["2:4", "dense"]),
    "everything": (1.0, ["dense", "dense"]),
    "a budget between two": (0.49, ["2:4", "1:4"]),
}


@pytest.mark.parametrize(("budget", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_magnitude_by_hand(budget, expected):
    rules = allocate_patterns(by_hand(), budget, ["1:4", "2:4", "dense"], preset="all", by="magnitude")
    assert list(names(rules).values()) == expected


def test_it_is_squares_that_count():
    """1:4 drops 4 of the first layer and 2, 2 and 2 of the second: less in sum, more in squares. There is room for one of them."""
    model = by_hand()
    model[0].weight.data, model[1].weight.data = torch.tensor([[5.0, 4.0, 0.0, 0.0]]), torch.tensor([[3.0, 2.0, -2.0, 2.0]])
    assert names(allocate_patterns(model, 0.625, ["1:4", "dense"], preset="all", by="magnitude")) == {"0": "dense", "1": "1:4"}


def test_sensitivity_by_gradients_by_hand():
    """Gradients of 0 make the first layer free to prune, whatever its magnitudes."""
    gradients = {"0.weight": torch.zeros(1, 4), "1.weight": torch.ones(1, 4)}
    rules = allocate_patterns(by_hand(), 0.625, ["1:4", "2:4", "dense"], preset="all", by="sensitivity", gradients=gradients)
    assert names(rules) == {"0": "1:4", "1": "dense"}
    signed = {"0.weight": torch.tensor([[-9.0, 9.0, 9.0, -9.0]]), "1.weight": torch.ones(1, 4)}
    rules = allocate_patterns(by_hand(), 0.625, ["1:4", "2:4", "dense"], preset="all", by="sensitivity", gradients=signed)
    assert names(rules) == {"0": "dense", "1": "1:4"}


def test_sensitivity_by_a_loss_measures_one_layer_at_a_time_and_puts_it_back():
    model, seen = by_hand(), []
    before = [layer.weight.detach().clone() for layer in model]

    def loss(model: nn.Module) -> float:
        seen.append([int((layer.weight != 0).sum()) for layer in model])
        return 100.0 * (model[1].weight == 0).sum().item() + 1.0 * (model[0].weight == 0).sum().item()

    rules = allocate_patterns(model, 0.625, ["1:4", "2:4", "dense"], preset="all", by="sensitivity", loss=loss)
    assert names(rules) == {"0": "1:4", "1": "dense"}
    assert seen == [[4, 4], [1, 4], [2, 4], [4, 1], [4, 2]]
    assert all(torch.equal(layer.weight, then) for layer, then in zip(model, before, strict=True))

    def breaks(model: nn.Module) -> float:
        if (model[0].weight == 0).any():
            raise RuntimeError("out of data")
        return 0.0

    with pytest.raises(RuntimeError, match="out of data"):
        allocate_patterns(model, 0.625, ["1:4", "dense"], preset="all", by="sensitivity", loss=breaks)
    assert all(torch.equal(layer.weight, then) for layer, then in zip(model, before, strict=True))


def test_a_layer_that_helps_by_being_pruned_counts_as_no_loss():
    rules = allocate_patterns(
        by_hand(), 0.25, ["1:4", "dense"], preset="all", by="sensitivity", loss=lambda model: float(model[0].weight.sum())
    )
    assert names(rules) == {"0": "1:4", "1": "1:4"}


# ---- against the best choice ----


def best(model: nn.Module, budget: float, patterns: tuple[str, ...]) -> float:
    """Exact dynamic programming over the weights kept: the least loss for each cost, layer by layer."""
    reached = {Fraction(0): 0.0}
    sizes = {str(i): layer.weight.numel() for i, layer in enumerate(model)}
    limit = Fraction(budget) * sum(sizes.values())
    for name, size in sizes.items():
        after: dict[Fraction, float] = {}
        for cost, lost in reached.items():
            for text in patterns:
                pattern = None if text == "dense" else Pattern(text)
                more = cost + size * (1 if pattern is None else Fraction(pattern.n, pattern.m))
                if more <= limit and (pattern is None or pattern.divides(model.get_submodule(name).in_features)):
                    total = lost + dropped(model, {name: pattern})
                    after[more] = min(total, after.get(more, float("inf")))
        reached = after
    return min(reached.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [0.0625, 0.1, 0.2, 0.3, 0.5, 0.7, 0.95])
def test_it_is_near_the_best_and_never_worse_than_uniform(budget, seed):
    model = network(seed=seed)
    found = dropped(model, allocate_patterns(model, budget, PATTERNS, preset="all", by="magnitude"))
    exact, uniform = best(model, budget, PATTERNS), dropped(model, allocate_patterns(model, budget, PATTERNS, preset="all", by="uniform"))
    largest_step = max(dropped(model, {str(i): Pattern("1:16")}) for i in range(len(model)))
    assert exact <= found * (1 + 1e-9) <= exact + largest_step
    assert found <= uniform * (1 + 1e-9)


def test_it_is_the_best_where_budgets_are_those_of_the_hull():
    """At a corner of the relaxation there is nothing left over, so the greedy choice is exact."""
    model = network()
    for budget in (0.0625, 1.0):
        rules = allocate_patterns(model, budget, PATTERNS, preset="all", by="magnitude")
        assert dropped(model, rules) == pytest.approx(best(model, budget, PATTERNS))
    rules = allocate_patterns(by_hand(), 0.375, ["1:4", "2:4", "dense"], preset="all", by="magnitude")
    assert dropped(by_hand(), rules) == pytest.approx(best(by_hand(), 0.375, ("1:4", "2:4", "dense")))


# ---- what holds for all ----


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    widths=st.lists(st.sampled_from([2, 4, 6, 8, 12, 16, 32]), min_size=2, max_size=5),
    budget=st.floats(0.01, 1.0),
    patterns=st.sets(st.sampled_from(["1:16", "1:8", "1:4", "2:8", "2:4", "4:8", "dense"]), min_size=1),
    by=st.sampled_from(["magnitude", "uniform", "erk"]),
)
def test_the_budget_is_never_exceeded_and_patterns_divide(widths, budget, patterns, by):
    model = network(tuple(widths))
    free = list(map(Pattern, patterns - {"dense"}))
    least = {
        str(i): min((p for p in free if p.divides(layer.in_features)), key=lambda p: p.density)
        for i, layer in enumerate(model)
        if any(p.divides(layer.in_features) for p in free)
    }
    if not least or kept(model, least) > budget:
        with pytest.raises(nofm.LayerError, match="cannot be met" if least else "has none that prunes|no layer would become sparse"):
            allocate_patterns(model, budget, patterns, by=by, preset="all")
        return
    rules = allocate_patterns(model, budget, sorted(patterns), by=by, preset="all")
    assert kept(model, {name: rules[name] for name in least}) <= budget + 1e-9
    assert rules == allocate_patterns(model, budget, sorted(patterns, reverse=True), by=by, preset="all"), (
        "the order of patterns is no matter"
    )
    for layer, pattern in zip(model, rules.values(), strict=True):
        assert str(pattern) in patterns or pattern is None
        assert pattern is None or pattern.divides(layer.in_features)
        if pattern is None and "dense" not in patterns:
            assert not any(p.divides(layer.in_features) for p in free)
    if any(pattern is not None for pattern in rules.values()):
        share = float(kept(model, rules))
        assert nofm.sparsify_(model, rules).density == pytest.approx(share)


@pytest.mark.parametrize("text", PATTERNS)
def test_uniform_is_one_pattern_where_the_budget_is_its_density(text):
    density = 1.0 if text == "dense" else Pattern(text).density
    rules = allocate_patterns(network(), density, PATTERNS, by="uniform", preset="all")
    assert set(names(rules).values()) == {text}
    if text != "1:16":
        below = allocate_patterns(network(), density - 0.001, PATTERNS, by="uniform", preset="all")
        assert set(names(below).values()) == {PATTERNS[PATTERNS.index(text) - 1]}


@pytest.mark.parametrize("by", ["magnitude", "uniform", "erk"])
def test_a_layer_that_a_pattern_does_not_divide_gets_another(by):
    model = network((16, 12, 6, 16))  # inputs of 16, 12 and 6: only 1:4 divides 12, nothing divides 6
    rules = names(allocate_patterns(model, 0.5, ["1:16", "1:4"], by=by, preset="all"))
    assert rules["1"] == "1:4"
    assert rules["2"] == "dense"
    nofm.sparsify_(model, allocate_patterns(model, 0.5, ["1:16", "1:4"], by=by, preset="all"))


def test_uniform_is_what_sparsify_makes_of_one_pattern():
    """Also where a layer that it does not divide stays dense: that is not of the budget."""
    model = network((6, 16, 32, 16))
    rules = allocate_patterns(model, 0.25, PATTERNS, by="uniform", preset="all")
    assert names(rules) == {"0": "dense", "1": "1:4", "2": "1:4"}
    assert [row.pattern for row in nofm.sparsify_(model, rules).rows] == ["", "1:4", "1:4"]


def test_ties_go_to_the_layer_that_comes_first():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer in model:
        layer.weight.data = torch.ones(4, 4)
    rules = names(allocate_patterns(model, 1 / 3, ["1:4", "2:4"], preset="all", by="magnitude"))
    assert rules == {"0": "2:4", "1": "1:4", "2": "1:4"}
    assert rules == names(allocate_patterns(model, 1 / 3, ["2:4", "1:4"], preset="all", by="magnitude"))


def test_erk_keeps_small_layers_denser():
    model = network((64, 128, 64, 16))
    rules = allocate_patterns(model, 0.25, PATTERNS, by="erk", preset="all")
    densities = [1.0 if pattern is None else pattern.density for pattern in rules.values()]
    assert densities[2] > densities[0]
    assert densities[0] == densities[1], "two layers of one size"


def test_a_budget_of_multiply_adds():
    """Strides make the first convolution cost four times as much for each weight, so it is the one to prune."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False))
    for layer in model:
        layer.weight.data = torch.rand(16, 16, 3, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    macs = allocate_patterns(model, 0.5, PATTERNS, of="macs", input_shape=(1, 16, 8, 8), preset="all", by="magnitude")
    densities = [1.0 if pattern is None else pattern.density for pattern in macs.values()]
    assert densities[0] < densities[1]
    nofm.sparsify_(model, macs)
    counted = nofm.cost(model, (1, 16, 8, 8))
    assert counted.macs_sparse <= 0.5 * counted.macs
    assert counted.macs_sparse >= 0.4 * counted.macs


def test_presets_and_skip_are_those_of_sparsify():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 10))
    assert list(allocate_patterns(model, 0.5, ["2:4"])) == ["1", "2"]
    assert list(allocate_patterns(model, 0.5, ["2:4"], preset="all")) == ["0", "1", "2", "4"]
    assert list(allocate_patterns(model, 0.5, ["2:4"], skip="1")) == ["2"]
    summary = nofm.sparsify_(model, allocate_patterns(model, 0.5, ["2:4"]))
    assert [row.name for row in summary.sparse] == ["1", "2"]


def test_tied_layers_get_one_pattern_and_count_once():
    model = network((16, 16, 16))
    model[1].weight = model[0].weight
    rules = allocate_patterns(model, 0.25, ["1:4", "dense"], preset="all", by="magnitude")
    assert names(rules) == {"0": "1:4", "1": "1:4"}
    nofm.sparsify_(model, rules)


@pytest.mark.parametrize("by", ["magnitude", "uniform", "erk"])
def test_flat_groups_divide_what_the_input_does_not(by):
    model = nn.Sequential(nn.Conv2d(3, 8, 4), nn.Conv2d(8, 8, 4))
    assert names(allocate_patterns(model, 0.25, ["1:4"], by=by, preset="all", axis="flat")) == {"0": "1:4", "1": "1:4"}


REFUSED = {
    "no budget": ({"budget": 0.0}, "budget=0.0 must be 0 < budget <= 1"),
    "too large": ({"budget": 1.5}, "budget=1.5 must be"),
    "no number": ({"budget": True}, "budget=True must be"),
    "a strategy": ({"by": "luck"}, "by='luck' is not one of 'magnitude'"),
    "a unit": ({"of": "flops"}, "of='flops' is not one of"),
    "macs without an input": ({"of": "macs"}, "needs the input_shape"),
    "an input without macs": ({"input_shape": (1, 16)}, "input_shape has no effect"),
    "sensitivity of nothing": ({"by": "sensitivity"}, "needs gradients or loss, one of them; got neither"),
    "sensitivity twice": ({"by": "sensitivity", "gradients": {}, "loss": float}, "got gradients and loss"),
    "gradients without sensitivity": ({"gradients": {}}, 'gradients has no effect on by="erk"'),
    "a gradient is missing": ({"by": "sensitivity", "gradients": {}}, "gradients has no '0.weight'"),
    "a gradient that a frozen weight has not": (
        {"by": "sensitivity", "gradients": {"0.weight": None}},
        "gradients has no '0.weight'",
    ),
    "a gradient that has overflowed": (
        {"by": "sensitivity", "gradients": {"0.weight": torch.full((32, 16), math.inf)}},
        r"gradients\['0.weight'\] is not finite",
    ),
    "a loss that is none": ({"by": "sensitivity", "loss": lambda model: None}, "loss has returned None for the dense model"),
    "a loss that overflows": (
        {"by": "sensitivity", "loss": lambda model: 1.0 if (model[0].weight != 0).all() else math.nan},
        "loss has returned nan for the model with 0 pruned; it must return a finite number",
    ),
    "a gradient of another shape": (
        {"by": "sensitivity", "gradients": {"0.weight": torch.ones(16)}},
        r"gradients\['0.weight'\] has shape \(16,\), the weight",
    ),
    "no patterns": ({"patterns": []}, "patterns has none that prunes"),
    "only dense": ({"patterns": ["dense", "4:4"]}, "patterns has none that prunes"),
    "patterns that divide nothing": ({"patterns": ["1:7"]}, "no layer would become sparse:\n  0: no pattern divides it"),
    "out of reach": ({"budget": 0.05}, "budget=0.05 cannot be met: with the sparsest pattern of each layer 0.0625"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_requests_are_refused(given, message):
    request = {"budget": 0.5, "patterns": PATTERNS, "preset": "all", **given}
    with pytest.raises(nofm.LayerError, match=message):
        allocate_patterns(network(), **request)


def test_a_run_with_a_budget_has_the_same_defaults():
    """One strategy and one list of patterns, whether a budget is given to the function or to a run; and its help says which."""
    config = RunConfig(sparsity=SparsityConfig(pattern=None, budget=0.07, preset="all"))
    model = nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 64), nn.Linear(64, 64))
    rules = names(allocate_patterns(model, 0.07, preset="all"))
    assert rules == names(allocated(model, config))
    assert rules == names(allocate_patterns(model, 0.07, ["1:64", "1:32", "1:16", "1:8", "1:4", "2:4", None], by="erk", preset="all"))
    for other in ({"by": "magnitude"}, {"patterns": PATTERNS}):
        assert rules != names(allocate_patterns(model, 0.07, preset="all", **other)), "else this test says nothing"
    said = inspect.getsource(SparsityConfig)
    assert f"; {STRATEGY} where nothing is said" in said
    assert f"; {' '.join(CANDIDATES)} where nothing is said" in said


def test_one_pattern_may_stand_alone():
    rules = allocate_patterns(network(), 0.5, "2:4", preset="all")
    assert (
        rules == allocate_patterns(network(), 0.5, Pattern("2:4"), preset="all") == allocate_patterns(network(), 0.5, ["2:4"], preset="all")
    )


def test_a_model_without_layers_is_named():
    with pytest.raises(nofm.LayerError, match="this ReLU has no layer of a kind that nofm knows; teach it"):
        allocate_patterns(torch.nn.ReLU(), 0.5)


def test_a_model_that_is_sparse_already_is_refused():
    model = network()
    nofm.sparsify_(model, "2:4", preset="all")
    with pytest.raises(nofm.LayerError, match="sparse already"):
        allocate_patterns(model, 0.5)


def test_a_nan_is_named():
    model = network()
    model[1].weight.data[3, 4] = float("nan")
    with pytest.raises(nofm.NonFiniteWeightError, match=r"1\.weight"):
        allocate_patterns(model, 0.5, preset="all", by="magnitude")
