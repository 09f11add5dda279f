"""Configurations: they survive the way through a file, say where a wrong value came from, and know the methods that exist."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import typing

import pytest

from nofm.cli.options import parse
from nofm.engine.config import ConfigError, EngineConfig, MethodConfig, RunConfig
from nofm.engine.problems.classification import OWN_MODELS
from nofm.engine.resolve import differences, from_dict, keys, leaves, merge, near, near_key, near_path, read_toml, says, to_dict
from nofm.engine.synonyms import SYNONYMS
from nofm.engine.validate import METHOD_OPTIONS, check
from nofm.recipes import RECIPES, describe, find, listed


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_the_way_through_json(name):
    config = find(name)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_right_but_for_its_data(name):
    config = find(name)
    if config.data.name == "digits":
        check(config)
    else:
        with pytest.raises(ConfigError) as told:
            check(config)
        assert str(told.value).splitlines() == [f"data.root = none: {config.data.name} needs the folder of its files: --data.root PATH"]


def test_the_imagenet_recipe_has_the_settings_of_the_paper():
    c = find("imagenet/resnet50")
    assert (c.engine.batch_size, c.engine.epochs, c.optim.lr, c.optim.momentum, c.optim.weight_decay) == (256, 120, 0.1, 0.9, 5e-5)
    assert (c.schedule.kind, c.schedule.warmup, c.schedule.final) == ("cosine", 5, 0)
    assert (c.sparsity.method.kind, c.sparsity.method.decay, c.sparsity.preset) == ("srste", 2e-4, "paper")


def test_recipes_are_found_by_glob_and_described():
    assert listed("cifar10/*") == ["cifar10/resnet18", "cifar10/resnet20", "cifar10/resnet32"]
    assert all(describe(name) for name in RECIPES)


def test_methods_and_their_options_are_those_of_the_registry():
    import nofm

    options = {name: tuple(f.name for f in dataclasses.fields(info.method)) for name, info in nofm.METHODS.items()}
    assert options == METHOD_OPTIONS
    hints = typing.get_type_hints(MethodConfig)
    for info in nofm.METHODS.values():
        for f in dataclasses.fields(info.method):
            assert getattr(MethodConfig(), f.name) is None
            assert f.name in hints


def test_own_models_are_those_of_the_registry():
    from nofm.tasks.models import MODELS

    assert set(MODELS) == set(OWN_MODELS)


def test_every_key_has_help_and_a_type_in_words():
    from pathlib import Path

    import nofm.engine.config as module

    source = Path(module.__file__).read_text()
    for key, kind in leaves().items():
        assert says(kind) != "a group of keys"
        name = key.rpartition(".")[2]
        assert f"    {name}: " in source
    assert {"optim.lr", "sparsity.method.decay", "data.root", "seed", "device", "out"} <= set(keys())


def test_another_method_leaves_the_options_of_the_recipes_own_behind():
    base = find("digits")
    assert base.sparsity.method.kind == "srste"
    assert base.sparsity.method.decay is not None
    config, _, _ = parse("digits", base, ["--sparsity.method.kind", "ste"])
    assert config.sparsity.method == MethodConfig(kind="ste")
    config, _, _ = parse("digits", base, ["--sparsity.method.kind", "ste", "--sparsity.method.decay", "0.1"])
    assert config.sparsity.method.decay == 0.1, "what is asked for stays, to be complained about"
    config, _, _ = parse("digits", base, ["--sparsity.method.refine", "sign"])
    assert config.sparsity.method.decay == base.sparsity.method.decay


def test_merging_changes_only_what_is_named():
    base = to_dict(find("digits"))
    merged = merge(base, {"optim": {"lr": 0.5}, "seed": 3})
    assert list(differences(base, merged)) == [("optim.lr", 0.1, 0.5), ("seed", 0, 3)]
    assert list(differences(base, to_dict(find("digits")))) == []


def test_a_file_says_the_line_of_each_key(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('seed = 3\n\n[optim]\nlr = 0.5 # half\n[sparsity.method]\nkind = "ste"\n')
    values, origins = read_toml(path)
    assert values == {"seed": 3, "optim": {"lr": 0.5}, "sparsity": {"method": {"kind": "ste"}}}
    assert origins["seed"] == "run.toml:1 seed ="
    assert origins["optim.lr"] == "run.toml:4 optim.lr ="
    assert origins["sparsity.method.kind"] == "run.toml:6 sparsity.method.kind ="


def test_a_file_says_none_as_a_command_does(tmp_path):
    """TOML has no word for it, and a recipe's value must be possible to take back."""
    (path := tmp_path / "run.toml").write_text('device = "none"\n[model]\nwidth = "none"\nname = "none"\n[engine]\nepochs = "none"\n')
    values, _ = read_toml(path)
    assert values == {"device": "none", "model": {"width": None, "name": "none"}, "engine": {"epochs": None}}


# What is typed, and what is suggested: near ones, or nothing.
TYPED_KEYS = {
    "lr": ["optim.lr"],
    "optim.Lr": ["optim.lr"],
    "schedule.lr": ["optim.lr"],
    "optim.learning_rate": ["optim.lr"],
    "Learning-Rate": ["optim.lr"],
    "wd": ["optim.weight_decay"],
    "lambda": ["sparsity.method.decay"],
    "method": ["sparsity.method.kind"],
    "engine.epoch": ["engine.epochs"],
    "engine.batchsize": ["engine.batch_size"],
    "batch-size": ["engine.batch_size"],
    "optim.batch_size": ["engine.batch_size"],
    "num_workers": ["engine.workers"],
    "engine.num_workers": ["engine.workers"],
    "optim.decay": ["optim.weight_decay", "sparsity.method.decay"],
    "sparsity.patern": ["sparsity.pattern"],
    "sparsity.method.decy": ["sparsity.method.decay"],
    "sparsity.method.lambda": ["sparsity.method.decay"],
    "model": ["model.name", "model.width", "model.layers"],
    "engine.foo": [],
    "engine.zzz": [],
    "engine.gpu": ["device"],
    "engine.amp": ["engine.precision"],
    "engine.verbose": [],
    "engine.save_every": ["engine.checkpoint_every"],
    "schedule.type": ["schedule.kind"],
    "optim.name": ["optim.kind", "model.name", "data.name"],
    "sparsity.method.name": ["sparsity.method.kind", "model.name", "data.name"],
    "model.kind": ["model.name", "task.kind", "sparsity.method.kind"],
    "type": [],
    "data.path": ["data.root"],
    "data.dir": [],
    "zzz": [],
}
TYPED_WORDS = {
    "cosin": (["cosine", "step"], ["cosine"]),
    "zzz": (["cosine", "step"], []),
    "sr-ste": (["ste", "srste"], ["srste"]),
    "RigL": (["rigl", "gmp"], ["rigl"]),
    "gpu": (["auto", "cpu", "cuda"], []),
    "resnet50": (["cifar10/resnet20", "imagenet/resnet50"], ["imagenet/resnet50"]),
    "imagnet/resnet50": (["cifar10/resnet20", "imagenet/resnet50"], ["imagenet/resnet50"]),
    "imagenet/resnet5": (["cifar10/resnet20", "imagenet/resnet50"], ["imagenet/resnet50"]),
    "imagenet/vgg": (["imagenet/resnet50", "imagenet/regnetx_032"], []),
    "imagenet": (["imagenet/resnet50x1.25", "digits"], ["imagenet/resnet50x1.25"]),
    "imagenet/resnet50x1": (["imagenet/resnet50x1.25", "imagenet/resnet18"], ["imagenet/resnet50x1.25"]),
    "test": (["train", "study", "recipes", "report", "check"], []),
    "trian": (["train", "study", "recipes", "report", "check"], ["train"]),
}


def suggested(hint: str) -> list[str]:
    assert re.fullmatch(r"|; did you mean '.*'\?", hint)
    return re.findall(r"'([^']*)'", hint)


@pytest.mark.parametrize("word", TYPED_KEYS)
def test_near_keys(word):
    assert suggested(near_key(word, keys())) == TYPED_KEYS[word]


@pytest.mark.parametrize("word", SYNONYMS)
def test_words_of_other_tools_lead_to_a_key_that_their_letters_do_not(word):
    meant = SYNONYMS[word]
    assert meant in keys()
    assert suggested(near(word, keys())) != [meant], "near finds it without the table"
    assert word not in {key.rpartition(".")[2] for key in keys()}, "it is a name here"


@pytest.mark.parametrize("word", TYPED_WORDS)
def test_near_words(word):
    allowed, wanted = TYPED_WORDS[word]
    assert suggested(near(word, allowed)) == wanted


@pytest.mark.parametrize(("typed", "wanted"), [("rum.toml", ["run.toml"]), ("zzz.toml", []), ("other", [])])
def test_near_files(typed, wanted, tmp_path):
    siblings = [tmp_path / "run.toml", tmp_path / "long-name.toml"]
    assert suggested(near_path(tmp_path / typed, siblings)) == [str(tmp_path / name) for name in wanted]


def test_world_size_counts_in_the_batch(monkeypatch):
    config = dataclasses.replace(RunConfig(), engine=EngineConfig(steps=1, batch_size=6))
    monkeypatch.setenv("WORLD_SIZE", "3")
    check(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="processes 4"):
        check(config)


def test_configuration_needs_no_torch():
    code = "import sys, nofm.recipes, nofm.engine.validate, nofm.engine.resolve; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def with_method(decay, optim, **method):
    base = find("digits")
    of_method = dataclasses.replace(base.sparsity.method, decay=decay, **method)
    sparsity = dataclasses.replace(base.sparsity, method=of_method, pattern="1:1" if method.get("kind") == "str" else base.sparsity.pattern)
    return dataclasses.replace(base, sparsity=sparsity, optim=dataclasses.replace(base.optim, **optim))


_ADAMW = {"kind": "adamw", "lr": 0.001, "momentum": None, "nesterov": None}


@pytest.mark.parametrize(
    ("decay", "optim", "method", "is_refused"),
    [
        (10.0, {"lr": 0.1}, {}, True),
        (9.9, {"lr": 0.1}, {}, False),
        (10.0, {"lr": 0.1}, {"refine": "sign"}, False),  # by which a weight goes to and fro, as far each time
        (1000.0, _ADAMW, {}, False),  # which divides the term by its own size
        (1000.0, _ADAMW, {"placement": "decoupled"}, True),
        (10.0, {"lr": 0.1}, {"kind": "str"}, False),  # whose decay is another thing
    ],
)
def test_a_large_lambda_is_refused_where_weights_would_swing(decay, optim, method, is_refused):
    config = with_method(decay, optim, **method)
    if is_refused:
        with pytest.raises(ConfigError, match=r"decay = .* must be below 1 / optim.lr = \d+, or pruned weights swing"):
            check(config)
    else:
        check(config)
