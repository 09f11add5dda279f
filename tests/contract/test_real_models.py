"""Models as people use them: sparse, they run forward and backward as the plain model with hand-masked weights does, bit for bit.

Small inputs, and small members of each family. Among them are the ones whose modules read their children's weights (Swin, BEiT)
and one with Hugging Face's transposed Conv1D and a tied head.
"""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from layer_oracle import assert_computes_like, assert_same, assert_weights_are_the_parameters, masked_twin, plain_axes
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import nofm

_IMAGE = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def _timm(name: str, **options: Any) -> nn.Module:
    return timm.create_model(name, num_classes=10, **options)


_MODELS = {
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), {"conv1", "fc"}),
    "regnetx_002": (lambda: _timm("regnetx_002"), {"stem.conv", "head.fc"}),
    "vit": (lambda: _timm("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48), {"patch_embed.proj", "head"}),
    "beit": (lambda: _timm("beit_base_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3), {"patch_embed.proj", "head"}),
    "swin": (
        lambda: torchvision.models.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=10, stochastic_depth_prob=0.0),
        {"features.0.0", "head"},
    ),
    "vit-torchvision": (
        lambda: torchvision.models.VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=10),
        {"conv_proj", "heads.head"},
    ),
}


@pytest.mark.parametrize(("make", "dense"), _MODELS.values(), ids=_MODELS)
def test_a_vision_model_trains_with_masked_weights(make: Any, dense: set[str]) -> None:
    torch.manual_seed(0)
    model = make()
    axes = plain_axes(model) | {name: 1 for name, _ in model.named_parameters() if name.endswith("in_proj_weight")}
    axes = {name: axis for name, axis in axes.items() if name.removesuffix(".weight") not in dense}
    twin = masked_twin(model, axes)
    summary = nofm.sparsify_(model, "2:4")
    assert {site.key for site in nofm.sites(model)} == set(axes)
    assert dense <= {row.name for row in summary.dense}
    assert_computes_like(model, twin, lambda m: m(_IMAGE.expand(2, -1, -1, -1)))  # batch norm needs two
    assert_weights_are_the_parameters(model)


def test_gpt2_with_its_conv1d_layers_and_tied_head() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    axes = {f"transformer.h.{i}.{part}.weight": 0 for i in (0, 1) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    twin = masked_twin(model, {**axes, "lm_head.weight": 1})
    nofm.sparsify_(model, "2:4", preset="all")
    assert {site.key for site in nofm.sites(model)} == {*axes, "transformer.wte.weight"}
    assert_computes_like(model, twin, lambda m: m(input_ids=torch.tensor([[1, 5, 3]])).logits)


@pytest.mark.parametrize(
    ("make", "sparse", "dense"),
    [
        (
            lambda: torchvision.models.optical_flow.raft_small(),
            {"feature_encoder.layer1.0.convnormrelu1.0": "2:4", "update_block.motion_encoder.convflow2.0": "2:4"},
            {"update_block.recurrent_block.convgru1.convz": "2:4 needs in_channels divisible by 4, got 242"},
        ),
        (
            lambda: torchvision.models.detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None),
            {"backbone.body.layer4.2.conv3": "2:4", "rpn.head.conv.0.0": "2:4", "roi_heads.box_predictor.cls_score": "2:4"},
            {
                "backbone.body.conv1": "first convolution (preset default)",
                "roi_heads.box_predictor.bbox_pred": "classifier (preset default)",
            },
        ),
    ],
    ids=["raft_small", "fasterrcnn_resnet50_fpn"],
)
def test_large_models_are_built_sparse_and_summarised(make: Any, sparse: dict[str, str], dense: dict[str, str]) -> None:
    with torch.device("meta"):
        model = make()
    summary = nofm.sparsify_(model, "2:4")
    rows = {row.name: row for row in summary.rows}
    assert sparse.items() <= {name: row.pattern for name, row in rows.items()}.items()
    assert dense.items() <= {name: row.note for name, row in rows.items()}.items()
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(rows) == len(convolutions)
    assert sum(row.weights for row in summary.rows) == sum(m.weight.numel() for m in convolutions)


def test_raft_runs_as_torchvision_builds_it() -> None:
    torch.manual_seed(0)
    flow = torchvision.models.optical_flow.raft_small().eval()
    twin = masked_twin(flow, plain_axes(flow))
    nofm.sparsify_(flow, "2:4")
    frames = torch.randn(2, 1, 3, 128, 128)
    with torch.no_grad():
        assert_same(flow(*frames, num_flow_updates=2), twin(*frames, num_flow_updates=2))
