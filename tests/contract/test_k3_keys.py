"""K3: sparsify_ renames no parameter and replaces none, so a dense checkpoint loads strictly into the sparse model and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from layer_oracle import assert_same, keep
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import nofm


class EveryKind(nn.Module):
    """One layer of each kind that has weights, and some that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.up = nn.ConvTranspose2d(16, 16, 3)
        self.linear = nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, kdim=8, vdim=12)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.lstm = nn.LSTM(16, 8, 2, bidirectional=True, proj_size=4)
        self.cell = nn.GRUCell(16, 8)
        self.embedding = nn.Embedding(9, 16)
        self.gpt = Conv1D(8, 16)
        self.tied = nn.Linear(16, 9, bias=False)
        self.tied.weight = self.embedding.weight


_MODELS = {"every-kind": EveryKind, "resnet18": lambda: torchvision.models.resnet18(num_classes=10)}


def _snapshot(model: nn.Module) -> dict[str, Any]:
    """What must be the same objects, in the same order, before and after."""
    return {
        "state dict": [(key, tensor.data_ptr()) for key, tensor in model.state_dict().items()],
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters(remove_duplicate=False)],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
    }


@pytest.fixture(params=_MODELS.values(), ids=_MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return request.param()


def _sparsify(model: nn.Module) -> None:
    nofm.sparsify_(model, {"embedding": "2:4", "*": "2:4"} if hasattr(model, "embedding") else "2:4", preset="paper")


def test_parameters_keep_names_objects_and_values(model: nn.Module) -> None:
    before, values = _snapshot(model), copy.deepcopy(model.state_dict())
    _sparsify(model)
    assert len(list(nofm.sites(model))) > 10
    assert _snapshot(model) == before
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[key]), key
    for site in nofm.sites(model):
        assert site.key in values
    nofm.densify_(model)
    assert _snapshot(model) == before


def test_checkpoints_load_strictly_in_both_directions(model: nn.Module) -> None:
    dense, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    _sparsify(model)
    model.load_state_dict(other.state_dict(), strict=True)
    dense.load_state_dict(model.state_dict(), strict=True)
    for key, tensor in other.state_dict().items():
        assert torch.equal(dense.state_dict()[key], tensor), key


def test_frozen_masks_add_no_key(model: nn.Module) -> None:
    keys = list(model.state_dict())
    _sparsify(model)
    for site in nofm.sites(model):
        site.freeze(site.mask())
    assert list(model.state_dict()) == keys
    model.load_state_dict(model.state_dict(), strict=True)


def test_hooks_and_training_flags_stay() -> None:
    calls = []

    def note_call(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((type(module).__name__, torch.equal(module.weight, weight)))

    layer = nn.Linear(16, 4).eval()
    weight = layer.weight.detach().clone()
    layer.register_forward_hook(note_call)
    layer.mark = "mine"
    nofm.sparsify_(layer, "2:4")
    x = torch.ones(1, 16)
    assert_same(layer(x), nn.functional.linear(x, weight.where(keep(weight, 2, 4, 1), 0.0), layer.bias))
    assert calls == [("SparseLinear", True)]  # a hook runs outside of forward, and sees the dense weight
    assert (layer.training, layer.mark) == (False, "mine")


def test_an_optimizer_made_before_goes_on_training_the_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nofm.sparsify_(model, "2:4")
    before = model[0].weight.detach().clone()
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def test_a_sparse_layer_prints_its_pattern() -> None:
    model = nn.Sequential(nn.Conv2d(16, 8, 3), nn.MultiheadAttention(16, 2))
    nofm.sparsify_(model, {"0": "1:4", "*": "2:4"})
    assert repr(model[0]) == "SparseConv2d(16, 8, kernel_size=(3, 3), stride=(1, 1), 1:4)"
    assert repr(model[1]).splitlines()[1] == "  in_proj_weight 2:4"
