"""Every row of every study on every recipe that it can be made from: its network is built and made sparse, and its method made, without
data and without memory (`preflight`, as a run does it). That settings go together is not enough: a network may have no such option, and
a budget may be out of its reach."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nofm.engine.build import make_method, preflight
from nofm.engine.config import ConfigError, RunConfig
from nofm.engine.validate import check
from nofm.engine.world import World
from nofm.recipes import RECIPES, find
from nofm.recipes.studies import STUDIES

BASES = [name for name in RECIPES if find(name).task.kind == "classification"]
OTHERS = ("detection", "segmentation", "flow", "translation")  # in tests/integration/test_study_tasks.py
REFUSED = {("regnet", "digits"): "RegNets halve an image three times at least"}
# Some of their layers have 24 inputs, or others that 8 divides and 16 does not: with the sparsest pattern of each they keep more than 1:16.
ODD_WIDTHS = ("timm/regnetx_002", "timm/regnetx_006", "timm/regnetx_016")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> str:
    """Two classes as ImageNet has them, for a folder of images and as a folder for the files of small data."""
    root: Path = tmp_path_factory.mktemp("images")
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (root / part / name).mkdir(parents=True)
    return str(root)


@pytest.fixture(scope="module")
def built() -> set[str]:
    """Networks and patterns that have been tried: many rows differ in their method only."""
    return set()


def base(name: str, root: str) -> RunConfig:
    config = find(name)
    return config if config.data.name == "digits" else dataclasses.replace(config, data=dataclasses.replace(config.data, root=root))


@pytest.mark.parametrize(("study", "name"), [(study, name) for study in STUDIES if study not in OTHERS for name in BASES])
def test_every_row_can_be_built(study, name, images, built):
    if (study, name) in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[study, name]):
            STUDIES[study](base(name, images))
        return
    for row in STUDIES[study](base(name, images)).rows:
        config = dataclasses.replace(row.config, device="cpu")
        check(config)
        make_method(config)
        network = str((config.model, config.data, dataclasses.replace(config.sparsity, method=find("digits").sparsity.method)))
        if network in built:
            continue
        built.add(network)
        if config.model.name in ODD_WIDTHS and config.sparsity.budget == 1 / 16:
            with pytest.raises(
                ConfigError, match=r"sparsity.budget = 0.0625: .* cannot be met: with the sparsest pattern of each layer 0\.[01]"
            ):
                preflight(config, World(torch.device("cpu")))
        else:
            preflight(config, World(torch.device("cpu")))


@pytest.mark.parametrize("study", OTHERS)
@pytest.mark.parametrize("name", BASES)
def test_studies_of_other_tasks_say_what_they_are_of(study, name):
    with pytest.raises(ConfigError, match=f"task.kind = classification: this study is of {study}"):
        STUDIES[study](find(name))


@pytest.mark.parametrize("study", [study for study in STUDIES if study not in OTHERS])
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in BASES])
def test_studies_of_images_say_so_to_other_tasks(study, name):
    with pytest.raises(ConfigError, match=r"task.kind = \w+: this study is of classification"):
        STUDIES[study](find(name))
