"""The options of pruning methods and of the search for lambda, as configurations: they reach the method, or one line says what is wrong."""

from __future__ import annotations

import dataclasses

import pytest

import nofm
from nofm.cli.options import parse
from nofm.engine.build import make_method
from nofm.engine.config import ConfigError, MethodConfig, RunConfig
from nofm.engine.validate import check
from nofm.recipes import find


def config(steps: int = 800, **options: object) -> RunConfig:
    """The digits recipe with another method."""
    base = find("digits")
    method = MethodConfig(**options)
    pattern = "1:16" if method.kind == "srste" else "1:1"
    sparsity = dataclasses.replace(base.sparsity, pattern=pattern, method=method)
    schedule = dataclasses.replace(base.schedule, warmup=0)
    return dataclasses.replace(base, sparsity=sparsity, schedule=schedule, engine=dataclasses.replace(base.engine, steps=steps))


RIGHT = {
    "gmp": (
        {"kind": "gmp", "sparsity": 0.8, "begin_at": 5, "end_at": 600, "every": 10, "allocation": "global"},
        nofm.GMP(0.8, 5, 600, 10, "global"),
    ),
    "str": ({"kind": "str", "initial": -8.0, "decay": -1e-4}, nofm.STR(-8.0, -1e-4)),
    "ste_unstructured": ({"kind": "ste_unstructured", "sparsity": 0.8, "allocation": "erk"}, nofm.UnstructuredSTE(0.8, "erk")),
    "dnw": ({"kind": "dnw"}, nofm.DNW()),
    "snip": ({"kind": "snip", "batches": 3}, nofm.SNIP(batches=3)),
    "lottery": ({"kind": "lottery", "every": 100, "rewind_to": 10, "rounds": 3}, nofm.LotteryTicket(rounds=3, every=100, rewind_to=10)),
    "auto": ({"decay": "auto", "target": 0.01, "probe": 80}, nofm.SRSTE(decay="auto", target=0.01, probe=80)),
}


@pytest.mark.parametrize(("options", "method"), RIGHT.values(), ids=RIGHT)
def test_options_reach_the_method(options, method):
    wanted = config(**options)
    check(wanted)
    assert make_method(wanted) == method


WRONG = {
    "gmp without an end": ({"kind": "gmp"}, "sparsity.method.end_at = none: must say when sparsity is reached, in steps"),
    "gmp ends too late": ({"kind": "gmp", "end_at": 900}, "sparsity.method.end_at = 900: comes after the end of the run, 800 steps"),
    "gmp ends before it begins": (
        {"kind": "gmp", "end_at": 9, "begin_at": 10},
        "sparsity.method.begin_at = 10: must not be above end_at, 9",
    ),
    "rigl without an end": ({"kind": "rigl"}, "sparsity.method.end_at = none: must say when rewiring ends, in steps, such as 600"),
    "lottery without a length": ({"kind": "lottery"}, "sparsity.method.every = none: must say when the first training ends, in steps"),
    "lottery goes back too little": (
        {"kind": "lottery", "every": 9, "rewind_to": 9},
        "sparsity.method.rewind_to = 9: must be below every, 9",
    ),
    "lottery of no rounds": ({"kind": "lottery", "every": 9, "rounds": 0}, "sparsity.method.rounds = 0: must be rounds >= 1"),
    "snip of no batch": ({"kind": "snip", "batches": 0}, "sparsity.method.batches = 0: must be batches >= 1"),
    "sparsity of everything": ({"kind": "dnw", "sparsity": 1.0}, "sparsity.method.sparsity = 1.0: must be 0 < sparsity < 1"),
    "str from nowhere": ({"kind": "str", "initial": float("-inf")}, "sparsity.method.initial = -inf: must be finite"),
    "asp without a time": (
        {"kind": "asp"},
        "sparsity.method.prune_at = none: must say when the mask is made, in steps, such as 400: at 0 it would prune by random weights",
    ),
    "asp of random weights": ({"kind": "asp", "prune_at": 0}, "sparsity.method.prune_at = 0: must say when the mask is made, in steps"),
    "asp at no time": ({"kind": "asp", "prune_at": float("nan")}, "sparsity.method.prune_at = nan: must be prune_at >= 0, and finite"),
    "half a step": ({"kind": "set", "every": 2.5}, "sparsity.method.every = 2.5: must be a whole number: this run counts in steps"),
    "str finds no decay": ({"kind": "str", "decay": "auto"}, "sparsity.method.decay = auto: must be a number for str"),
    "rigl over all layers": (
        {"kind": "rigl", "allocation": "global", "end_at": 600},
        "sparsity.method.allocation = global: must be uniform or erk for rigl",
    ),
    "a target without a search": (
        {"decay": 0.1, "target": 0.1},
        "sparsity.method.target = 0.1: has no effect without sparsity.method.decay auto",
    ),
    "a probe longer than the run": (
        {"decay": "auto", "probe": 900},
        "sparsity.method.probe = 900: comes after the end of the run, 800 steps",
    ),
    "a short probe": ({"decay": "auto", "probe": 7}, "sparsity.method.probe = 7: must be probe >= 8"),
    "auto in backward": (
        {"decay": "auto", "probe": 80, "placement": "backward"},
        "sparsity.method.placement = backward: must be gradient or decoupled",
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_said_in_one_line(options, message):
    with pytest.raises(ConfigError) as told:
        check(config(**options))
    assert message in str(told.value)
    assert len(str(told.value).splitlines()) == 1


def complaints(config: RunConfig) -> str:
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("recipe", "loads"),
    [
        ("imagenet/resnet50", ["--model.pretrained"]),
        ("flow/chairs", ["--model.pretrained"]),
        ("coco/fasterrcnn", ["--model.backbone", "run"]),
        ("coco/fasterrcnn", ["--model.weights", "run"]),
        ("imagenet/resnet50", ["--model.weights", "run"]),
    ],
)
def test_asp_prunes_at_once_where_weights_are_trained_already(recipe, loads):
    """The data are not there, which is another complaint."""
    asp = ["--sparsity.method.kind", "asp", "--data.root", "."]
    random = complaints(parse(recipe, find(recipe), asp)[0])
    assert "sparsity.method.prune_at = none: must say when the mask is made, in " in random
    assert "prune_at" not in complaints(parse(recipe, find(recipe), [*asp, *loads])[0])


def test_auto_from_the_command_line():
    read, _, _ = parse("digits", find("digits"), ["--sparsity.method.decay", "auto", "--sparsity.method.probe", "80"])
    check(read)
    assert make_method(read) == nofm.SRSTE(decay="auto", probe=80)
    read, _, _ = parse("digits", find("digits"), ["--sparsity.method.decay", "0.01"])
    assert read.sparsity.method.decay == 0.01
    with pytest.raises(ConfigError, match=r"--sparsity\.method\.decay oto: must be a number or .*auto"):
        parse("digits", find("digits"), ["--sparsity.method.decay", "oto"])
