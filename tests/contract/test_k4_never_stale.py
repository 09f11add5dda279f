"""K4: whatever changed the weights of a sparse model, its next forward uses the mask of the weights as they are now.

After every change the model is compared, bit for bit, with a plain model that holds the same weights masked by the test itself.
The model has a convolution, attention, a recurrent layer and a frozen mask is tried where it could matter.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_oracle import assert_computes_like, assert_weights_are_the_parameters, masked_twin
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import nofm
from nofm.layers import SparseModule


class Mixed(nn.Module):
    """A convolution, attention, an LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.block = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(16, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.block(self.conv(x).mT))[0])


_AXES = {
    "conv.weight": 1,
    "block.self_attn.in_proj_weight": 1,
    "block.self_attn.out_proj.weight": 1,
    "block.linear1.weight": 1,
    "block.linear2.weight": 1,
    "lstm.weight_ih_l0": 1,
    "lstm.weight_hh_l0": 1,
    "head.weight": 1,
}


def _plain(seed: int) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def _sparse(seed: int) -> Mixed:
    model = _plain(seed)
    nofm.sparsify_(model, "2:4", preset="all")
    return model


def assert_fresh(model: nn.Module) -> None:
    """`model` computes with the mask of its weights as they are now."""
    dtype = next(model.parameters()).dtype
    plain = _plain(99).to(dtype)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert_computes_like(model, masked_twin(plain, _AXES), lambda m: m(x))
    assert_weights_are_the_parameters(model)


def _copy_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(-1) * 2)


def _through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0).clone()


def _through_data_in_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.neg_().add_(0.1)


def _initialise(model: nn.Module) -> None:
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter)


def _replace_parameter(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(torch.randn(4, 8))
    model.lstm.weight_hh_l0 = nn.Parameter(torch.randn(32, 8))


def _swap_tensors(model: nn.Module) -> None:
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.randn(4, 8)))


_CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "load_state_dict": lambda model: model.load_state_dict(_plain(1).state_dict(), strict=True),
    "load_state_dict-assign": lambda model: model.load_state_dict(_plain(1).state_dict(), strict=True, assign=True),
    "in-place": _copy_in_place,
    "data": _through_data,
    "data-in-place": _through_data_in_place,
    "init": _initialise,
    "new-parameter": _replace_parameter,
    "swap_tensors": _swap_tensors,
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "to-and-back": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "optimizer-step": lambda model: torch.optim.SGD(model.parameters(), lr=10.0).step(),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_after_a_change_of_weights(change: Callable[[nn.Module], object]) -> None:
    model = _sparse(0)
    assert_fresh(model)  # also leaves gradients for the optimizer
    change(model)
    assert_fresh(model)


def test_by_way_of_meta() -> None:
    model = _sparse(0)
    assert_fresh(model)
    model.to("meta")
    assert model(torch.empty(2, 8, 5, device="meta")).shape == (2, 5, 4)
    model.to_empty(device="cpu").load_state_dict(_plain(1).state_dict(), strict=True)
    assert_fresh(model)


@pytest.mark.parametrize("averaging", [None, get_ema_multi_avg_fn(0.5)], ids=["mean", "ema"])
def test_averages_of_the_weights(averaging: object) -> None:
    model = _sparse(0)
    average = AveragedModel(model, multi_avg_fn=averaging)
    for seed in (1, 2):
        model.load_state_dict(_plain(seed).state_dict())
        average.update_parameters(model)
        assert_fresh(average.module)
    expected = (_plain(1).head.weight + _plain(2).head.weight) / 2
    torch.testing.assert_close(average.module.head.weight, expected)
    assert isinstance(average.module.head, SparseModule)


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


_COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
}


@pytest.mark.parametrize("make_copy", _COPIES.values(), ids=_COPIES)
def test_a_copy_is_sparse_and_independent(make_copy: Callable[[nn.Module], nn.Module]) -> None:
    model = _sparse(0)
    before = copy.deepcopy(model.state_dict())
    twin = make_copy(model)
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert [site.key for site in nofm.sites(twin)] == list(_AXES)
    assert_fresh(twin)
    torch.optim.SGD(twin.parameters(), lr=10.0).step()
    assert_fresh(twin)
    assert_fresh(model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    next(iter(nofm.sites(twin))).look_through(nofm.layers.ste.dense)
    assert_fresh(model)
    with pytest.warns(UserWarning, match="conv computes with more weights than the pattern keeps .*, so fold_ does not write all"):
        nofm.fold_(twin)
    assert_fresh(model)


def test_a_pickled_state_dict_loads_into_a_plain_model_and_back() -> None:
    model = _sparse(0)
    state = pickle.loads(pickle.dumps(model.state_dict()))
    plain = _plain(1)
    plain.load_state_dict(state, strict=True)
    other = _sparse(2)
    other.load_state_dict(plain.state_dict(), strict=True)
    assert_fresh(other)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_frozen_masks_are_made_anew_from_loaded_weights(assign: bool) -> None:
    model = _sparse(0)
    for site in nofm.sites(model):
        site.freeze(~site.mask())  # of other weights than the largest
    model.load_state_dict(_plain(1).state_dict(), assign=assign)
    twin = masked_twin(_plain(1), _AXES)
    x = torch.ones(2, 8, 5)
    assert torch.equal(model(x), twin(x))
    for site in nofm.sites(model):
        assert torch.equal(site.stored_mask, twin.get_parameter(site.key) != 0)


def test_a_partial_state_dict_leaves_other_frozen_masks() -> None:
    model = _sparse(0)
    frozen = {}
    for site in nofm.sites(model):
        frozen[site.key] = ~site.mask()
        site.freeze(frozen[site.key])
    model.load_state_dict({"head.weight": torch.randn(4, 8)}, strict=False)
    for site in nofm.sites(model):
        assert torch.equal(site.stored_mask, frozen[site.key]) == (site.key != "head.weight"), site.key


class Fails(nn.Linear):
    """Raises in the middle of its forward, on demand."""

    fail = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.fail:
            raise RuntimeError("in the middle")
        return out


def test_an_exception_inside_forward_leaves_the_weights_in_place() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    model.linear2 = Fails(16, 16)
    twin = masked_twin(model, {name: 1 for name, p in model.named_parameters() if p.dim() == 2})
    nofm.sparsify_(model, "2:4", preset="all")
    model.linear2.fail = True
    x = torch.ones(1, 3, 16)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(x)
    assert_weights_are_the_parameters(model)
    assert all(parameter is model.get_parameter(name) for name, parameter in model.named_parameters())
    assert model.linear2.weight is model.linear2._parameters["weight"]
    model.linear2.fail = False
    assert_computes_like(model, twin, lambda m: m(x))


def test_an_error_while_masks_are_made_leaves_the_weights_in_place() -> None:
    model = nn.MultiheadAttention(16, 2)
    nofm.sparsify_(model, "2:4")
    site = next(site for site in nofm.sites(model) if site.name == "out_proj")

    def broken(*_: object) -> Tensor:
        raise RuntimeError("no mask")

    site.look_through(broken)
    x = torch.ones(3, 1, 16)
    with pytest.raises(RuntimeError, match="no mask"):
        model(x, x, x)
    assert_weights_are_the_parameters(model)


def test_a_layer_that_is_parametrized_after_sparsify_says_so() -> None:
    layer = nn.Linear(16, 4)
    nofm.sparsify_(layer, "2:4")
    nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(nofm.LayerError, match="'weight' of ParametrizedSparseLinear was parametrized after sparsify_"):
        layer(torch.ones(1, 16))


@pytest.mark.parametrize(
    "change",
    [nn.utils.parametrizations.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5)],
    ids=["parametrized", "pruned by torch"],
)
@pytest.mark.parametrize(
    "use",
    [nofm.fold_, nofm.SAD, lambda model: nofm.attach(nofm.STE(), model, torch.optim.SGD(model.parameters(), lr=0.1))],
    ids=["fold_", "SAD", "attach"],
)
def test_a_weight_that_is_no_parameter_any_more_is_named(change: Any, use: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 4))
    nofm.sparsify_(model, "2:4", preset="all")
    change(model[0])
    with pytest.raises(nofm.LayerError, match=r"^0: its weight is no parameter any more"):
        use(model)
    assert len(nofm.summary(model).sparse) == 1


class Copying(nn.Module):
    """Makes its teacher when it is first called, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if "teacher" not in self.__dict__:
            self.__dict__["teacher"] = copy.deepcopy(self.student)
        return self.student(x)


class CopiesItself(nn.Linear):
    """The same, of a layer: its masked weight is in place at that moment."""

    def forward(self, x: Tensor) -> Tensor:
        if "teacher" not in self.__dict__:
            self.__dict__["teacher"] = None
            self.__dict__["teacher"] = copy.deepcopy(self)
        return super().forward(x)


@pytest.mark.parametrize("make", [Copying, lambda: CopiesItself(8, 8)], ids=["of a layer", "in the layer"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_a_copy_that_is_made_during_a_forward_keeps_nothing_of_it(make: Callable[[], nn.Module], grad: bool) -> None:
    model, x = make(), torch.randn(2, 8)
    nofm.sparsify_(model, "2:4", preset="all")
    with torch.set_grad_enabled(grad):
        expected = model(x)
        teacher = model.__dict__["teacher"]
        assert_weights_are_the_parameters(teacher)
        assert torch.equal(teacher(x), expected)
        with torch.no_grad():
            teacher.weight.neg_()
            teacher.bias.neg_()
        assert torch.equal(teacher(x), -expected)
