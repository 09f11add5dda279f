"""K4 and K8: a request that would have no effect, or not the one asked for, is an error that names the layer and says what to do,
and the model is as it was. What is only surprising is one warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
from torch import nn

import nofm


class Unknown(nn.Module):
    """A layer of a kind that nofm does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


def _small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))


def _odd() -> nn.Module:
    return nn.ModuleDict({"a": nn.Conv2d(6, 8, 3), "b": nn.Linear(10, 8), "c": nn.Linear(16, 8)})


def _sparse() -> nn.Module:
    model = _small()
    nofm.sparsify_(model, "2:4")
    return model


def _tiny_resnet() -> nn.Module:
    model = torchvision.models.resnet18(num_classes=4)
    model.layer4[0].conv1 = nn.Conv2d(6, 8, 3)
    return model


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    rules: Any
    options: dict[str, Any]
    message: str
    error: type[Exception] = nofm.LayerError


_CASES = {
    "a class in the rules": Case(
        _small,
        {nn.Linear: "2:4"},
        {},
        "<class 'torch.nn.modules.linear.Linear'> is no name of a layer; rules and skip take names and globs of them, such as 'layer4.*'",
    ),
    "a class to skip": Case(
        _small,
        "2:4",
        {"skip": nn.Linear},
        "<class 'torch.nn.modules.linear.Linear'> is no name of a layer; rules and skip take names and globs of them, such as 'layer4.*'",
    ),
    "no-layers": Case(nn.ReLU, "2:4", {}, "this ReLU has no layer of a kind that nofm knows; teach it with nofm.register_layer"),
    "only-unknown": Case(Unknown, "2:4", {}, "this Unknown has no layer of a kind that nofm knows; teach it with nofm.register_layer"),
    "nothing-chosen": Case(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)),
        "2:4",
        {},
        "no layer would become sparse:\n"
        "  0: 2:4 needs in_features divisible by 4, got 6\n"
        "  1: classifier (preset default)\n"
        "Name layers in a rule, or choose another preset",
    ),
    "all-skipped": Case(
        _small,
        "2:4",
        {"skip": "*"},
        "no layer would become sparse:\n  0: skip='*'\n  2: skip='*'\nName layers in a rule, or choose another preset",
    ),
    "twice": Case(
        _sparse, "2:4", {}, "1 modules of this model are sparse already; densify_ or fold_ it first, or sparsify_ another part of it"
    ),
    "rule-matches-nothing": Case(
        lambda: nn.ModuleDict({"stem_conv": nn.Conv2d(8, 8, 1), "head": nn.Linear(8, 8)}),
        {"stem.conv": "2:4"},
        {},
        "'stem.conv' matches no layer; did you mean 'stem_conv'?",
    ),
    "rule-names-a-container": Case(
        lambda: torchvision.models.resnet18(), {"layer1": "2:4"}, {}, "'layer1' matches no layer; did you mean 'layer1.*'?"
    ),
    "glob-matches-nothing": Case(
        lambda: torchvision.models.resnet18(),
        {"layr4.*": "2:4"},
        {},
        "'layr4.*' matches no layer; did you mean 'layer4.*' or 'layer4.1.*' or 'layer4.0.*'?",
    ),
    "rule-names-an-unknown-kind": Case(
        _small, {"1": "2:4", "*": "2:4"}, {}, "'1' is a LayerNorm, whose weights nofm does not know; teach it with nofm.register_layer"
    ),
    "skip-matches-nothing": Case(_small, "2:4", {"skip": ["head"]}, "'head' matches no layer; layers are 0, 2"),
    "rule-never-reached": Case(
        _small, {"*": "2:4", "0": "1:4"}, {}, "rule '0' has no effect: rules before it take all its layers; put it before them"
    ),
    "rule-and-skip": Case(_small, {"0": "2:4"}, {"skip": "0"}, "0: rule '0' makes it 2:4 and skip='0' keeps it dense; drop one of them"),
    "rule-and-skip-by-parameter": Case(
        _small, {"0.weight": "2:4"}, {"skip": "0"}, "0: rule '0.weight' makes it 2:4 and skip='0' keeps it dense; drop one of them"
    ),
    "no-rules": Case(_small, {}, {}, 'rules are empty; give a pattern, or {glob: pattern} such as {"layer4.*": "1:4", "*": "2:4"}'),
    "preset": Case(_small, "2:4", {"preset": "apex"}, "preset='apex' is not one of 'default', 'paper', 'asp', 'all'"),
    "axis": Case(_small, "2:4", {"axis": "output"}, 'axis=\'output\' is not one of "input", "flat"'),
    "lazy": Case(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)),
        "2:4",
        {},
        "1: its weights do not exist yet (lazy module); run one forward before sparsify_",
    ),
    "K8": Case(
        _tiny_resnet,
        {"layer4.0.conv1": "2:4"},
        {},
        "layer4.0.conv1: 2:4 needs in_channels divisible by 4, got 6; add it to skip or pass pad=True",
    ),
    "K8-all-at-once": Case(
        _odd,
        "2:4",
        {"preset": "all"},
        "a: 2:4 needs in_channels divisible by 4, got 6; add it to skip or pass pad=True\n"
        "b: 2:4 needs in_features divisible by 4, got 10; add it to skip or pass pad=True",
    ),
    "K8-flat": Case(
        lambda: nn.Conv2d(3, 8, 3),
        "2:4",
        {"preset": "all", "axis": "flat"},
        "weight: 2:4 needs the flattened filter divisible by 4, got 27; add it to skip or pass pad=True",
    ),
    "K8-padding": Case(
        lambda: nn.ConvTranspose2d(12, 8, 3, groups=2),
        "2:4",
        {"preset": "all", "pad": True},
        "weight: 2:4 needs in_channels / groups divisible by 4, got 6; padding would run into the next conv group; add it to skip",
    ),
    "K8-recurrent": Case(
        lambda: nn.LSTM(6, 8),
        {"weight_ih_l0": "2:4", "weight_hh_l0": "2:4"},
        {},
        "weight_ih_l0: 2:4 needs the input axis divisible by 4, got 6; add it to skip or pass pad=True",
    ),
    "pattern": Case(_small, "5:4", {}, "'5:4' keeps more than it has", nofm.PatternError),
    "pattern-in-a-rule": Case(_small, {"0": "2:4", "2": "2/4"}, {}, "'2/4' is no pattern", nofm.PatternError),
}


def _state(model: nn.Module) -> list[Any]:
    """What a failed request must leave as it was."""
    return [
        [(name, type(module), sorted(vars(module)), sorted(module._buffers)) for name, module in model.named_modules()],
        [(name, id(parameter)) for name, parameter in model.named_parameters()],
        [(key, None if nn.parameter.is_lazy(tensor) else tensor.clone()) for key, tensor in model.state_dict().items()],
    ]


def assert_same_state(got: list[Any], expected: list[Any]) -> None:
    assert got[:2] == expected[:2]
    for (key, tensor), (same_key, before) in zip(got[2], expected[2], strict=True):
        assert key == same_key
        assert tensor is before if tensor is None else torch.equal(tensor, before), key


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_a_request_without_its_effect_is_an_error_and_changes_nothing(case: Case) -> None:
    torch.manual_seed(0)
    model = case.make()
    before = _state(model)
    with pytest.raises(case.error) as caught:
        nofm.sparsify_(model, case.rules, **case.options)
    assert str(caught.value).startswith(case.message) if case.error is nofm.PatternError else str(caught.value) == case.message
    assert isinstance(caught.value, ValueError)
    assert_same_state(_state(model), before)


@pytest.mark.parametrize("verb", [nofm.fold_, nofm.densify_])
def test_undoing_what_was_not_done_is_an_error(verb: Callable[[nn.Module], nn.Module]) -> None:
    model = _small()
    before = _state(model)
    with pytest.raises(nofm.LayerError, match="this Sequential has no sparse layer; sparsify_ comes first"):
        verb(model)
    assert_same_state(_state(model), before)


@pytest.mark.parametrize("verb", [nofm.fold_, nofm.densify_])
def test_what_was_folded_already_may_be_told_so(verb: Callable[[nn.Module], nn.Module]) -> None:
    model = _small()
    nofm.sparsify_(model, "2:4", preset="all")
    nofm.fold_(model)
    with pytest.raises(nofm.LayerError, match=r"Or was it folded already\? nofm\.verify\(model\) tells"):
        verb(model)


@pytest.mark.parametrize(
    ("given", "named"),
    [(None, "None"), ("2:4", "'2:4'"), (nn.Linear, "<class .*Linear'>"), ({}, "a dict")],
    ids=["None", "text", "class", "dict"],
)
@pytest.mark.parametrize("verb", [nofm.fold_, nofm.densify_, nofm.summary, nofm.SAD, lambda model: nofm.sparsify_(model, "2:4")])
def test_what_is_no_model_is_named(verb: Callable[[Any], Any], given: Any, named: str) -> None:
    with pytest.raises(nofm.LayerError, match=f"a model is needed here, an nn.Module, got {named}"):
        verb(given)


# ---- what is as asked and may still surprise ----


def _warnings_of(request: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        request()
    assert all(warning.filename == __file__ for warning in caught), "a warning points at the line that asked"
    return [str(warning.message) for warning in caught]


def test_keeping_all_of_every_group_is_warned_about_once() -> None:
    def request() -> None:
        nofm.sparsify_(_small(), {"0": "4:4", "2": "4:4"})

    assert _warnings_of(request) == ["4:4 keeps every weight: its layers stay dense in effect"]


def test_a_rule_whose_layers_all_stay_dense_is_warned_about() -> None:
    model = nn.ModuleDict({"dw": nn.Conv2d(8, 8, 3, groups=8), "odd": nn.Linear(6, 8), "fc": nn.Linear(8, 8)})

    def request() -> None:
        nofm.sparsify_(model, {"dw": "2:4", "o*": "2:4", "fc": "2:4"})

    assert _warnings_of(request) == [
        "rule 'dw' makes no layer sparse; dw: depthwise: one input channel a filter",
        "rule 'o*' makes no layer sparse; odd: 2:4 needs in_features divisible by 4, got 6",
    ]


_ADVICE = (
    "2:4 needs in_features divisible by 4, got 30. Give {0} a rule with a pattern that does, pass pad=True, or name {0} in skip if that is "
    "meant; sparsify_ returns all layers and reasons"
)


@pytest.mark.parametrize(
    ("outputs", "given", "said"),
    [
        ((10, 10), {}, [f"0 and 1 more stay dense, with 10% of these weights: {_ADVICE.format('them')}"]),
        ((20, 0), {}, [f"0 stays dense, with 10% of these weights: {_ADVICE.format('it')}"]),
        ((10, 9), {}, []),  # just below a tenth
        ((10, 10), {"skip": ["0", "1"]}, []),
        ((10, 10), {"pad": True}, []),
    ],
)
def test_layers_that_do_not_divide_are_warned_about_where_they_are_much(outputs, given, said) -> None:
    odd = [nn.Linear(30, each) for each in outputs if each]
    model = nn.Sequential(*odd, nn.Linear(64, 81), nn.Linear(8, 1))
    assert _warnings_of(lambda: nofm.sparsify_(model, "2:4", **given)) == said


def test_nothing_is_warned_about_otherwise() -> None:
    assert _warnings_of(lambda: nofm.sparsify_(_small(), {"0": "2:4", "*": None})) == []


# ---- a forward that somebody has put on an object, which a class swap does not reach ----

_BYPASSED = "its forward was replaced on the object (a hook?), where no mask reaches; undo that, sparsify_, and do it again"


def _hook(module: nn.Module) -> None:
    """As accelerate and others do it."""
    module.forward = functools.partial(lambda plain, *args, **kwargs: plain(*args, **kwargs), module.forward)


def test_a_layer_with_a_replaced_forward_stays_dense_and_says_so() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    _hook(model[0])
    assert {row.name: row.note for row in nofm.sparsify_(model, "2:4", preset="all").dense} == {"0": _BYPASSED}


def test_the_children_that_a_replaced_forward_reads_stay_dense_too() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2), "fc": nn.Linear(16, 16)})
    _hook(model["attn"])
    summary = nofm.sparsify_(model, "2:4", preset="all")
    assert {row.name: row.note for row in summary.dense} == dict.fromkeys(("attn.in_proj_weight", "attn.out_proj"), _BYPASSED)


def test_a_forward_replaced_after_sparsify_is_fine() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 4)
    nofm.sparsify_(layer, "2:4")
    x = torch.ones(1, 16)
    expected = layer(x)
    _hook(layer)
    assert torch.equal(layer(x), expected)
