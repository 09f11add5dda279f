"""Kernel shapes (paper appendix A.2): counted by hand, by brute force, on trained layers, and once more by the report from disk."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import nofm
from nofm.analysis.shapes import beyond, kernel_shapes, shapes_of
from nofm.masks import pack
from nofm.report import ReportError
from nofm.report.kernels import read_shapes

X, _ = True, False  # kept, pruned


def test_three_kernels_by_pencil():
    kernels = [[[X, _], [_, _]], [[_, X], [X, _]], [[X, _], [_, _]], [[_, _], [_, _]]]
    found = shapes_of(torch.tensor(kernels).view(2, 2, 2, 2))  # (output, input, kh, kw)
    assert (found.kernels, found.distinct, found.kernel) == (4, 3, (2, 2))
    assert [(shape.count, shape.example) for shape in found.shapes] == [(2, (0, 0)), (1, (1, 0)), (1, (1, 1))]
    assert [str(shape) for shape in found.shapes] == ["#.\n..", ".#\n#.", "..\n.."]
    assert found.by_size == {0: 1, 1: 2, 2: 1}


def test_every_kernel_is_counted_under_the_shape_it_has():
    torch.manual_seed(0)
    mask = nofm.mask(torch.randn(16, 16, 3, 3), "2:8")
    found = shapes_of(mask)
    brute = Counter(tuple(map(tuple, mask[o, i].tolist())) for o, i in itertools.product(range(16), range(16)))
    assert {shape.kept: shape.count for shape in found.shapes} == brute
    for shape in found.shapes:
        i, o = shape.example
        assert tuple(map(tuple, mask[o, i].tolist())) == shape.kept
        earlier = [(o_, i_) for o_, i_ in itertools.product(range(16), range(16)) if (o_, i_) < (o, i)]
        assert all(tuple(map(tuple, mask[o_, i_].tolist())) != shape.kept for o_, i_ in earlier), "the example is the first"
    counts = [shape.count for shape in found.shapes]
    assert counts == sorted(counts, reverse=True)


def test_of_a_model_every_2d_convolution_larger_than_1x1():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 1), nn.ConvTranspose2d(16, 8, 2), nn.Flatten(), nn.Linear(8, 8))
    nofm.sparsify_(model, "2:4", preset="all")
    found = kernel_shapes(model)
    assert list(found) == ["0", "2"]
    masks = {site.name: site.mask() for site in nofm.sites(model)}
    assert found["0"] == shapes_of(masks["0"])
    i, o = found["2"].shapes[0].example
    assert masks["2"][i, o].tolist() == [list(row) for row in found["2"].shapes[0].kept], "a transposed weight is (input, output)"
    linear = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nofm.sparsify_(linear, "2:4", preset="all")
    with pytest.raises(nofm.NofmError, match="no sparse 2-d convolution"):
        kernel_shapes(linear)


def test_what_a_finer_pattern_could_not_give():
    # One output, eight inputs, one position: 2:8 keeps inputs 0 and 2, of which 1:4 could keep only one.
    mask = torch.zeros(1, 8, 1, 2, dtype=torch.bool)
    mask[0, [0, 2], 0, 0] = True
    mask[0, [1, 5], 0, 1] = True  # one in each half: 1:4 could
    assert beyond(mask, "1:4").tolist() == [[X, _, X, _, _, _, _, _]]
    torch.manual_seed(0)
    weight = torch.randn(16, 32, 3, 3)
    assert not beyond(nofm.mask(weight, "1:4"), "1:4").any()
    assert beyond(nofm.mask(weight, "2:8"), "1:4").double().mean() > 0.5, "as in the paper, most kernels of 2:8"


@pytest.mark.parametrize("wrong", [torch.ones(2, 2, 3), torch.ones(2, 2, 3, 3)], ids=["3-d", "not-bool"])
def test_refuses(wrong):
    with pytest.raises(nofm.NofmError, match="bool mask \\(output, input, kh, kw\\)"):
        shapes_of(wrong.bool() if wrong.dim() == 3 else wrong)


def write_masks(path, masks, **metadata):
    facts = {"shapes": {name: list(mask.shape) for name, mask in masks.items()}, "patterns": dict.fromkeys(masks, "2:4")} | metadata
    save_file({name: pack(mask) for name, mask in masks.items()}, path, {key: json.dumps(value) for key, value in facts.items()})


def test_the_report_counts_the_same_from_disk(tmp_path):
    torch.manual_seed(0)
    sizes = {
        "z": (8, 12, 3, 3),
        "a": (5, 8, 5, 5),
        "large": (3, 4, 8, 8),
        "pointwise": (8, 8, 1, 1),
        "linear": (8, 8),
        "back": (16, 8, 3, 2),
    }
    masks = {name: nofm.mask(torch.randn(size), "2:4") for name, size in sizes.items()}
    write_masks(tmp_path / "masks.safetensors", masks)
    found = read_shapes(tmp_path / "masks.safetensors", frozenset({"back"}))
    assert [layer.layer for layer in found] == ["z", "a", "large", "back"], "in the order of the network, not of the alphabet"
    for layer in found:
        expected = shapes_of(masks[layer.layer].transpose(0, 1) if layer.layer == "back" else masks[layer.layer])
        assert (layer.kernel, layer.kernels, layer.distinct, layer.pattern) == (expected.kernel, expected.kernels, expected.distinct, "2:4")
        assert layer.empty == expected.by_size.get(0, 0)
        assert layer.top == tuple((shape.kept, shape.count, shape.example) for shape in expected.shapes[:6])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path, masks: path.write_bytes(b"not a safetensors file"), "not a readable safetensors file"),
        (lambda path, masks: path.write_bytes(path.read_bytes()[:-3]), "not a readable safetensors file"),
        (lambda path, masks: save_file({"a": pack(masks["a"])}, path), 'no readable "shapes"'),
        (lambda path, masks: write_masks(path, masks, shapes=[]), '"shapes" in its metadata is list'),
        (lambda path, masks: write_masks(path, masks, shapes={}), "layer 'a' has no shape"),
        (lambda path, masks: write_masks(path, masks, shapes={"a": [8, 8, 3, -3]}), "layer 'a' has no shape"),
        (
            lambda path, masks: write_masks(path, masks, shapes={"a": [8, 8, 3, 4]}),
            r"a: 96 bytes are expected for shape \[8, 8, 3, 4\], got \(72,\)",
        ),
        (lambda path, masks: save_file({"a": torch.zeros(72)}, path, _facts(masks)), "of float32"),
    ],
    ids=["garbage", "cut-short", "no-metadata", "a-list", "no-shape", "odd-shape", "other-size", "other-dtype"],
)
def test_a_file_of_masks_that_is_none_is_named(tmp_path, spoil, message):
    path, masks = tmp_path / "step-00000001.safetensors", {"a": nofm.mask(torch.randn(8, 8, 3, 3), "2:4")}
    write_masks(path, masks)
    assert read_shapes(path)[0].kernels == 64
    spoil(path, masks)
    with pytest.raises(ReportError, match=message) as caught:
        read_shapes(path)
    assert str(path) in str(caught.value)


def _facts(masks):
    return {"shapes": json.dumps({name: list(mask.shape) for name, mask in masks.items()}), "patterns": "{}"}
