"""`nofm evaluate`: on a run's own test set it finds, to the last bit, what the end of the run says; on others it needs no training data."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from short_runs import events
from small_runs import SMALL, changed
from task_runs import RUNS, WORDS, write_objects

from nofm.cli.main import main
from nofm.data.arrays import CIFAR_CLASSES
from nofm.data.flow_files import write_flo
from nofm.engine import evaluate as evaluating
from nofm.engine.config import DataConfig
from nofm.engine.signals import StopRequest
from nofm.engine.train import train


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Two seeds of a run with an average, and one that was stopped."""
    out, threads = tmp_path_factory.mktemp("digits"), torch.get_num_threads()
    for seed in (1, 2):
        train(changed(SMALL, engine={"ema": 0.5}, seed=seed), out / f"seed-{seed}")
    shutil.copytree(out / "seed-1", out / "stopped")
    lines = (out / "stopped" / "events.jsonl").read_text().splitlines(keepends=True)
    (out / "stopped" / "events.jsonl").write_text("".join(lines[:-1]))
    torch.set_num_threads(threads)
    return out


@pytest.fixture
def copy_of(finished, digits, tmp_path):
    """A run folder without what only going on needs, to write into."""

    def copied(name: str) -> Path:
        source = digits / "seed-1" if name == "digits" else finished[name]
        return Path(shutil.copytree(source, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "masks")))

    return copied


def found(run: Path, name: str = "own") -> dict:
    return json.loads((run / "evaluations" / f"{name}.json").read_text())


def ended(run: Path) -> dict[str, float]:
    return [e for e in events(run) if e["event"] == "end"][-1]["metrics"]


def refusal(capsys, *args: object) -> str:
    assert main(["evaluate", *map(str, args)]) == 2
    return capsys.readouterr().err


# ---- the same numbers ----


@pytest.mark.parametrize("name", ["digits", *RUNS])
def test_its_own_test_set_gives_the_numbers_of_its_end(name, copy_of, capsys):
    run = copy_of(name)
    assert main(["evaluate", str(run), "--name", "own"]) == 0
    wanted = {metric: value for metric, value in ended(run).items() if not metric.startswith("skipped")}
    facts = found(run)
    assert facts["metrics"] == wanted
    averaged = (run / "model-ema.safetensors").is_file()
    assert facts["headline"].startswith("ema_") == averaged
    assert facts["headline"] in wanted
    assert {row["file"] for row in facts["weights"].values()} == {p.name for p in run.glob("model*.safetensors")}
    for row in facts["weights"].values():
        assert row["sha256"] == hashlib.sha256((run / row["file"]).read_bytes()).hexdigest()
    there = {path.name: path.read_bytes() for path in (run / "samples").glob("*")}
    assert {path.name: path.read_bytes() for path in (run / "evaluations" / "own").glob("*")} == there
    assert facts["samples"] == sorted(there)
    assert facts["versions"]["torch"] == torch.__version__
    assert f"{facts['headline']} " in capsys.readouterr().out


def test_weights_can_be_chosen(copy_of, tmp_path, monkeypatch):
    run, other = copy_of("digits"), tmp_path / "other.safetensors"
    averaged = {name: value for name, value in ended(run).items() if name.startswith("ema_")}
    assert main(["evaluate", str(run), "--name", "average", "--weights", "model-ema.safetensors"]) == 0
    assert found(run, "average")["metrics"] == averaged
    monkeypatch.chdir(run.parent)
    assert main(["evaluate", run.name, "--name", "whole-path", "--weights", str(run / "model-ema.safetensors")]) == 0
    assert found(run, "whole-path")["metrics"] == averaged
    shutil.copy(run / "model-ema.safetensors", other)
    assert main(["evaluate", str(run), "--name", "other", f"--weights={other}"]) == 0
    assert found(run, "other")["metrics"] == {name.removeprefix("ema_"): value for name, value in averaged.items()}


# ---- other data, without what was trained on ----


def test_translation_takes_the_vocabulary_of_the_run(copy_of, tmp_path):
    run, root, chance = copy_of("translation"), tmp_path / "text", random.Random(3)
    root.mkdir()
    english = [" ".join(chance.choices(list(WORDS), k=5)) for _ in range(3)]
    for language, lines in (("en", english), ("de", [" ".join(WORDS[word] for word in line.split()) for line in english])):
        (root / f"test_2017_flickr.{language}").write_text("".join(f"{line}\n" for line in lines))
    command = ["evaluate", str(run), "--name", "flickr17", "--data.root", str(root), "--data.test", "test_2017_flickr", "--task.beams", "1"]
    assert main(command) == 0
    shown = [json.loads(line)["source"] for line in (run / "evaluations" / "flickr17" / "translations.jsonl").read_text().splitlines()]
    assert shown == english
    assert found(run, "flickr17")["settings"]["task.beams"] == 1
    (run / "vocabulary.json").unlink()
    assert main([*command, "--again"]) == 2


def write_scenes(root: Path) -> Path:
    """Two of Middlebury's scenes, of sizes of their own."""
    rng = np.random.default_rng(0)
    for name, shape in (("Dimetrodon", (129, 140)), ("Venus", (100, 151))):
        (root / name).mkdir(parents=True)
        for frame in ("frame10", "frame11"):
            Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)).save(root / name / f"{frame}.png")
        write_flo(root / name / "flow10.flo", rng.normal(size=(*shape, 2)).astype(np.float32))
    return root


@pytest.mark.parametrize("name", ["flow", "flow from files"])
def test_flow_is_measured_on_whole_frames_of_another_layout(name, copy_of, tmp_path, capsys):
    run, root = copy_of(name), write_scenes(tmp_path / "middlebury")
    command = ["evaluate", str(run), "--name", "middlebury", "--data.name", "middlebury", "--data.root", str(root)]
    assert main(command) == 0
    facts = found(run, "middlebury")
    assert facts["settings"]["data.test"] == "all"
    shown = [np.load(path) for path in sorted((run / "evaluations" / "middlebury").iterdir())]
    assert [arrays["frame"].shape[:2] for arrays in shown] == [(129, 140), (100, 151)]
    error = np.concatenate([np.hypot(*np.moveaxis(a["prediction"] - a["truth"], -1, 0)).ravel() for a in shown])
    assert error.mean() == pytest.approx(facts["metrics"][facts["headline"]], rel=1e-5)
    said = refusal(capsys, run, "--name", "part", *command[4:], "--data.test", "val")
    assert "has no pair for the val part of middlebury" in said, "every fifth scene is what its layout holds out"


def test_a_detector_is_measured_on_the_test_split_if_its_categories_are_the_same(copy_of, tmp_path, capsys):
    run, root = copy_of("detection"), write_objects(tmp_path / "objects")
    (root / "instances_val.json").rename(root / "instances_test.json")
    (root / "val").rename(root / "test")
    (root / "instances_train.json").unlink()
    command = ["evaluate", str(run), "--name", "test", "--data.root", str(root), "--data.test", "test"]
    assert main(command) == 0
    assert found(run, "test")["metrics"] == ended(run), "they are the images of val"
    file = root / "instances_test.json"
    file.write_text(file.read_text().replace('"disc"', '"ring"'))
    assert "its categories are not the network's; the first that differs is 'ring', not 'disc'" in refusal(capsys, *command[1:], "--again")
    (run / "classes.json").unlink()
    assert "classes.json: is missing, which names the network's categories" in refusal(capsys, *command[1:], "--again")


def test_classes_of_a_folder_are_known_by_name(tmp_path, capsys):
    rng, data, other, run = np.random.default_rng(0), tmp_path / "data", tmp_path / "other", tmp_path / "run"
    for number in range(6):
        for part in ("train", "val"):
            folder = data / part / ("ant", "bee", "cat")[number // 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    folder = DataConfig(name="folder", root=str(data), loader="workers", size=16)
    lengths = {"batch_size": 2, "steps": 2, "eval_every": 2, "checkpoint_every": 2}
    train(changed(SMALL, data=vars(folder), engine=lengths, schedule={"warmup": 1}), run)
    shutil.rmtree(data / "train")
    assert main(["evaluate", str(run), "--name", "own"]) == 0
    assert found(run)["metrics"] == ended(run)
    losses = {}
    for name in ("ant", "bee", "cat"):
        shutil.copytree(data / "val" / name, other / name / "val" / name)
        assert main(["evaluate", str(run), "--name", name, "--data.root", str(other / name)]) == 0
        losses[name] = found(run, name)["metrics"]["loss"]
    assert sum(losses.values()) / 3 == pytest.approx(ended(run)["loss"]), "alone, each has the number that it was trained with"
    (other / "bee" / "val" / "bee").rename(other / "bee" / "val" / "dog")
    assert "the network has no class 'dog'; it has ant, bee, cat" in refusal(capsys, run, "--name", "dog", "--data.root", other / "bee")
    (run / "classes.json").unlink()
    assert "classes.json: is missing, which names the network's classes" in refusal(capsys, run, "--name", "x")
    (data / "train").mkdir()
    for name in ("ant", "bee", "cat"):
        (data / "train" / name).mkdir()
    assert main(["evaluate", str(run), "--name", "x"]) == 0, "a run from before they were written down, beside what it was trained on"


def test_a_network_for_cifar_looks_at_a_folder_as_at_its_own_images(tmp_path, capsys):
    rng, data, other, run = np.random.default_rng(0), tmp_path / "data", tmp_path / "other", tmp_path / "run"
    data.mkdir()
    for file in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        records = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (data / f"{file}.bin").write_bytes(records.tobytes())
    for i, record in enumerate(records):  # of the test batch
        folder = other / "val" / CIFAR_CLASSES[record[0]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(record[1:].reshape(3, 32, 32).transpose(1, 2, 0)).save(folder / f"{i}.png")
    lengths = {"batch_size": 8, "steps": 2, "eval_every": 2, "checkpoint_every": 2, "ema": 0.5}
    train(changed(SMALL, data={"name": "cifar10", "root": str(data)}, engine=lengths, schedule={"warmup": 1}), run)
    command = [run, "--name", "folder", "--data.name", "folder", "--data.root", other]
    assert main(["evaluate", *map(str, command)]) == 0
    assert found(run, "folder")["metrics"] == pytest.approx(ended(run), rel=1e-5)
    (other / "val" / "cat" / "broken.png").parent.mkdir(exist_ok=True)
    (other / "val" / "cat" / "broken.png").write_bytes(b"no image")
    assert main(["evaluate", *map(str, command), "--again", "--data.corrupt", "skip"]) == 0
    assert found(run, "folder")["metrics"]["skipped_images"] == 1, "though two sets of weights have met it"
    assert "data.size = 16: has no effect on a network for cifar10" in refusal(capsys, *command, "--data.size", 16)
    said = refusal(capsys, run, "--name", "x", "--data.name", "digits")
    assert "data.name = digits: this network was trained on cifar10, and can be measured on cifar10, or folder" in said


# ---- several runs, again ----


def test_several_runs_and_the_same_command_again(digits, tmp_path, capsys):
    root = Path(shutil.copytree(digits, tmp_path / "runs"))
    command = ["evaluate", str(root), "--name", "own", "--device", "cpu"]
    assert main(command) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{root / 'stopped'}: is not finished and is left out; nofm resume {root / 'stopped'} goes on with it"
    assert [line.split(":")[0] for line in told[1:3]] == [f"[{i}/2] {root / f'seed-{i}'}" for i in (1, 2)]
    assert told[3].startswith("written to evaluations/own.json of each run")
    (root / "seed-2" / "evaluations" / "own.json").unlink()
    before = (root / "seed-1" / "evaluations" / "own.json").read_bytes()
    assert main(command) == 0
    assert ["measured before" in line for line in capsys.readouterr().out.splitlines()[1:3]] == [True, False]
    assert (root / "seed-1" / "evaluations" / "own.json").read_bytes() == before
    assert main([*command, "--again"]) == 0
    assert "measured before" not in capsys.readouterr().out
    assert main(["report", str(root / "seed-1"), str(root / "seed-2"), "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [words in line for words, line in zip(("own: accuracy,", "moving", "average %"), shown, strict=False)] == [True] * 3
    assert (root / "seed-1" / "evaluations" / "own.json").read_bytes() != before


def test_another_evaluation_of_the_same_name_is_not_taken_for_it(copy_of, capsys):
    run = copy_of("digits")
    command = ["evaluate", str(run), "--name", "own"]
    assert main(command) == 0
    said = refusal(capsys, *command[1:], "--engine.precision", "bf16")
    assert "own.json: is another evaluation, precision was fp32 and is bf16. Give another --name, or --again" in said
    weights = load_file(run / "model.safetensors")
    weights[next(iter(weights))][0] += 1
    save_file(weights, run / "model.safetensors", {"format": "pt"})
    assert "weights plain sha256 was " in refusal(capsys, *command[1:])
    whole = found(run)
    for broken in ({}, {**whole, "metrics": {}}, {**whole, "metrics": None}):
        (run / "evaluations" / "own.json").write_text(json.dumps(broken))
        assert "own.json: does not hold an evaluation" in refusal(capsys, *command[1:])


def test_a_folder_is_the_same_however_it_is_typed(copy_of, tmp_path, monkeypatch, capsys):
    run, root = copy_of("translation"), tmp_path / "text"
    root.mkdir()
    for language, word in (("en", "red"), ("de", "rot")):
        (root / f"test_2017_flickr.{language}").write_text(f"{word}\n")
    shutil.copytree(root, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", str(run), "--name", "own", "--data.test", "test_2017_flickr", "--task.beams", "1", "--data.root"]
    assert main([*command, "text"]) == 0
    for same in ("./text/", str(root), "other/../text"):
        assert main([*command, same]) == 0
        assert "measured before" in capsys.readouterr().out
    assert "own.json: is another evaluation, settings data.root was text and is other." in refusal(capsys, *command[1:], "other")
    assert found(run)["settings"]["data.root"] == "text", "as it was typed"
    shutil.rmtree(root)
    assert "data.root was text and is other." in refusal(capsys, *command[1:], "other"), "one of the two is not there any more"


def test_a_stop_leaves_nothing_half_done(copy_of):
    run = copy_of("digits")
    config = changed(SMALL, engine={"ema": 0.5})
    plan = evaluating.planned(run, config, config, "own")
    stop = StopRequest()
    with pytest.raises(evaluating.Interrupted, match=r"stopped by SIGTERM; .* go on with the same command"):
        evaluating.evaluate(plan, stop=stop, told=lambda batches: stop(15, None))
    assert not (run / "evaluations").exists()


# ---- what cannot be measured ----


def without(weights: dict[str, torch.Tensor], key: str) -> None:
    del weights[key]


def other_shape(weights: dict[str, torch.Tensor], key: str) -> None:
    weights[key] = weights[key][:1].clone()


def another(weights: dict[str, torch.Tensor], key: str) -> None:
    weights[f"{key}2"] = weights[key].clone()


@pytest.mark.parametrize(
    ("break_", "said"),
    [(without, "missing: {key})"), (other_shape, "of another shape: {key} (1,"), (another, "unexpected: {key}2)")],
    ids=["missing", "shape", "unexpected"],
)
def test_weights_of_another_network_are_refused_by_name(break_, said, copy_of, capsys):
    run = copy_of("digits")
    weights = load_file(run / "model.safetensors")
    key = next(name for name in weights if name.endswith("weight"))
    break_(weights, key)
    save_file(weights, run / "model.safetensors", {"format": "pt"})
    told = refusal(capsys, run, "--name", "own")
    assert f"{run / 'model.safetensors'}: these are not the weights" in told
    assert said.format(key=key) in told
    (run / "model.safetensors").write_bytes(b"no weights")
    assert "model.safetensors: cannot be read as safetensors" in refusal(capsys, run, "--name", "own")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "evaluate: --name is missing: nofm evaluate RUN [RUN ...] --name NAME"),
        (("--name", "../x"), "--name '../x': must be letters, digits"),
        (("--name", "x", "--optim.lr", "0.1"), "--optim.lr: cannot be changed for an evaluation of classification"),
        (("--name", "x", "--data.flip"), "--data.flip: cannot be changed for an evaluation of classification"),
        (("--name", "x", "--data.root", "x"), "--data.root x: has no effect on digits"),
        (("--name", "x", "--data.rot", "x"), "--data.rot: no such option; did you mean '--data.root'?"),
        (("--name", "x", "--engine.workers", "2"), "--engine.workers 2: has no effect on data that are kept on the device"),
        (("--name", "x", "--engine.precision", "fp16"), "engine.precision = fp16: needs a CUDA device"),
        (("--name", "x", "--weights"), "--weights: needs a value"),
        (("--name", "x", "--weights", "best.safetensors"), "it has model-ema.safetensors, model.safetensors (--weights best.safetensors)"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, tuple) else "",
)
def test_what_cannot_be_asked_for_is_refused(args, said, digits, capsys):
    assert said in refusal(capsys, digits / "seed-1", *args)
    assert not (digits / "seed-1" / "evaluations").exists()


def test_runs_that_are_not_finished_or_not_there(digits, tmp_path, capsys):
    assert f"{digits / 'stopped'}: is not finished; nofm resume" in refusal(capsys, digits / "stopped", "--name", "x")
    assert "no run folder (it has no run.json)" in refusal(capsys, tmp_path / "nothing", "--name", "x")
    assert "give at least one run folder" in refusal(capsys, "--name", "x")


def test_the_name_of_a_folder_is_no_markup(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run = Path(shutil.copytree(digits / "seed-1", tmp_path / "lr[/b]=1"))
    assert main(["evaluate", str(run), "--name", "own"]) == 0


def test_a_terminal_has_room_for_its_lines_and_a_program_gets_them_whole(digits, tmp_path, monkeypatch, capsys):
    shutil.copytree(digits / "seed-1", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", "run", "--name", "own"]
    assert main([*command, "--again"]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in whole] == [
        "[1/1] run",
        "written to evaluations/own.json of run; nofm report and nofm study --table show it",
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 0
    lines = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().out).splitlines()
    assert any(line.startswith("  ") for line in lines)
    assert max(map(len, lines)) <= 80


def test_flow_has_two_parts(finished, capsys):
    assert "--data.test test: must be val for stamps" in refusal(capsys, finished["flow"], "--name", "x", "--data.test", "test")
    said = refusal(capsys, finished["flow from files"], "--name", "x", "--data.test", "test")
    assert "--data.test test: must be val, what is usually held out, or all" in said
