"""summary prints a table with one row a layer: what it is, its pattern, groups and kept weights, or why it stays dense."""

from __future__ import annotations

import torch
from torch import nn

import nofm


class Small(nn.Module):
    """Something of everything that a row can say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.stem = nn.Conv2d(3, 16, 3)
        self.conv = nn.Conv2d(16, 32, 3)
        self.norm = nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.attn = nn.MultiheadAttention(16, 2)
        self.mix = nn.Bilinear(4, 4, 4)
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight


_TABLE = """
layer                kind                             shape      pattern  groups  weights kept  note
embed                Embedding                        10x16      1:4          40            40
stem                 Conv2d                           16x3x3x3   dense                     432  first convolution (preset default)
conv                 Conv2d                           32x16x3x3  2:4       1,152         2,304
depthwise            Conv2d                           32x1x3x3   dense                     288  depthwise: one input channel a filter
attn.in_proj_weight  MultiheadAttention               48x16      2:4         192           384
attn.out_proj        NonDynamicallyQuantizableLinear  16x16      dense                     256  skip='attn.out_proj'
mix                  Bilinear                         4x4x4      dense                      64  kind not known
fc                   ParametrizedLinear               8x16       dense                     128  {parametrized}
head                 Linear                           10x16      1:4          40            40  tied to embed
4 of 9 layers sparse; weights kept in all layers: 58.1%
""".strip().replace("{parametrized}", "its weight is computed from others (parametrized); remove the parametrization first")


def test_the_table() -> None:
    model = Small()
    returned = nofm.sparsify_(model, {"embed": "1:4", "*": "2:4"}, skip="attn.out_proj")
    assert str(returned) == _TABLE
    assert nofm.summary(model) == returned


def test_density_counts_a_tied_weight_once() -> None:
    model = Small()
    summary = nofm.sparsify_(model, {"embed": "1:4", "*": "2:4"}, skip="attn.out_proj")
    kept = 40 + 432 + 2304 + 288 + 384 + 256 + 64 + 128
    weights = 160 + 432 + 4608 + 288 + 768 + 256 + 64 + 128
    assert summary.density == kept / weights
    assert len(summary.sparse) + len(summary.dense) == len(summary.rows) == 9


def test_kept_is_what_the_masks_keep() -> None:
    model = nn.Sequential(nn.Linear(10, 8), nn.Conv2d(6, 4, 2), nn.ConvTranspose2d(6, 4, 3))
    summary = nofm.sparsify_(model, {"?": "2:4"}, pad=True)
    for row, site in zip(summary.rows, nofm.sites(model), strict=True):
        assert (row.name, row.kept) == (site.name, int(site.mask().sum()))


def test_a_dense_model_has_rows_without_reasons() -> None:
    summary = nofm.summary(nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)))
    assert [(row.name, row.shape, row.pattern, row.kept, row.note) for row in summary.rows] == [("0", (2, 4), "", 8, "")]
    assert str(summary).endswith("0 of 1 layers sparse; weights kept in all layers: 100.0%")
    assert nofm.summary(nn.ReLU()).density == 0


def test_reasons_are_forgotten_with_the_sparsity() -> None:
    model = Small()
    nofm.sparsify_(model, {"embed": "1:4", "*": "2:4"})
    nofm.densify_(model)
    assert {row.note for row in nofm.summary(model).rows} == {"", "kind not known", "tied to embed"}


def test_a_class_of_the_users_that_is_called_sparse_keeps_its_name() -> None:
    class SparseLinear(nn.Linear):
        pass

    model = nn.Sequential(SparseLinear(4, 4), SparseLinear(4, 4))
    summary = nofm.sparsify_(model, "2:4")
    assert [(row.kind, row.pattern) for row in summary.rows] == [("SparseLinear", "2:4"), ("SparseLinear", "")]


def test_weights_without_memory_are_summarised() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8))
    assert nofm.sparsify_(model, "1:16").rows[0].kept == 65536


def test_zeros_that_fold_leaves_are_told_where_they_count_as_weights() -> None:
    """Rows and numbers stay; before it is folded, and of layers that begin with zeros alone, there is nothing to tell."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4))
    nn.init.zeros_(model[4].weight)
    sparse = nofm.sparsify_(model, {"2": "2:4", "3": "1:8", "*": None})
    assert (sparse.zeros, nofm.cost(model, (1, 4, 3, 3)).zeros) == ("", "")
    nofm.fold_(model)
    folded, cost = nofm.summary(model), nofm.cost(model, (1, 4, 3, 3))
    said = "2 dense layers have many zeros (176), counted here as weights; count before nofm.fold_, or look at nofm.verify(model)"
    assert (folded.zeros, cost.zeros) == (said, said)
    assert str(folded).splitlines()[-1] == str(cost).splitlines()[-1] == said
    assert (folded.density, cost.params_sparse) == (1.0, cost.params)
    model[2] = nn.Linear(8, 16)
    assert nofm.summary(model).zeros.startswith("one dense layer has many zeros (112)")
    assert nofm.summary(model.to("meta")).zeros == "", "which has no values"


def test_a_zero_here_and_there_is_not_told() -> None:
    model = nn.Sequential(nn.Linear(100, 10))
    with torch.no_grad():
        model[0].weight[:, :9] = 0.0
    assert nofm.summary(model).zeros == ""
    with torch.no_grad():
        model[0].weight[:, :10] = 0.0
    assert "(100)" in nofm.summary(model).zeros


def test_zeros_of_weights_without_plain_values_are_not_looked_at() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert nofm.summary(nn.Linear(8, 8)).zeros == ""
