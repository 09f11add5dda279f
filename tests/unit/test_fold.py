"""fold_ writes the zeros in and changes nothing else: same outputs, plain classes, no traces. densify_ takes sparsity away."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nofm
from nofm.layers import SparseModule

torch.set_num_threads(1)  # tiny tensors, for which threads cost more than they save


class Net(nn.Module):
    """Layers of several kinds, one of them never sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.conv = nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(self.stem(x))).flatten(2).mT
        return self.head(self.rnn(self.block(x))[0])


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


_X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def _shape_of(model: nn.Module) -> list[Any]:
    return [
        (name, type(module), sorted(vars(module)), sorted(module._buffers), sorted(module._non_persistent_buffers_set))
        for name, module in model.named_modules()
    ]


def _bits(weight: Tensor) -> Tensor:
    return weight.detach().view(torch.int32)


@pytest.mark.parametrize("verb", [nofm.fold_, nofm.densify_])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_the_model_is_plain_again_without_traces(net: Net, verb: Any, frozen: bool) -> None:
    before, parameters = _shape_of(net), [id(p) for p in net.parameters()]
    nofm.sparsify_(net, "2:4")
    assert isinstance(net.head, nn.Linear)
    assert isinstance(net.conv, SparseModule)
    assert isinstance(net.conv, nn.Conv2d)
    net(_X).sum().backward()
    if frozen:
        for site in nofm.sites(net):
            site.freeze(site.mask())
    assert verb(net) is net
    assert _shape_of(net) == before
    assert type(net.conv) is nn.Conv2d
    assert [id(p) for p in net.parameters()] == parameters
    assert not list(nofm.sites(net))
    net(_X)


def test_fold_changes_no_output_and_writes_positive_zeros(net: Net) -> None:
    nofm.sparsify_(net, "2:4")
    masks = {site.key: site.mask() for site in nofm.sites(net)}
    dense = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.eval()
    expected = net(_X)
    nofm.fold_(net)
    assert torch.equal(net(_X), expected)
    for name, weight in net.named_parameters():
        mask = masks.get(name, torch.ones_like(weight, dtype=torch.bool))
        assert torch.equal(_bits(weight)[mask], _bits(dense[name])[mask]), name
        assert not _bits(weight)[~mask].any(), name  # not one -0.0
    assert len(masks) == 7


def test_fold_writes_what_a_frozen_mask_shows(net: Net) -> None:
    nofm.sparsify_(net, {"head": "2:4"})
    (site,) = nofm.sites(net)
    other = ~site.mask()
    expected = net.head.weight.detach().where(other, 0.0)
    site.freeze(other)
    nofm.fold_(net)
    assert torch.equal(net.head.weight, expected)


def test_densify_leaves_the_dense_weights_and_outputs(net: Net) -> None:
    dense = copy.deepcopy(net)
    nofm.sparsify_(net, "2:4")
    net(_X)
    nofm.densify_(net)
    for name, weight in net.named_parameters():
        assert torch.equal(weight, dense.get_parameter(name)), name
    dense.load_state_dict(net.state_dict())
    assert torch.equal(net(_X), dense(_X))


def test_a_folded_model_can_be_made_sparse_again(net: Net) -> None:
    nofm.sparsify_(net, "2:4")
    nofm.fold_(net)
    folded = copy.deepcopy(net.state_dict())
    nofm.sparsify_(net, "2:4")
    nofm.fold_(net)
    assert all(torch.equal(tensor, folded[key]) for key, tensor in net.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_weight_is_named_and_nothing_is_written(net: Net, value: float) -> None:
    nofm.sparsify_(net, "2:4")
    with torch.no_grad():
        net.rnn.weight_hh_l0[3, 5] = value
    before, shape = {name: _bits(p).clone() for name, p in net.named_parameters()}, _shape_of(net)
    with pytest.raises(nofm.NonFiniteWeightError, match=r"^rnn\.weight_hh_l0\[3, 5\] is ") as caught:
        nofm.fold_(net)
    assert (caught.value.parameter, caught.value.index) == ("rnn.weight_hh_l0", (3, 5))
    assert _shape_of(net) == shape
    for name, parameter in net.named_parameters():
        assert torch.equal(_bits(parameter), before[name]), name


def test_fold_keeps_what_autograd_knows(net: Net) -> None:
    net.head.weight.requires_grad_(False)
    nofm.sparsify_(net, "2:4", preset="paper")
    nofm.fold_(net)
    assert not net.head.weight.requires_grad
    assert net.conv.weight.is_leaf
    net(_X).sum().backward()
    assert net.conv.weight.grad is not None


COPY = (
    "no method is attached that would prune it. A copy (EMA) is as its model was when it was made: by Dense, or before the step at which "
    "ASP (prune_at) or SRSTE (begin_at, and ramp_at before it) prunes; if its model is pruned by now, nofm.follow_(copy, model) first. If "
    "this is no copy, the optimizer that its method was attached to is gone"
)
AGAIN = "No weight of the pattern is lost: to prune by the weights as they are, sparsify_ it again as before, and fold_"


@pytest.mark.parametrize(
    ("method", "warns"),
    [
        *((nofm.Dense(), True), (nofm.ASP(prune_at=3), True), (nofm.SRSTE(begin_at=3), True), (nofm.SRSTE(begin_at=3, ramp_at=0), True)),
        *((nofm.SRSTE(), False), (nofm.ASP(), False)),
    ],
    ids=str,
)
def test_fold_says_where_nothing_is_pruned(method: nofm.Method, warns: bool) -> None:
    """In a copy, too: an average that was made before a dense start has ended goes on being dense."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    nofm.sparsify_(model, {"0": "2:4", "1": "2:4", "2": None})
    nofm.attach(method, model, torch.optim.SGD(model.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folded = nofm.fold_(copy.deepcopy(model))
    now = "3:4" if getattr(method, "ramp_at", None) == 0 else "dense"
    said = (
        f"0 and 1 more layers compute with more weights than the pattern keeps ({now}), so fold_ does not write all zeros: {COPY}. {AGAIN}"
    )
    assert [str(warning.message) for warning in caught] == [said] * warns
    assert [warning.filename for warning in caught] == [__file__] * warns
    assert int((folded[0].weight != 0).sum()) == (32 if not warns else 48 if getattr(method, "ramp_at", None) == 0 else 64)


NOT_YET = {
    "gradual start": (
        nofm.SRSTE(ramp_at=1, begin_at=7),
        "SRSTE has taken 2 steps, and its gradual start (ramp_at=1) comes to the pattern at step 7 (begin_at)",
    ),
    "dense start": (
        nofm.SRSTE(begin_at=5),
        "SRSTE has taken 2 steps, and its dense start lasts until step 5 (begin_at)",
    ),
    "ASP": (nofm.ASP(prune_at=3), "ASP has taken 2 steps, and it prunes at step 3 (prune_at)"),
    "Dense": (nofm.Dense(), "the method Dense trains all weights"),
}


@pytest.mark.parametrize(("method", "why"), NOT_YET.values(), ids=NOT_YET)
def test_what_is_folded_or_packed_too_early_says_until_when_and_what_to_do(method: nofm.Method, why: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    nofm.sparsify_(model, "1:16", preset="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = nofm.attach(method, model, optimizer)
    for _ in range(2):
        model(torch.randn(2, 16)).sum().backward()
        optimizer.step()
    now = "8:16" if getattr(method, "ramp_at", None) == 1 else "dense"
    who = f"0 computes with more weights than the pattern keeps ({now}), "
    with pytest.raises(nofm.LayerError) as refused:
        nofm.save_packed(model, tmp_path / "packed.safetensors")
    how = "Train until then, or handle.detach() first, which leaves layers their pattern; of a copy, densify_ and sparsify_ it first"
    assert str(refused.value) == f"{who}and a packed file holds its pattern: {why}. {how}"
    with pytest.warns(UserWarning, match=re.escape(COPY)):
        nofm.fold_(copy.deepcopy(model))
    again = AGAIN.replace("sparsify_", "handle.detach(), sparsify_")
    expected = model[0].weight.detach() * nofm.mask(model[0].weight.detach(), "1:16")
    with pytest.warns(UserWarning, match=f"^{re.escape(f'{who}so fold_ does not write all zeros: {why}. {again}')}$"):
        nofm.fold_(model)
    assert handle.step == 2
    with warnings.catch_warnings():  # to the letter
        warnings.simplefilter("error")
        handle.detach()
        nofm.sparsify_(model, "1:16", preset="all")
        nofm.fold_(model)
    assert torch.equal(model[0].weight.detach(), expected)


def test_a_method_that_is_detached_leaves_layers_their_pattern(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    nofm.sparsify_(model, "1:16", preset="all")
    handle = nofm.attach(nofm.SRSTE(ramp_at=0, begin_at=9), model, torch.optim.SGD(model.parameters()))
    with pytest.warns(UserWarning, match="It is detached before that"):
        handle.detach()
    nofm.save_packed(model, tmp_path / "packed.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nofm.fold_(model)
    assert nofm.verify(model, "1:16").ok
