"""Which layers sparsify_ chooses: rules, presets, skip, flat groups and padding, on real models built without memory (meta)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import nofm


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.fixture
def resnet50() -> nn.Module:
    return _on_meta(torchvision.models.resnet50)


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def _patterns(summary: nofm.Summary) -> dict[str, str]:
    return {row.name: row.pattern for row in summary.sparse}


def _reasons(summary: nofm.Summary) -> dict[str, str]:
    return {row.name: row.note for row in summary.dense}


# ---- presets ----

_NO_3_CHANNELS = "2:4 needs in_channels divisible by 4, got 3"
_PRESETS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "default": ({}, {"conv1": "first convolution (preset default)", "fc": "classifier (preset default)"}),
    "paper": ({}, {"conv1": _NO_3_CHANNELS, "fc": "classifier (preset paper)"}),
    "asp": ({}, {"conv1": "needs outputs divisible by 8 and inputs by 16, got 64 and 3 (preset asp)"}),
    "all": ({"skip": "conv1"}, {"conv1": "skip='conv1'"}),
}


@pytest.mark.parametrize("preset", _PRESETS)
def test_presets_on_resnet50(resnet50: nn.Module, preset: Any) -> None:
    options, dense = _PRESETS[preset]
    layers = {name for name, module in resnet50.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    summary = nofm.sparsify_(resnet50, "2:4", preset=preset, **options)
    assert _reasons(summary) == dense
    assert set(_patterns(summary)) == layers - set(dense)
    assert len(layers) == 54


def test_the_paper_preset_with_padding_leaves_only_the_classifier(resnet50: nn.Module) -> None:
    summary = nofm.sparsify_(resnet50, "2:4", preset="paper", pad=True)
    assert _reasons(summary) == {"fc": "classifier (preset paper)"}
    assert next(row.kept for row in summary.rows if row.name == "conv1") == 64 * 49 * 2  # 2 of 3 channels


def test_asp_asks_for_outputs_too_and_leaves_transposed_layers() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 12), nn.Linear(24, 16), nn.ConvTranspose2d(16, 16, 3))
    assert _reasons(nofm.sparsify_(model, "2:4", preset="asp")) == {
        "1": "needs outputs divisible by 8 and inputs by 16, got 12 and 16 (preset asp)",
        "2": "needs outputs divisible by 8 and inputs by 16, got 16 and 24 (preset asp)",
        "3": "needs outputs divisible by 8 and inputs by 16, got 16 and 16 (preset asp)",
    }


@pytest.mark.parametrize(
    ("make", "classifiers"),
    [
        (lambda: timm.create_model("resnet10t"), {"fc"}),
        (lambda: timm.create_model("mobilenetv3_small_050"), {"classifier"}),
        (lambda: timm.create_model("deit_tiny_distilled_patch16_224", depth=1), {"head", "head_dist"}),
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0), set()),
        (lambda: torchvision.models.mobilenet_v2(), {"classifier.1"}),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 8)), {"0"}),
        (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 1), set()),
    ],
    ids=["timm-resnet", "timm-mobilenet", "timm-two-heads", "timm-no-head", "torchvision", "before-a-block", "only-blocks"],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_which_layers_are_the_classifier(make: Callable[[], nn.Module], classifiers: set[str]) -> None:
    summary = nofm.sparsify_(_on_meta(make), "2:4")
    assert {name for name, reason in _reasons(summary).items() if reason == "classifier (preset default)"} == classifiers


# ---- rules ----


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"0": "1:4", "*": "2:4"}, {"0": "1:4", "2": "2:4"}),
        ({"[02]": "1:4", "4": "4:8"}, {"0": "1:4", "2": "1:4", "4": "4:8"}),
        ({"2": None, "4": "2:4", "*": "1:4"}, {"0": "1:4", "4": "2:4"}),
        ({"4": "2:4"}, {"4": "2:4"}),
        ({"0.weight": "2:4", "2": nofm.Pattern("1:8")}, {"0": "2:4", "2": "1:8"}),
    ],
    ids=["exact-then-star", "glob", "none", "classifier-by-name", "parameter-names"],
)
def test_the_first_rule_that_matches_wins(rules: dict[str, Any], expected: dict[str, str]) -> None:
    assert _patterns(nofm.sparsify_(_small(), rules)) == expected


def test_why_a_rule_leaves_layers_dense() -> None:
    summary = nofm.sparsify_(_small(), {"2": None, "4": "2:4"})
    assert _reasons(summary) == {"0": "no rule matches it", "2": "rule '2' keeps it dense"}


def test_rules_on_a_real_model(resnet50: nn.Module) -> None:
    summary = nofm.sparsify_(resnet50, {"*.downsample.0": None, "layer4.*": "1:4", "fc": "2:4", "*": "2:8"})
    counts = {pattern: sum(row.pattern == pattern for row in summary.rows) for pattern in ("", "1:4", "2:4", "2:8")}
    assert counts == {"": 5, "1:4": 9, "2:4": 1, "2:8": 39}


def test_a_module_with_several_weights_answers_to_its_name_and_theirs() -> None:
    summary = nofm.sparsify_(nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2, kdim=8)}), {"attn.q*": "1:4", "attn": "2:4"})
    assert _patterns(summary) == {"attn.q_proj_weight": "1:4", "attn.k_proj_weight": "2:4", "attn.v_proj_weight": "2:4"}
    assert _reasons(summary) == {"attn.out_proj": "no rule matches it"}


def test_a_name_with_glob_characters_matches_itself() -> None:
    model = nn.ModuleDict({"up[0]": nn.Linear(8, 8), "up0": nn.Linear(8, 8)})
    assert _patterns(nofm.sparsify_(model, {"up[0]": "2:4"})) == {"up[0]": "2:4", "up0": "2:4"}


@pytest.mark.parametrize("skip", ["[02]", ["0", "2.weight"], ("0", "2")], ids=["glob", "list", "tuple"])
def test_skip(skip: Any) -> None:
    summary = nofm.sparsify_(_small(), "2:4", preset="all", skip=skip)
    assert _patterns(summary) == {"4": "2:4"}
    assert all(reason.startswith("skip=") for reason in _reasons(summary).values())


def test_one_layer_handed_over_is_meant() -> None:
    for layer in (nn.Linear(8, 8), nn.Conv2d(8, 8, 1), nn.Embedding(8, 8)):
        assert _patterns(nofm.sparsify_(layer, "2:4")) == {"weight": "2:4"}


def test_parts_of_a_model_can_be_made_sparse_one_after_the_other() -> None:
    model = _small()
    nofm.sparsify_(model[0], "2:4")
    nofm.sparsify_(model[2], "1:4")
    assert _patterns(nofm.summary(model)) == {"0": "2:4", "2": "1:4"}


# ---- flat groups and padding ----


def test_flat_groups_make_other_layers_divide() -> None:
    model = nn.Sequential(nn.Conv2d(6, 8, 2), nn.ConvTranspose2d(8, 8, 1), nn.Conv2d(3, 8, 3))
    summary = nofm.sparsify_(model, "2:4", preset="paper", axis="flat")
    assert [(row.name, row.groups, row.note) for row in summary.rows] == [
        ("0", 8 * 6, "flat groups"),
        ("1", 0, "flat groups need a weight that starts with its output axis"),
        ("2", 0, "2:4 needs the flattened filter divisible by 4, got 27"),
    ]


def test_padding_never_runs_into_the_next_conv_group() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(12, 8, 3, groups=2), nn.Conv2d(12, 8, 3, groups=2), nn.Linear(10, 8))
    summary = nofm.sparsify_(model, {"?": "2:4"}, pad=True)
    assert _patterns(summary) == {"1": "2:4", "2": "2:4"}
    assert _reasons(summary) == {"0": "2:4 needs in_channels / groups divisible by 4, got 6; padding would run into the next conv group"}
