"""Every classification network of the paper, from its recipe, sparsified as the paper does: weights and multiply-adds against its tables,
and against the plain model of torchvision or timm. On the meta device: no weight is made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import nofm
from nofm.engine.build import sparsified_
from nofm.engine.config import RunConfig
from nofm.engine.problems import problem_of
from nofm.recipes import RECIPES, find
from nofm.tasks.models import REGNETS, build_model

# Parameters as torchvision and timm publish them; then billions of multiply-adds, dense and sparse, of the paper's Table 1 and its table
# of RegNets. (What ResNet-50 keeps at each pattern of its tables is in test_cost.py.)
NETWORKS: dict[str, tuple[int | None, float | None, float | None]] = {
    "imagenet/resnet18": (11_689_512, None, None),
    "imagenet/resnet50": (25_557_032, 4.09, None),  # its 2.15 at 2:4 does not follow from the density
    "imagenet/resnet50x1.25": (None, None, None),
    "imagenet/regnetx_002": (2_684_792, 0.2, 0.1),
    "imagenet/regnetx_004": (5_157_512, 0.4, 0.2),
    "imagenet/regnetx_006": (6_196_040, 0.6, 0.3),
    "imagenet/regnetx_008": (7_259_656, 0.8, 0.4),
    "imagenet/regnetx_016": (9_190_136, 1.6, 0.8),
    "imagenet/regnetx_032": (15_296_552, None, 1.6),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> str:
    """A thousand classes, as ImageNet has: all that a draft of a network looks at."""
    root = tmp_path_factory.mktemp("images")
    for number in range(1000):
        (root / "train" / f"n{number:08d}").mkdir(parents=True)
    return str(root)


def recipe(name: str, root: str | Path) -> RunConfig:
    config = find(name)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, root=str(root)))


def built(config: RunConfig) -> tuple[nn.Module, nofm.Cost]:
    with torch.device("meta"):
        model = problem_of(config).draft(config)
        sparsified_(model, config)
    return model, nofm.cost(model, torch.empty(1, 3, 224, 224, device="meta"))


def test_all_recipes_of_imagenet_are_here():
    assert list(NETWORKS) == [name for name in RECIPES if name.startswith("imagenet/")]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_the_paper_has_its_weights(name, images):
    config = recipe(name, images)
    assert (config.sparsity.preset, config.sparsity.pattern) == ("paper", "2:8" if "1.25" in name else "2:4")
    with torch.device("meta"):
        plain = build_model(config.model.name, 1000, 3)
    weights = [module.weight.numel() for module in plain.modules() if isinstance(module, nn.Conv2d)]  # the first reads three channels
    model, cost = built(config)
    params, macs, macs_sparse = NETWORKS[name]
    assert cost.params == sum(p.numel() for p in plain.parameters()) == (params or cost.params)
    assert len(list(nofm.sites(model))) == len(weights) - 1, "all convolutions but the first"
    pruned = 0.75 if "1.25" in name else 0.5
    assert cost.params_sparse == cost.params - pruned * sum(weights[1:])
    if "1.25" in name:
        assert round(cost.params_sparse / 1e6, 1) == 11.8, "of the paper's Table 1"
    assert macs is None or round(cost.macs / 1e9, 2 if macs == 4.09 else 1) == macs
    assert macs_sparse is None or round(cost.macs_sparse / 1e9, 1) == macs_sparse


@pytest.mark.parametrize("size", REGNETS)
def test_a_regnet_for_small_images_is_that_of_the_paper_but_for_two_halvings(size):
    with torch.device("meta"):
        small, plain = build_model(f"cifar/regnetx_{size}", 10, 3), build_model(f"timm/regnetx_{size}", 10, 3)
    assert {name: p.shape for name, p in small.named_parameters()} == {name: p.shape for name, p in plain.named_parameters()}
    seen: dict[str, tuple[int, ...]] = {}
    for name in ("stem", "s1", "s2", "s3", "s4"):
        small.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: seen.update({name: tuple(out.shape[2:])}))
    small(torch.empty(1, 3, 32, 32, device="meta"))
    assert list(seen.values()) == [(32, 32), (32, 32), (16, 16), (8, 8), (4, 4)], "as the ResNet-18 for these images has them"


@pytest.mark.parametrize("preset", ["paper", "default"])
def test_resnet32_has_the_weights_of_he_et_al(preset):
    """0.46 M in their table. A convolution of 3 channels, ten of 16, nine of 32 and of 64 behind one that widens; short cuts have none."""
    config = find("cifar10/resnet32")
    config = dataclasses.replace(config, sparsity=dataclasses.replace(config.sparsity, preset=preset))
    with torch.device("meta"):
        model = problem_of(config).draft(config)
        sparsified_(model, config)
    cost = nofm.cost(model, torch.empty(1, 3, 32, 32, device="meta"))
    first, others = 9 * 3 * 16, 9 * (10 * 16 * 16 + 16 * 32 + 9 * 32 * 32 + 32 * 64 + 9 * 64 * 64)
    norms, classifier = 2 * (11 * 16 + 10 * 32 + 10 * 64), 65 * 10
    assert cost.params == first + others + norms + classifier == 464_154
    assert cost.params_sparse == cost.params - others * 15 // 16


def test_resnet32_is_trained_as_resnet20_is():
    other, config = find("cifar10/resnet20"), find("cifar10/resnet32")
    assert config.model.name == "cifar/resnet32"
    assert dataclasses.replace(config, model=other.model) == other
