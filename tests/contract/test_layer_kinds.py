"""Every kind of layer computes with its N:M weight, and its dense weight gets the gradient of the N:M one.

Each row makes a plain layer, says which of its parameters become sparse and along which axis their inputs run, and gives an
input. The sparse layer is compared, bit for bit, with the plain layer whose weights were masked by the test itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import timm.layers
import torch
from layer_oracle import assert_computes_like, assert_same, assert_weights_are_the_parameters, keep, masked_twin
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

import nofm
from nofm.kernels.select import use


class ScaledLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 3, self.bias).relu()


class InOutLinear(nn.Module):
    """A layer that only its author knows, stored (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(16, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel


nofm.register_layer(InOutLinear, kernel=-2)


class Kind(NamedTuple):
    name: str
    make: Any
    axes: dict[str, int]
    inputs: tuple[Tensor, ...]


def _rnn_axes(layers: int, directions: int, proj: bool = False) -> dict[str, int]:
    names = ["weight_ih", "weight_hh"] + ["weight_hr"] * proj
    return {f"{name}_l{layer}{suffix}": 1 for layer in range(layers) for suffix in ["", "_reverse"][:directions] for name in names}


_ROWS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
_IMAGE = torch.randn(2, 16, 7, 7, generator=torch.Generator().manual_seed(2))
_VOLUME = torch.randn(2, 16, 4, 4, 4, generator=torch.Generator().manual_seed(3))
_IDS = torch.tensor([[1, 2, 0], [7, 3, 1]])

KINDS = [
    Kind("Linear", lambda: nn.Linear(16, 6), {"weight": 1}, (_ROWS,)),
    Kind("Conv1d", lambda: nn.Conv1d(16, 6, 3), {"weight": 1}, (_IMAGE[..., 0],)),
    Kind("Conv2d", lambda: nn.Conv2d(16, 6, 3, stride=2), {"weight": 1}, (_IMAGE,)),
    Kind("Conv2d-channels_last", lambda: nn.Conv2d(16, 6, 3).to(memory_format=torch.channels_last), {"weight": 1}, (_IMAGE,)),
    Kind("Conv2d-reflect", lambda: nn.Conv2d(16, 6, 3, padding=1, padding_mode="reflect"), {"weight": 1}, (_IMAGE,)),
    Kind("Conv3d", lambda: nn.Conv3d(16, 6, 3), {"weight": 1}, (_VOLUME,)),
    Kind("Conv2d-grouped", lambda: nn.Conv2d(16, 6, 3, groups=2), {"weight": 1}, (_IMAGE,)),
    Kind("ConvTranspose1d", lambda: nn.ConvTranspose1d(16, 6, 3), {"weight": 0}, (_IMAGE[..., 0],)),
    Kind("ConvTranspose2d", lambda: nn.ConvTranspose2d(16, 6, 3), {"weight": 0}, (_IMAGE,)),
    Kind("ConvTranspose3d", lambda: nn.ConvTranspose3d(16, 6, 3), {"weight": 0}, (_VOLUME,)),
    Kind("ConvTranspose2d-grouped", lambda: nn.ConvTranspose2d(16, 6, 3, groups=2), {"weight": 0}, (_IMAGE,)),
    Kind("LSTM", lambda: nn.LSTM(16, 8), _rnn_axes(1, 1), (_ROWS,)),
    Kind("LSTM-deep", lambda: nn.LSTM(16, 8, 2, bidirectional=True, batch_first=True), _rnn_axes(2, 2), (_ROWS,)),
    Kind("LSTM-proj", lambda: nn.LSTM(16, 8, 2, bidirectional=True, proj_size=4), _rnn_axes(2, 2, proj=True), (_ROWS,)),
    Kind("GRU", lambda: nn.GRU(16, 8, 2, bidirectional=True), _rnn_axes(2, 2), (_ROWS,)),
    Kind("RNN", lambda: nn.RNN(16, 8, 2, bias=False), _rnn_axes(2, 1), (_ROWS,)),
    Kind("LSTMCell", lambda: nn.LSTMCell(16, 8), {"weight_ih": 1, "weight_hh": 1}, (_ROWS[0],)),
    Kind("GRUCell", lambda: nn.GRUCell(16, 8), {"weight_ih": 1, "weight_hh": 1}, (_ROWS[0], torch.ones(5, 8))),
    Kind("RNNCell", lambda: nn.RNNCell(16, 8), {"weight_ih": 1, "weight_hh": 1}, (_ROWS[0], torch.ones(5, 8))),
    Kind("Embedding", lambda: nn.Embedding(9, 16, padding_idx=0), {"weight": 1}, (_IDS,)),
    Kind("EmbeddingBag", lambda: nn.EmbeddingBag(9, 16, mode="sum"), {"weight": 1}, (_IDS,)),
    Kind("subclass", lambda: ScaledLinear(16, 6), {"weight": 1}, (_ROWS,)),
    Kind("registered", InOutLinear, {"kernel": 0}, (_ROWS,)),
    Kind("transformers-Conv1D", lambda: Conv1D(6, 16), {"weight": 0}, (_ROWS,)),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_sparse_layer_does_what_the_plain_layer_does_with_masked_weights(kind: Kind) -> None:
    torch.manual_seed(0)
    layer = kind.make()
    twin = masked_twin(layer, kind.axes)
    dense_weights = {name: p.detach().clone() for name, p in layer.named_parameters()}
    plain_class = type(layer)

    nofm.sparsify_(layer, "2:4")
    assert isinstance(layer, plain_class)
    assert {site.key for site in nofm.sites(layer)} == set(kind.axes)
    for _ in range(2):  # the second forward starts from what the first has left behind
        assert_computes_like(layer, twin, lambda model: model(*kind.inputs))
        assert_weights_are_the_parameters(layer)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, dense_weights[name]), f"{name} was changed by a forward"

    nofm.fold_(layer)
    assert type(layer) is plain_class
    assert_computes_like(layer, twin, lambda model: model(*kind.inputs))


def test_pruned_weights_get_their_straight_through_gradient() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 6)
    pruned = ~keep(layer.weight, 2, 4, axis=1)
    nofm.sparsify_(layer, "2:4")
    layer(_ROWS).square().sum().backward()
    assert (layer.weight.grad[pruned] != 0).all()


@pytest.mark.parametrize("pattern", ["1:4", "3:4", "1:2", "2:16"])
def test_other_patterns(pattern: str) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 6, 3)
    twin = masked_twin(layer, {"weight": 1}, *map(int, pattern.split(":")))
    nofm.sparsify_(layer, pattern)
    assert_computes_like(layer, twin, lambda model: model(_IMAGE))


def test_flat_groups_run_along_the_flattened_filter() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 5, (2, 3))  # 36 weights a filter divide by 4; 6 channels do not
    expected = keep(layer.weight.detach().reshape(5, 36), 1, 4, axis=1).reshape(5, 6, 2, 3)
    nofm.sparsify_(layer, "1:4", axis="flat")
    (site,) = nofm.sites(layer)
    assert torch.equal(site.mask(), expected)
    image = torch.randn(1, 6, 5, 5)
    assert_same(layer(image), F.conv2d(image, layer.weight.where(expected, 0.0), layer.bias))


@pytest.mark.parametrize(
    ("make", "axis", "shape"),
    [
        (lambda: nn.Linear(10, 6), 1, (3, 10)),
        (lambda: nn.Conv2d(6, 4, 3), 1, (1, 6, 5, 5)),
        (lambda: nn.Conv2d(12, 4, 3, groups=2), 1, (1, 12, 5, 5)),
        (lambda: nn.ConvTranspose2d(6, 4, 3), 0, (1, 6, 5, 5)),
    ],
    ids=["Linear", "Conv2d", "Conv2d-grouped", "ConvTranspose2d"],
)
def test_padded_groups_keep_n_of_the_short_last_group(make: Any, axis: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = make()
    twin = masked_twin(layer, {"weight": axis})
    nofm.sparsify_(layer, "2:4", pad=True)
    assert_computes_like(layer, twin, lambda model: model(torch.ones(shape)))


def test_weight_standardisation_sees_the_masked_weight_and_is_warned_about_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(timm.layers.StdConv2d(16, 8, 3), nn.ReLU(), timm.layers.StdConv2d(8, 8, 3))
    twin = masked_twin(model, {"0.weight": 1, "2.weight": 1})
    with pytest.warns(UserWarning, match="standardise") as caught:
        nofm.sparsify_(model, "2:4", preset="all")
    assert [str(w.message) for w in caught] == [
        "0 and 1 more standardise their weight after it is masked, which moves the zeros: "
        "their stored weight is N:M, the one they convolve with is not"
    ]
    assert_computes_like(model, twin, lambda m: m(_IMAGE))


# ---- layers that stay dense, and say so ----


def _old_weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


STAYS_DENSE = {
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, groups=16), _IMAGE, "depthwise: one input channel a filter"),
    "depthwise-multiplied": (lambda: nn.Conv2d(16, 32, 3, groups=16), _IMAGE, "depthwise: one input channel a filter"),
    "depthwise-transposed": (lambda: nn.ConvTranspose2d(16, 16, 3, groups=16), _IMAGE, "depthwise: one input channel a filter"),
    "embedding-max_norm": (lambda: nn.Embedding(9, 16, max_norm=1.0), _IDS, "embedding with max_norm or sparse gradients"),
    "embedding-sparse": (lambda: nn.Embedding(9, 16, sparse=True), _IDS, "embedding with max_norm or sparse gradients"),
    "bag-sparse": (lambda: nn.EmbeddingBag(9, 16, sparse=True), _IDS, "embedding with max_norm or sparse gradients"),
    "weight_norm": (
        lambda: parametrizations.weight_norm(nn.Linear(16, 8)),
        _ROWS,
        "its weight is computed from others (parametrized); remove the parametrization first",
    ),
    "weight_norm-LSTM": (
        lambda: parametrizations.weight_norm(nn.LSTM(16, 8), "weight_ih_l0"),
        _ROWS,
        "its weight is computed from others (parametrized); remove the parametrization first",
    ),
    "weight_norm-old": (
        lambda: _old_weight_norm(nn.Linear(16, 8)),
        _ROWS,
        "its weight is computed from others (parametrized); remove the parametrization first",
    ),
    "does-not-divide": (lambda: nn.Linear(18, 8), torch.ones(2, 18), "2:4 needs in_features divisible by 4, got 18"),
    "grouped-fan": (
        lambda: nn.ConvTranspose2d(12, 8, 3, groups=2),
        torch.ones(1, 12, 5, 5),
        "2:4 needs in_channels / groups divisible by 4, got 6",
    ),
}


@pytest.mark.parametrize("case", STAYS_DENSE, ids=str)
def test_layers_that_stay_dense_say_why(case: str) -> None:
    make, x, reason = STAYS_DENSE[case]
    torch.manual_seed(0)
    model = nn.ModuleDict({"it": make(), "other": nn.Linear(16, 16)})
    before, classes = model["it"](x), [type(module) for module in model["it"].modules()]
    summary = nofm.sparsify_(model, {"other": "2:4", "*": "2:4"}, preset="paper")
    notes = [row.note for row in summary.dense if row.name.startswith("it")]
    assert notes[0] == reason
    if case == "weight_norm-LSTM":  # its other weight is a parameter, and sparse
        assert [row.name for row in summary.sparse] == ["it.weight_hh_l0", "other"]
        return
    assert notes == [reason]
    assert [type(module) for module in model["it"].modules()] == classes
    assert_same(model["it"](x), before)


def test_weights_of_unknown_kinds_are_listed() -> None:
    model = nn.ModuleDict({"bilinear": nn.Bilinear(4, 4, 4), "fc": nn.Linear(16, 16), "norm": nn.LayerNorm(16)})
    summary = nofm.sparsify_(model, "2:4", preset="all")
    assert [(row.name, row.note) for row in summary.dense] == [("bilinear", "kind not known")]


def test_integer_weights_stay_dense() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
    model[0].weight = nn.Parameter(torch.ones(8, 16, dtype=torch.int8), requires_grad=False)
    summary = nofm.sparsify_(model, "2:4", preset="all")
    assert [row.note for row in summary.dense] == ["its weight is torch.int8, not floating point"]


def test_an_embedding_is_sparse_only_by_a_rule_that_names_it() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"emb": nn.Embedding(9, 16), "bag": nn.EmbeddingBag(9, 16), "fc": nn.Linear(16, 16)})

    by_star = nofm.sparsify_(model(), "2:4", preset="all")
    assert {row.name: row.note for row in by_star.dense} == dict.fromkeys(("emb", "bag"), "embedding: only sparse by a rule that names it")
    by_name = nofm.sparsify_(model(), {"emb": "1:4", "b*": "2:4"})
    assert {row.name: row.pattern for row in by_name.sparse} == {"emb": "1:4", "bag": "2:4"}


def test_register_layer_refuses_what_does_not_fit() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 4))

    with pytest.raises(nofm.LayerError, match="takes a class of modules, got Odd"):
        nofm.register_layer(Odd(), w=1)
    with pytest.raises(nofm.LayerError, match=r"register_layer\(Odd\): name at least one parameter"):
        nofm.register_layer(Odd)
    for axes, complaint in (({"v": 1}, "'v' there is no tensor"), ({"w": 2}, r"'w' there is a tensor of shape \(4, 4\)")):
        nofm.register_layer(Odd, **axes)
        with pytest.raises(nofm.LayerError, match=complaint):
            nofm.sparsify_(Odd(), "2:4")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_the_plain_path_keeps_the_memory_layout_of_the_weight(memory_format):
    """A mask has a layout of its own; a convolution takes the layout of its output, and its last bits, from the weight's."""
    layer = nn.Conv2d(16, 6, 3).to(memory_format=memory_format)
    nofm.sparsify_(layer, "2:4")
    seen, original = [], nn.Conv2d.forward

    def look(self, x):
        seen.append(self.weight.stride())
        return original(self, x)

    with use("torch"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Conv2d, "forward", look)
        layer(torch.randn(1, 16, 4, 4))
    assert seen == [layer.weight.stride()]
