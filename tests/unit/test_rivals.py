"""Rivals of tables 2 and 3 run as their authors ran them, as far as a run of another length can; what was trained stays what it was."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path

import pytest

from nofm.engine.build import make_method
from nofm.engine.config import RunConfig
from nofm.engine.resolve import digest, to_dict
from nofm.engine.schedule import Lengths
from nofm.engine.validate import check
from nofm.recipes import find
from nofm.recipes.studies import STUDIES

RESULTS = Path(__file__).parents[2] / "results"
STEPS_OF_AN_EPOCH = {"cifar10/resnet20": 97, "cifar10/resnet18": 195, "imagenet/resnet50": 5004, "digits": 22}


def configs(study: str, base: RunConfig) -> dict[str, RunConfig]:
    return {row.label: row.config for row in STUDIES[study](base).rows}


def as_trained(network: str) -> RunConfig:
    """The base of the runs under results/, as its README has them made."""
    base = find(f"cifar10/{network}")
    method = dataclasses.replace(base.sparsity.method, decay=1.6e-3)
    return dataclasses.replace(
        base,
        engine=dataclasses.replace(base.engine, epochs=60, precision="bf16", log_every=97),
        sparsity=dataclasses.replace(base.sparsity, pattern="1:16", method=method),
    )


@pytest.mark.parametrize("network", ["resnet20", "resnet18"])
@pytest.mark.parametrize("study", ["table2", "table3"])
def test_rows_that_are_trained_keep_their_configurations(study, network):
    """Or their runs would have to be made again: a study looks for them by this digest."""
    lines = (RESULTS / f"cifar10-{network}" / study / "runs.csv").read_text().splitlines()
    trained = {run["label"]: run["config"] for run in csv.DictReader(lines)}
    made = {label: digest(to_dict(config)) for label, config in configs(study, as_trained(network)).items()}
    assert len(trained) >= 3
    assert {label: made[label] for label in trained} == trained


def rewirings(name: str, label: str) -> tuple[list[int], int]:
    """The steps at which a rival rewires, and the steps of its run."""
    config = configs("table3", find(name))[label]
    lengths = Lengths(config, STEPS_OF_AN_EPOCH[name])
    method = make_method(config, lengths)
    return [number for number in range(1, lengths.total + 1) if method.rewires(number)], lengths.total


@pytest.mark.parametrize("name", STEPS_OF_AN_EPOCH)
@pytest.mark.parametrize(("label", "in_an_epoch", "until"), [("SET 95 %", 1, 0.75), ("SNFS 95 %", 1, 0.75), ("DSR 95 %", 2, 0.95)])
def test_rewirings_go_by_epochs(name, label, in_an_epoch, until):
    """As their authors' do: by steps, SNFS would drop half of its weights fifty times in an epoch of ImageNet, and in the 400 steps of
    the digits DSR would rewire twice, with a threshold that is still far below its weights."""
    steps, total = rewirings(name, label)
    assert len(steps) == pytest.approx(until * total / STEPS_OF_AN_EPOCH[name] * in_an_epoch, abs=1.5)
    assert until * total - STEPS_OF_AN_EPOCH[name] <= steps[-1] < until * total


SHORT = {
    "ten steps": ("digits", {"steps": 10}, 4),
    "a hundred steps": ("digits", {"steps": 100}, 9),
    "as the recipe": ("digits", {"steps": 400}, 12),
    "ten steps of an epoch": ("cifar10/resnet20", {"epochs": 0.1}, 4),
    "half an epoch": ("cifar10/resnet20", {"epochs": 0.5}, 8),
    "five epochs": ("cifar10/resnet20", {"epochs": 5}, 10),
}


@pytest.mark.parametrize(("name", "length", "least"), SHORT.values(), ids=SHORT)
def test_in_a_short_run_rivals_still_rewire_and_prune_many_times(name, length, least):
    """RigL and GMP some thirty times, where there are as many steps; else a row would be another method, or be refused with the advice to
    give a smaller `every`, which the rows of a study set themselves."""
    base, unit = shortened(find(name), **length), next(iter(length))
    for label, config in configs("table3", base).items():
        if config.sparsity.method.kind not in ("rigl", "gmp", "set", "snfs", "dsr"):
            continue
        check(config)
        lengths = Lengths(config, STEPS_OF_AN_EPOCH[name])
        method = make_method(config, lengths)
        happens = method._prunes if config.sparsity.method.kind == "gmp" else method.rewires
        times = sum(map(happens, range(1, lengths.total + 1)))
        many = config.sparsity.method.kind in ("rigl", "gmp") and lengths.total > 45
        assert times >= (28 if many else least), label
        assert unit == "epochs" or config.sparsity.method.every == int(config.sparsity.method.every)


def shortened(base: RunConfig, **length: float) -> RunConfig:
    engine = dataclasses.replace(base.engine, **{"epochs": None, "steps": None, **length})
    warmup = dataclasses.replace(base.schedule, warmup=next(iter(length.values())) / 10)
    # Its folder is looked for by `check`.
    root = None if base.data.name == "digits" else str(RESULTS)
    return dataclasses.replace(base, engine=engine, schedule=warmup, data=dataclasses.replace(base.data, root=root))


@pytest.mark.parametrize("name", ["cifar10/resnet20", "cifar10/resnet18", "imagenet/resnet50"])
def test_in_a_run_of_the_usual_length_they_do_so_every_hundred_steps(name):
    for label, config in configs("table3", find(name)).items():
        if config.sparsity.method.kind in ("rigl", "gmp"):
            assert config.sparsity.method.every is None, label
            assert make_method(config).every == 100


@pytest.mark.parametrize(("name", "least"), [("cifar10/resnet20", 0.8), ("cifar10/resnet18", 0.3)])
def test_thresholds_of_str_open_early_and_in_no_haste(name, least):
    """By decay alone: when they open (s = -10), and how far s comes, which is -10 exp(-3 E / 4) for exponent E. The least E is what keeps
    more than a fifth of the network's weights: 39 % of ResNet-20 by 0.8, 24 % of ResNet-18 by 0.3. Three times the 11.5 of the authors'
    ResNet-50 is the most: 10 keeps a tenth of ResNet-20, and what rises much faster empties layers before the loss can hold them."""
    for label, config in configs("table3", find(name)).items():
        if not label.startswith("STR"):
            continue
        rates, s, opened = rates_of(config, STEPS_OF_AN_EPOCH[name]), make_method(config).initial, None
        total_decay = config.optim.weight_decay + make_method(config).decay
        for number, rate in enumerate(rates, 1):
            s *= math.exp(-rate * total_decay / (1 - config.optim.momentum))
            opened = number if opened is None and s > -10 else opened
        assert opened is not None
        assert 0.1 < opened / len(rates) < 0.5, label
        assert -10 * math.exp(-0.75 * (least - 0.02)) < s < -10 * math.exp(-0.75 * 36.5), label


def rates_of(config: RunConfig, steps_of_an_epoch: int) -> list[float]:
    """The learning rates of a run, by hand: a linear warm-up and half a cosine."""
    lengths = Lengths(config, steps_of_an_epoch)
    rise, fall = lengths.warmup, lengths.total - lengths.warmup
    up = [config.optim.lr * (i + 1) / (rise + 1) for i in range(rise)]
    return up + [config.optim.lr / 2 * (1 + math.cos(math.pi * i / fall)) for i in range(fall)]
