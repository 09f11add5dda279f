"""Cost against counts made by hand and against the paper's Params column.

The paper's column follows no single rule: its dense row and ResNet-50 x1.25 count all parameters, its sparse rows leave the
normalisation layers out. `Cost` prints both, and each figure of the paper is one of them, to its digits.
"""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import nofm

IMAGE = (1, 3, 224, 224)


@pytest.fixture(scope="module")
def resnet50_dense() -> nofm.Cost:
    return nofm.cost(torchvision.models.resnet50(), IMAGE)


def test_dense_resnet50_as_in_the_paper(resnet50_dense):
    assert round(resnet50_dense.params / 1e6, 1) == 25.6
    assert round(resnet50_dense.macs / 1e9, 2) == 4.09
    assert resnet50_dense.params_sparse == resnet50_dense.params
    assert resnet50_dense.macs_sparse == resnet50_dense.macs


@pytest.mark.parametrize(("pattern", "paper"), [("2:4", 13.8), ("4:8", 13.8), ("1:4", 7.93), ("2:8", 7.93), ("1:16", 3.52)])
def test_sparse_resnet50_params_as_in_the_paper(resnet50_dense, pattern, paper):
    model = torchvision.models.resnet50()
    nofm.sparsify_(model, pattern, preset="paper")
    cost = nofm.cost(model, IMAGE)
    assert abs(cost.weights_sparse / 1e6 - paper) <= 0.02
    # Ours by rule, not the paper's FLOPs (2.15, 1.17, 0.44), which do not follow from its density: dense conv1 and fc, density x the rest.
    dense_part = 118_013_952 + 2_048_000
    assert cost.macs == resnet50_dense.macs
    assert cost.macs_sparse == pytest.approx(dense_part + nofm.Pattern(pattern).density * (cost.macs - dense_part), rel=1e-12)


def test_wide_resnet50_as_in_the_paper():
    model = timm.models.resnet.ResNet(timm.models.resnet.Bottleneck, (3, 4, 6, 3), channels=(80, 160, 320, 640))
    nofm.sparsify_(model, "2:8", preset="paper")
    assert abs(nofm.cost(model, IMAGE).params_sparse / 1e6 - 11.8) <= 0.02


def test_raft_as_in_the_paper():
    model = torchvision.models.optical_flow.raft_large()
    nofm.sparsify_(model, "2:4", preset="paper")
    cost = nofm.cost(model, [(1, 3, 128, 128), (1, 3, 128, 128)])
    assert round(cost.params / 1e6, 1) == 5.3
    assert round(cost.params_sparse / 1e6, 2) == 2.65
    update = {layer.name: layer for layer in cost.layers}["update_block.flow_head.conv1"]
    assert update.macs == 12 * 128 * 256 * 9 * 16 * 16, "a layer that runs twelve times counts twelve times"


def test_by_hand():
    model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False))
    nofm.sparsify_(model, {"0": "1:4"})
    cost = nofm.cost(model, (3, 16))
    assert (cost.params, cost.params_sparse) == (16 * 8 + 8 + 16 + 32, 16 * 8 // 4 + 8 + 16 + 32)
    assert (cost.weights, cost.weights_sparse) == (cost.params - 16, cost.params_sparse - 16)
    assert (cost.macs, cost.macs_sparse) == (3 * 128 + 3 * 32, 3 * 32 + 3 * 32)
    assert [(layer.name, layer.density, layer.macs) for layer in cost.layers] == [("0", 0.25, 384), ("2", 1.0, 96)]
    assert str(cost).splitlines()[:4] == [
        "                                dense    sparse  share kept",
        "parameters (k)                  0.184     0.088       0.478",
        "  without norm layers (k)       0.168     0.072       0.429",
        "multiply-adds (k)               0.480     0.192       0.400",
    ]
    assert max(map(len, str(cost).splitlines())) <= 80


@pytest.mark.parametrize(("count", "shown"), [(99_999, "99.999 k"), (100_000, "0.100 M"), (99_999_999, "100.000 M"), (10**8, "0.100 G")])
def test_counts_are_in_a_unit_that_shows_them(count, shown):
    line = str(nofm.Cost(count, count, count, count, 7, 7.0, ())).splitlines()[1].split()
    assert f"{line[2]} {line[1].strip('()')}" == shown


def test_attention_projections_are_sparse_and_the_products_of_activations_are_not():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    nofm.sparsify_(model, "2:4")
    cost = nofm.cost(model, (1, 5, 16))
    projections, attention = 5 * 16 * 16 * 4 + 5 * 16 * 32 * 2, 2 * 5 * 5 * 16
    assert cost.macs == projections + attention
    assert cost.macs_sparse == projections / 2 + attention


class Pair(nn.Bilinear):
    """Of a kind of its own, so that it can be made known without making all nn.Bilinear known."""


nofm.register_layer(Pair, weight=2)


def as_two_products(layer: nn.Bilinear, x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """The same layer in operations that torch's own counter knows."""
    x1_BI, x2_BJ = x1.flatten(0, -2), x2.flatten(0, -2)
    made_BOJ = (x1_BI @ layer.weight.transpose(0, 1).flatten(1)).unflatten(1, (layer.out_features, -1))
    return (made_BOJ @ x2_BJ[:, :, None])[:, :, 0].unflatten(0, x1.shape[:-1]) + layer.bias


@pytest.mark.parametrize("batch", [(5,), (2, 5), (1,)], ids=str)
def test_a_bilinear_layer(batch):
    layer, x1, x2 = Pair(6, 8, 4), torch.randn(*batch, 6), torch.randn(*batch, 8)
    with FlopCounterMode(display=False) as counter:
        twin = as_two_products(layer, x1, x2)
    torch.testing.assert_close(twin, layer(x1, x2))
    size = math.prod(batch)
    assert counter.get_total_flops() == 2 * size * (6 * 8 * 4 + 8 * 4)
    dense = nofm.cost(layer, [x1, x2])
    assert (dense.macs, dense.layers[0].macs) == (size * (6 * 8 * 4 + 8 * 4), size * 6 * 8 * 4)
    nofm.sparsify_(layer, "2:4", preset="all")
    sparse = nofm.cost(layer, [(*batch, 6), (*batch, 8)])
    assert (sparse.macs, sparse.macs_sparse) == (dense.macs, size * (6 * 8 * 4 / 2 + 8 * 4))


def test_recurrent_and_tied_weights():
    lstm = nn.LSTM(16, 16)
    nofm.sparsify_(lstm, "2:4")
    cost = nofm.cost(lstm, (7, 1, 16))
    assert (cost.macs, cost.macs_sparse) == (7 * 2 * 64 * 16, 7 * 64 * 16)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(32, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.body(self.embed(tokens)))

    model = Tied()
    nofm.sparsify_(model, {"head": "2:4", "*": "1:4"})
    cost = nofm.cost(model, torch.zeros(3, dtype=torch.long))
    assert (cost.params, cost.params_sparse) == (512 + 256, 256 + 64)
    assert cost.macs_sparse == 3 * (256 + 64)


def test_the_model_is_left_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
    nofm.sparsify_(model, "2:4")
    before = model.state_dict()
    x = torch.randn(2, 8)
    expected = model.eval()(x)
    nofm.cost(model.train(), (1, 8))
    assert model.training
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(model.eval()(x), expected)


def test_an_input_that_does_not_fit_is_named():
    with pytest.raises(nofm.NofmError, match=r"fails for \(3, 8, 8\): .*; shapes begin with the batch, as in \(1, 3, 224, 224\)"):
        nofm.cost(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (3, 8, 8))
