"""A parameter that several modules hold has one mask: it is one site, all its modules compute with the same N:M weight, and where
that is not possible sparsify_ says so instead of masking it in one place and not in the other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_oracle import assert_computes_like, assert_same, keep, masked_twin
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import nofm
from nofm import ste

_IDS = torch.tensor([[1, 2, 0], [7, 3, 1]])


class TinyLM(nn.Module):
    """An embedding whose weight is the output projection's too."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 16, **embedding)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)).relu())


class TwoUsers(nn.Module):
    """Two square layers with one weight."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        second.weight = first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        ({"head": "2:4"}, {}),
        ({"embed": "2:4"}, {}),
        ({"embed": "2:4", "head": "2:4"}, {}),
        ({"head": "2:4", "*": None}, {}),
    ],
    ids=["head", "embed", "both", "head-else-dense"],
)
def test_an_embedding_and_its_head_are_masked_alike(rules: Any, options: Any) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    twin = masked_twin(model, {"embed.weight": 1})
    summary = nofm.sparsify_(model, rules, **options)
    (site,) = nofm.sites(model)
    assert (site.name, site.key, site.weight) == ("embed", "embed.weight", model.embed.weight)
    assert model.embed.weight is model.head.weight
    assert_computes_like(model, twin, lambda m: m(_IDS))

    rows = {row.name: row for row in summary.rows}
    assert (rows["embed"].kept, rows["head"].kept, rows["head"].note) == (72, 72, "tied to embed")
    assert summary.density == (72 + 256) / (144 + 256)

    nofm.fold_(model)
    assert_same(model(_IDS), twin(_IDS))
    assert model.embed.weight is model.head.weight


@pytest.mark.parametrize("change", ["lens", "frozen"])
def test_what_a_method_does_to_a_tied_weight_reaches_all_its_modules(change: str) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    dense = copy.deepcopy(model)
    nofm.sparsify_(model, {"head": "2:4"})
    (site,) = nofm.sites(model)
    if change == "lens":
        site.look_through(ste.dense)
        assert_same(model(_IDS), dense(_IDS))
        return
    other = ~keep(model.embed.weight, 2, 4, axis=1)  # also keeps 2 of 4, and no one would come to it from the weight
    site.freeze(other)
    with torch.no_grad():
        dense.embed.weight.masked_fill_(~other, 0.0)
    assert_same(model(_IDS), dense(_IDS))
    model(_IDS).square().sum().backward()
    assert not model.embed.weight.grad[~other].any()
    nofm.densify_(model)
    assert not list(model.buffers())


@pytest.mark.parametrize("loaded", ["embed.weight", "head.weight"])
def test_a_weight_that_is_loaded_under_one_of_its_names_has_a_new_frozen_mask_under_both(loaded: str) -> None:
    model = TinyLM()
    nofm.sparsify_(model, {"head": "2:4"})
    (site,) = nofm.sites(model)
    site.freeze(site.mask())
    new = torch.randn(9, 16)
    model.load_state_dict({loaded: new}, strict=False)  # as files that hold every tensor once have it
    for module in (model.embed, model.head):
        assert torch.equal(dict(module.named_buffers())["_nofm_mask_weight"], keep(new, 2, 4, axis=1))


def test_a_deepcopy_keeps_the_tie() -> None:
    model = TinyLM()
    nofm.sparsify_(model, {"head": "2:4"})
    assert len(list(nofm.sites(copy.deepcopy(model)))) == 1


def test_two_linear_layers_with_one_weight() -> None:
    torch.manual_seed(0)
    model = TwoUsers(nn.Linear(16, 16), nn.Linear(16, 16))
    twin = masked_twin(model, {"first.weight": 1})
    nofm.sparsify_(model, "2:4")  # the second is the classifier, which the tie overrules
    assert [site.name for site in nofm.sites(model)] == ["first"]
    assert_computes_like(model, twin, lambda m: m(torch.ones(2, 16)))


class Unknown(nn.Module):
    """Of a kind that nofm does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))


@pytest.mark.parametrize(
    ("make", "rules", "options", "complaint"),
    [
        (lambda: TwoUsers(nn.Linear(16, 16), Conv1D(16, 16)), "2:4", {"preset": "all"}, "share one weight but would group it differently"),
        (
            lambda: TwoUsers(nn.Linear(16, 16), nn.Linear(16, 16)),
            {"first": "2:4", "second": "1:4"},
            {},
            "second and first share one weight",
        ),
        (lambda: TwoUsers(nn.Linear(16, 16), Unknown()), "2:4", {"preset": "all"}, "first shares its weight with second.weight, of a kind"),
        (lambda: TwoUsers(nn.Linear(16, 16), nn.Linear(16, 16)), "2:4", {"skip": "second"}, r"second stays dense \(skip='second'\)"),
        (TinyLM, {"head": "2:4", "embed": None}, {}, r"embed stays dense \(rule 'embed' keeps it dense\)"),
        (lambda: TinyLM(max_norm=1.0), {"head": "2:4"}, {}, "embed stays dense .embedding with max_norm"),
        (lambda: TinyLM(max_norm=1.0), {"head": "2:4", "*": "2:4"}, {}, "embed stays dense .embedding with max_norm"),
    ],
    ids=["axes", "patterns", "unknown-kind", "skip", "rule-None", "max_norm-unmatched", "max_norm"],
)
def test_a_tie_that_cannot_be_kept_is_an_error(make: Any, rules: Any, options: Any, complaint: str) -> None:
    model = make()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(nofm.LayerError, match=complaint):
        nofm.sparsify_(model, rules, **options)
    assert [type(module) for module in model.modules()] == classes
