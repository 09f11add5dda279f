"""Configurations that cannot be run: each is refused with exit code 2 before data is opened, by a message that names the key, says
what is allowed and suggests the near miss where there is one.

The table is run through the command line's own main function in this process, with the entrances to data and to the run folder
walled up; a few rows also go through a real process, to see the exit code, the message and no traceback.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import nofm.data.arrays
import nofm.engine.train
from nofm.cli.main import main


@dataclass(frozen=True)
class Bad:
    """Options (and a TOML file) after `nofm train RECIPE`, and texts that the message must hold."""

    options: str
    says: tuple[str, ...]
    toml: str | bytes | None = None
    recipe: str = "digits"


def bad(options: str, *says: str, toml: str | bytes | None = None, recipe: str = "digits") -> Bad:
    return Bad(options, says, toml, recipe)


TABLE = {
    # the command itself
    "recipe misspelled": bad("", "'digts'", "digits, fashion/cnn", "did you mean 'digits'", recipe="digts"),
    "no recipe": bad("", "where a recipe belongs", "digits", recipe="--optim.lr"),
    "stray word": bad("fast", "'fast'", "--optim.lr 0.1"),
    "unknown option": bad("--optim.lrr 1", "--optim.lrr", "no such option", "did you mean '--optim.lr'"),
    "option without its group": bad("--lr 1", "--lr", "did you mean '--optim.lr'"),
    "option as other tools call it": bad("--learning-rate 0.1", "no such option", "did you mean '--optim.lr'"),
    "key as other tools call it": bad("", "run.toml:2", "learning_rate", "did you mean 'optim.lr'", toml="[optim]\nlearning_rate = 1.0"),
    "a group for an option": bad("--optim 1", "--optim", "it is a group", "--optim.kind"),
    "option twice": bad("--optim.lr 1 --optim.lr 2", "--optim.lr", "2 times"),
    "option of a method misspelled": bad("--sparsity.method.decy 1", "no such option", "did you mean '--sparsity.method.decay'"),
    "no seeds": bad("--seeds 0", "--seeds 0", "seeds >= 1"),
    "no value": bad("--optim.lr", "--optim.lr", "needs a value", "a number"),
    "two values": bad("--optim.lr 1 2", "--optim.lr 1 2", "takes one value"),
    "comma for a point": bad("--optim.lr 0,1", "--optim.lr 0,1", "a number", "did you mean '0.1'"),
    "bool that is none": bad("--engine.compile maybe", "--engine.compile maybe", "true or false"),
    "resume without a folder": bad("--resume", "--resume", "--out DIR"),
    # patterns
    "pattern keeps nothing": bad("--sparsity.pattern 0:4", "--sparsity.pattern 0:4", "keeps nothing", "1 <= N <= M"),
    "pattern negative": bad("--sparsity.pattern=-1:4", "--sparsity.pattern -1:4", "1 <= N <= M"),
    "pattern the wrong way round": bad("--sparsity.pattern 4:2", "--sparsity.pattern 4:2", 'did you mean "2:4"'),
    "pattern with a hyphen": bad("--sparsity.pattern 2-4", "--sparsity.pattern 2-4", 'did you mean "2:4"'),
    "pattern with a space": bad("", "sparsity.pattern", 'did you mean "2:4"', toml='sparsity.pattern = "2:4 "'),
    "pattern of words": bad("--sparsity.pattern two:four", "--sparsity.pattern", "whole numbers"),
    "pattern of a fraction": bad("--sparsity.pattern 0.5:4", "--sparsity.pattern 0.5:4", "whole numbers"),
    "pattern as a number": bad("", "sparsity.pattern = 24", "a text", toml="sparsity.pattern = 24"),
    "no pattern at all": bad("--sparsity.pattern None", "--sparsity.pattern none", "2:4", "sparsity.method.kind dense"),
    "pattern no layer can have": bad("--sparsity.pattern 3:7", "sparsity.pattern = 3:7", "no layer would become sparse", "divisible by 7"),
    "preset all, all offenders": bad("--sparsity.preset all --sparsity.pattern 2:4", "conv1: 2:4 needs in_channels divisible by 4, got 1"),
    "preset misspelled": bad("--sparsity.preset papr", "--sparsity.preset papr", "default, paper, asp, all", "did you mean 'paper'"),
    "axis misspelled": bad("--sparsity.axis inputs", "--sparsity.axis inputs", "input, flat", "did you mean 'input'"),
    # rules
    "rules beside a pattern": bad(
        "--sparsity.pattern 2:4 --sparsity.rules conv2=1:4", "--sparsity.rules", "beside sparsity.pattern", "add a rule *=N:M"
    ),
    "rules beside a pattern in a file": bad(
        "--sparsity.rules *=2:4", "--sparsity.rules", "beside sparsity.pattern; leave that out", toml='sparsity.pattern = "2:4"'
    ),
    "rule without a pattern": bad("--sparsity.pattern None --sparsity.rules conv2", "'conv2' is no rule", "GLOB=N:M"),
    "rule with a bad pattern": bad("--sparsity.pattern None --sparsity.rules conv2=4:2", "conv2=4:2", 'did you mean "2:4"'),
    "rule with dense misspelled": bad("--sparsity.pattern None --sparsity.rules *=2:4 conv2=dens", "conv2=dens", "did you mean 'dense'"),
    "rule that matches nothing": bad(
        "--sparsity.pattern None --sparsity.rules convv2=2:4", "sparsity.rules", "convv2", "did you mean 'conv2'"
    ),
    "rule without effect": bad("--sparsity.pattern None --sparsity.rules *=2:4 conv2=1:4", "sparsity.rules", "'conv2' has no effect"),
    "rule twice": bad("--sparsity.pattern None --sparsity.rules *=2:4 *=1:4", "--sparsity.rules", "twice"),
    "rule and skip for a layer": bad(
        "--sparsity.pattern None --sparsity.rules conv2=2:4 --sparsity.skip conv2", "conv2", "keeps it dense", "drop one of them"
    ),
    "rule for a layer that does not divide": bad(
        "--sparsity.pattern None --sparsity.rules conv1=2:4", "conv1: 2:4 needs in_channels divisible by 4, got 1"
    ),
    "rule for a layer of another kind": bad("--sparsity.pattern None --sparsity.rules norm1=2:4", "norm1", "BatchNorm2d"),
    "skip that matches nothing": bad("--sparsity.skip conv9", "sparsity.skip = conv9", "matches no layer", "did you mean"),
    # methods
    "method misspelled": bad("--sparsity.method.kind sr-ste", "--sparsity.method.kind sr-ste", "dense, ste, srste, asp", "'srste'"),
    "decay for ste": bad(
        "--sparsity.method.kind ste --sparsity.method.decay 0.1", "sparsity.method.decay", "has no effect on ste", "belongs to srste"
    ),
    "dense throughout": bad("--sparsity.method.begin_at 400", "--sparsity.method.begin_at 400", "before the end of the run, 400 steps"),
    "tickets that are never pruned enough": bad(
        "--sparsity.pattern 1:1 --sparsity.method.kind lottery --sparsity.method.every 100 --sparsity.method.rounds 6",
        "--sparsity.method.rounds 6",
        "the last pruning would be at 600, after the end of the run, 400 steps",
    ),
    "tickets that are never pruned enough in as many rounds as usual": bad(
        "--sparsity.pattern 1:1 --sparsity.method.kind lottery --sparsity.method.every 100",
        "sparsity.method.rounds",
        "the last pruning would be at 700, after the end of the run, 400 steps",
    ),
    "search that a dense start leaves no time for": bad(
        "--sparsity.method.begin_at 380 --sparsity.method.decay auto --sparsity.method.probe 40",
        "--sparsity.method.probe 40",
        "comes, begun at 380, after the end of the run, 400 steps",
    ),
    "ramp without an end": bad(
        "--sparsity.method.ramp_at 40", "--sparsity.method.ramp_at 40", "needs a later begin_at, where the pattern is reached"
    ),
    "ramp in the released code": bad(
        "--sparsity.method.ramp_at 4 --sparsity.method.begin_at 40 --sparsity.method.placement backward", "ramp_at 4", "placement gradient"
    ),
    "budget beside a pattern": bad(
        "--sparsity.budget 0.1 --sparsity.pattern 1:16", "--sparsity.budget 0.1", "beside sparsity.pattern", "leave these out"
    ),
    "budget beside rules": bad(
        "--sparsity.budget 0.1 --sparsity.rules *=2:4", "--sparsity.budget 0.1", "or sparsity.rules; leave these out"
    ),
    "budget of nothing": bad("--sparsity.budget 0", "--sparsity.budget 0.0: must be 0 < budget <= 1"),
    "budget above one": bad("--sparsity.pattern none --sparsity.budget 1.5", "--sparsity.budget 1.5", "0 < budget <= 1"),
    "budget that cannot be met": bad(
        "--sparsity.pattern none --sparsity.budget 0.001", "sparsity.budget = 0.001", "cannot be met", "0.0625"
    ),
    "budget of an unstructured method": bad(
        "--sparsity.pattern none --sparsity.budget 0.1 --sparsity.method.kind set", "--sparsity.budget 0.1", "no effect on set"
    ),
    "allocation without a budget": bad("--sparsity.allocation erk", "--sparsity.allocation erk", "no effect without sparsity.budget"),
    "candidate misspelled": bad(
        "--sparsity.pattern none --sparsity.budget 0.1 --sparsity.candidates 1:8 dens", "'dens'", "did you mean 'dense'"
    ),
    "prune_at for srste": bad("--sparsity.method.prune_at 3", "--sparsity.method.prune_at 3", "has no effect on srste", "belongs to asp"),
    "prune_at after the end": bad(
        "--sparsity.method.kind asp --sparsity.method.decay None --sparsity.method.prune_at 900",
        "prune_at 900",
        "after the end of the run, 400 steps",
    ),
    "rewiring that never comes": bad(
        "--sparsity.method.kind rigl --sparsity.pattern 1:1 --engine.steps 60 --schedule.warmup 5",
        "sparsity.method.every",
        "nothing would be rewired",
    ),
    "a probe that never ends": bad("--sparsity.method.decay auto", "sparsity.method.probe", "1000 steps", "about a tenth"),
    "none in small letters": bad("--sparsity.pattern none", "sparsity.pattern", 'must be N:M such as "2:4", or give sparsity.rules'),
    "prune_at negative": bad(
        "--sparsity.method.kind asp --sparsity.method.decay None --sparsity.method.prune_at -1", "prune_at -1", ">= 0"
    ),
    "decay not finite": bad("--sparsity.method.decay nan", "--sparsity.method.decay nan", "finite", "2e-4"),
    "decay that oscillates": bad("--sparsity.method.decay 20", "--sparsity.method.decay 20", "below 1 / optim.lr = 10", "swing"),
    "decay in quotes": bad(
        "", "run.toml:2 sparsity.method.decay = 2e-4", "a number", "without quotes", toml='[sparsity.method]\ndecay = "2e-4"'
    ),
    "refine misspelled": bad("--sparsity.method.refine weights", "--sparsity.method.refine weights", "weight, sign, gradient", "'weight'"),
    "refinement that backward cannot do": bad(
        "--sparsity.method.refine gradient --sparsity.method.placement backward", "sparsity.method", "learning rate"
    ),
    # optimizer and schedule
    "optimizer misspelled": bad("--optim.kind adamW", "--optim.kind adamW", "sgd, adam, adamw", "did you mean 'adam"),
    "lr negative": bad("--optim.lr=-0.1", "--optim.lr -0.1", "lr > 0"),
    "lr nan": bad("--optim.lr nan", "--optim.lr nan", "lr > 0", "finite"),
    "lr infinite": bad("--optim.lr inf", "--optim.lr inf", "finite"),
    "lr none": bad("--optim.lr None", "--optim.lr None", "a number"),
    "momentum one": bad("--optim.momentum 1", "--optim.momentum 1", "0 <= momentum < 1"),
    "momentum of nothing for adam": bad("--optim.kind adam --optim.momentum 0", "--optim.momentum 0", "has no effect on adam"),
    "betas for onecycle's sgd": bad("--optim.eps 0.1", "--optim.eps 0.1", "has no effect on sgd, which has momentum, nesterov"),
    "momentum for adam": bad("--optim.kind adam --optim.momentum 0.9", "--optim.momentum 0.9", "has no effect on adam", "belongs to sgd"),
    "betas for sgd": bad("--optim.betas 0.9 0.99", "--optim.betas", "has no effect on sgd"),
    "betas too large": bad("--optim.kind adam --optim.momentum None --optim.betas 0.9 1.5", "--optim.betas", "0 <= beta < 1"),
    "nesterov without momentum": bad("--optim.nesterov --optim.momentum 0", "--optim.nesterov true", "needs optim.momentum above 0"),
    "a fused step without a term": bad("--optim.fused --sparsity.method.kind ste --sparsity.method.decay None", "--optim.fused", "srste"),
    "a fused step on the cpu": bad("--optim.fused", "optim.fused = true", "needs a CUDA device"),
    "a fused step of spread weights": bad("--optim.fused --engine.parallel fsdp", "--optim.fused", "spread over processes"),
    "weight decay negative": bad("--optim.weight_decay=-1", "--optim.weight_decay -1", "weight_decay >= 0"),
    "schedule misspelled": bad("--schedule.kind cosin", "--schedule.kind cosin", "cosine, step, onecycle, constant", "'cosine'"),
    "warm-up longer than the run": bad("--schedule.warmup 400", "--schedule.warmup 400", "before the run does, after 400 steps"),
    "milestones for cosine": bad("--schedule.kind cosine --schedule.milestones 9", "--schedule.milestones", "belongs to step"),
    "no milestones": bad("--schedule.kind step", "schedule.milestones", "after how many steps"),
    "milestones backwards": bad("--schedule.kind step --schedule.milestones 300 200", "--schedule.milestones", "must grow"),
    "milestone after the end": bad("--schedule.kind step --schedule.milestones 900", "--schedule.milestones", "900 is not inside the run"),
    "final above the start": bad("--schedule.kind cosine --schedule.final 1", "--schedule.final 1", "not be above optim.lr = 0.1"),
    # engine
    "epochs and steps": bad("--engine.epochs 50 --engine.steps 100", "--engine.epochs 50", "both are set, and engine.steps is 100"),
    "neither epochs nor steps": bad("--engine.steps None", "engine.epochs", "neither is set"),
    "no steps": bad("--engine.steps 0", "--engine.steps 0", "steps >= 1"),
    "half a step": bad("--engine.steps 1.5", "--engine.steps 1.5: must be a whole number or none\n"),
    "a thousand with an exponent": bad("--engine.steps 1e3", "--engine.steps 1e3", "did you mean '1000'?"),
    "a thousand with a comma": bad("--engine.steps 1,000", "--engine.steps 1,000", "did you mean '1000'?"),
    "batch of nothing": bad("--engine.batch_size 0", "--engine.batch_size 0", "batch_size >= 1"),
    "batch that does not split": bad("--engine.accumulate 3", "engine.batch_size = 64", "divisible by engine.accumulate 3"),
    "accumulate nothing": bad("--engine.accumulate 0", "--engine.accumulate 0", "accumulate >= 1"),
    "clip nothing": bad("--engine.clip 0", "--engine.clip 0", "clip > 0"),
    "ema of one": bad("--engine.ema 1", "--engine.ema 1", "0 < ema < 1"),
    "ema of nothing": bad("--engine.ema 0", "--engine.ema 0", "0 < ema < 1"),
    "precision misspelled": bad("--engine.precision float16", "--engine.precision float16", "fp32, bf16, fp16"),
    "fp16 on the cpu": bad("--engine.precision fp16", "--engine.precision fp16", "CUDA", "fp32, bf16"),
    "workers negative": bad("--engine.workers=-1", "--engine.workers -1", "0 <= workers"),
    "workers without effect": bad("--engine.workers 2", "--engine.workers 2", "data.loader workers"),
    "fsdp alone": bad("--engine.parallel fsdp", "--engine.parallel fsdp", "torchrun"),
    "keep nothing": bad("--engine.keep 0", "--engine.keep 0", "keep >= 1"),
    "log never": bad("--engine.log_every 0", "--engine.log_every 0", "log_every >= 1"),
    "evaluate every half step": bad("--engine.eval_every 0.5", "--engine.eval_every 0.5", "whole"),
    "tracker misspelled": bad("--engine.track tensorbord", "--engine.track tensorbord", "tensorboard, wandb, mlflow", "'tensorboard'"),
    "histograms for nobody": bad("--engine.histogram_every 5", "--engine.histogram_every 5", "tensorboard in engine.track"),
    "seed too large": bad("--seed 4294967296", "--seed 4294967296", "0 <= seed < 4.29497e+09"),
    "seed negative": bad("--seed=-1", "--seed -1", "0 <= seed"),
    "device misspelled": bad("--device gpu", "--device gpu", "auto, cpu, cuda or cuda:N"),
    "device that is not there": bad("--device cuda:7", "device = cuda:7", "CUDA devices"),
    "label smoothing of one": bad("--task.label_smoothing 1", "--task.label_smoothing 1", "0 <= label_smoothing < 1"),
    # model and data
    "model misspelled": bad("--model.name cnnn", "--model.name cnnn", "torchvision/NAME", "did you mean 'cnn'"),
    "model that torchvision lacks": bad(
        "--model.name torchvision/resnet51 --model.width None", "model.name = torchvision/resnet51", "'torchvision/resnet50'"
    ),
    "model that timm lacks": bad(
        "--model.name timm/resnet51 --model.width None", "model.name = timm/resnet51", "did you mean 'timm/resnet"
    ),
    "model for other images": bad(
        "--model.name torchvision/resnet18 --model.width None", "torchvision/resnet18", "does not take images of 1x8x8"
    ),
    "model that does not classify": bad(
        "--model.name torchvision/googlenet --model.width None --data.name cifar10 --data.root {tmp}", "does not give one score"
    ),
    "width for torchvision": bad(
        "--model.name torchvision/resnet18",
        "model.width = 16",
        "has no effect on torchvision/resnet18",
        "cifar/resnet18; the recipe sets it, so give --model.width none\n",
    ),
    "width for torchvision that was typed": bad(
        "--model.name torchvision/resnet18 --model.width 16", "--model.width 16: has no effect on torchvision/resnet18", "cifar/resnet18\n"
    ),
    "workers of a recipe": bad(
        "--data.name cifar10 --data.root {tmp} --data.size none --data.loader resident",
        "engine.workers = 16",
        "the recipe sets it, so give --engine.workers 0\n",
        recipe="imagenet/resnet50",
    ),
    "dropout of one": bad("--model.dropout 1", "--model.dropout 1", "0 <= dropout < 1"),
    "pretrained cnn": bad("--model.pretrained", "--model.pretrained true", "no published weights"),
    "data misspelled": bad("--data.name cifar-10", "--data.name cifar-10", "digits, fashion, cifar10, folder", "'cifar10'"),
    "data without its folder": bad("", "data.root = none", "--data.root PATH", recipe="cifar10/resnet20"),
    "data folder missing": bad("--data.root {tmp}/nowhere", "--data.root", "no such folder", recipe="cifar10/resnet20"),
    "data folder empty": bad("--data.root {tmp}", "--data.root", "train/CLASS/", recipe="imagenet/resnet50"),
    "data folder for digits": bad("--data.root {tmp}", "--data.root", "has no effect on digits"),
    "size for digits": bad("--data.size 32", "--data.size 32", "has no effect on digits"),
    "skip for digits": bad("--data.corrupt skip", "--data.corrupt skip", "has no effect on digits"),
    "out is a file": bad("--out {tmp}/run.toml", "--out", "is a file", toml="seed = 1"),
    "out below a file": bad("--out {tmp}/run.toml/deeper", "--out", "cannot be written", toml="seed = 1"),
    # files
    "file missing": bad("--config {tmp}/nowhere.toml", "--config", "no such file"),
    "file of another kind": bad("--config {tmp}/run.yaml", "only TOML", "'run.toml'"),
    "unknown key in a file": bad("", "run.toml:2 optim.lrr = 1", "no such key", "did you mean 'optim.lr'", toml="[optim]\nlrr = 1"),
    "unknown group in a file": bad("", "run.toml", "optimizer", "no such key", toml="[optimizer]\nlr = 1"),
    "key twice in a file": bad("", "run.toml", "twice", toml="seed = 1\nseed = 2"),
    "yaml in a file": bad("", "run.toml", "TOML writes key = value", toml="optim:\n  lr: 1"),
    "no for false": bad("", "run.toml:1 engine.compile = no", "true or false", "did you mean 'false'", toml='engine.compile = "no"'),
    "a group that is a number": bad("", "optim = 3", "a group of keys", toml="optim = 3"),
    "file with a byte-order mark": bad("", "byte-order mark", toml=b"\xef\xbb\xbfseed = 1"),
    "file that is not text": bad("", "not UTF-8", toml=b"\xff\xfe\x00"),
    "file nested deeply": bad("", "nested too deeply", toml="seed = " + "[" * 5000 + "]" * 5000),
    "lr as null": bad("", "run.toml", "not TOML", toml="optim.lr = null"),
    "file against its options": bad("--engine.epochs 2", "--engine.epochs 2", "both are set", toml="engine.steps = 5"),
}


def arguments(row: Bad, folder: Path) -> list[str]:
    if row.toml is not None:
        (folder / "run.toml").write_bytes(row.toml if isinstance(row.toml, bytes) else row.toml.encode())
    named = [] if row.toml is None else ["--config", str(folder / "run.toml")]
    out = [] if "--out" in row.options or "--resume" in row.options else ["--out", str(folder / "run")]
    return ["train", row.recipe, *named, *row.options.replace("{tmp}", str(folder)).split(), *out]


@pytest.fixture
def walled_up(monkeypatch):
    """Fails the test if data or a run folder is opened."""

    def opened(*args, **kwargs):
        raise AssertionError("a bad configuration got as far as data")

    monkeypatch.setattr(nofm.data.arrays, "read_arrays", opened)
    monkeypatch.setattr(nofm.engine.train, "make_loader", opened)
    monkeypatch.setattr(nofm.engine.train, "RunFolder", opened)


def test_the_table_is_long_enough():
    assert len(TABLE) >= 60


@pytest.mark.parametrize("name", TABLE)
def test_a_bad_configuration_is_refused_and_explained(name, tmp_path, capsys, walled_up):
    row = TABLE[name]
    code = main(arguments(row, tmp_path))
    message = capsys.readouterr().err
    assert code == 2, message
    for text in row.says:
        assert text in message
    assert "Traceback" not in message
    assert not (tmp_path / "run").exists()


def test_the_wall_stands_in_the_way_of_a_good_configuration(tmp_path, walled_up):
    with pytest.raises(AssertionError, match="got as far as data"):
        main(["train", "digits", "--out", str(tmp_path / "run")])


@pytest.mark.parametrize("name", ["lr nan", "rule that matches nothing", "unknown key in a file"])
def test_a_real_process_exits_with_2_and_one_message(name, tmp_path):
    row = TABLE[name]
    result = subprocess.run([sys.executable, "-m", "nofm", *arguments(row, tmp_path)], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("nofm: ")
    assert "Traceback" not in result.stderr
    for text in row.says:
        assert text in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_a_bad_configuration_ends_a_real_process_within_three_seconds(name, tmp_path):
    """Of processor time, which is what a user waits for on a machine with nothing else to do, and grows less on a busy one.

    A model of torchvision or timm can only be asked about when that package is imported, which alone takes up to three seconds more.
    """
    process = subprocess.Popen([sys.executable, "-m", "nofm", *arguments(TABLE[name], tmp_path)], stderr=subprocess.PIPE, text=True)
    message = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
    assert process.returncode == 2
    assert "Traceback" not in message
    assert used.ru_utime + used.ru_stime < (6 if re.search("model.name (torchvision|timm)/", TABLE[name].options) else 3)


def test_debug_shows_the_traceback(tmp_path):
    command = [sys.executable, "-m", "nofm", "train", "digits", "--optim.lr", "nan", "--debug", "--out", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_every_problem_is_told_at_once(tmp_path, capsys):
    main(["train", "digits", "--optim.lr", "nan", "--engine.keep", "0", "--out", str(tmp_path / "run")])
    message = capsys.readouterr().err
    assert "--optim.lr nan" in message
    assert "--engine.keep 0" in message
