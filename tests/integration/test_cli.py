"""The command line as its user meets it: help before torch, exit codes, plain lines when piped, and the commands on a real run."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nofm.cli.folders import begun
from nofm.cli.main import COMMANDS, main
from nofm.recipes import RECIPES

SHORT = [
    "train", "digits", "--engine.steps", "12", "--engine.log_every", "4", "--engine.eval_every", "6", "--engine.threads", "1",
    "--schedule.warmup", "3", "--model.width", "16", "--engine.checkpoint_every", "6",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    assert main([*SHORT, "--out", str(out)]) == 0
    return out


HELP = [
    ["--help"],
    ["train", "--help"],
    ["train", "digits", "--help"],
    ["resume", "--help"],
    ["study", "--help"],
    ["recipes"],
    ["report", "--help"],
    ["evaluate", "--help"],
    ["cost", "--help"],
    ["bench", "--help"],
    ["--version"],
]


@pytest.mark.parametrize("args", HELP, ids=" ".join)
def test_help_comes_without_torch(args):
    code = f"import sys; from nofm.cli.main import main; code = main({args!r}); assert 'torch' not in sys.modules; sys.exit(code)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_a_long_text_of_the_help_is_one_paragraph(capsys, monkeypatch):
    """Lines break where the terminal's do, and not where the source's do."""
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["train", "digits", "--help"]) == 0
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    first = lines.index(next(line for line in lines if line.startswith("classification: cnn")))
    text = lines[first : next(at for at in range(first, len(lines)) if "(default: cnn)" in lines[at]) + 1]
    room = 90 - len("│       │ ")
    assert all(len(line) + 1 + len(after.split()[0]) > room for line, after in itertools.pairwise(text)), text


def test_help_names_every_command_and_recipe(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)


def test_help_of_a_recipe_shows_its_values_and_the_stable_words(capsys):
    assert main(["train", "digits", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("--out", "--resume", "--seed", "--device", "--data.root", "--sparsity.pattern", "--sparsity.method.decay", "--optim.lr"):
        assert word in shown
    assert "1:16" in shown


def test_without_a_command_the_help_comes_with_code_2(capsys):
    assert main([]) == 2
    assert "usage: nofm COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_recipes_and_options(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("cifar10/resnet20", "sparsity.pattern", "analyse"):
        assert word in script
    assert "'resume': {" in script
    assert "'evaluate': {" in script


def test_recipes_by_glob(capsys):
    assert main(["recipes", "imagenet/*"]) == 0
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"imagenet/resnet18", "imagenet/resnet50"} <= set(found)
    assert all(name.startswith("imagenet/") for name in found)
    assert main(["recipes", "imagnet/*"]) == 2
    assert "matches no recipe" in capsys.readouterr().err


def test_options_go_before_the_file_and_the_file_before_the_recipe(tmp_path):
    (tmp_path / "run.toml").write_text("seed = 5\noptim.lr = 0.03\n[engine]\nsteps = 9\n")
    out = tmp_path / "run"
    assert (
        main([*SHORT[:2], "--config", str(tmp_path / "run.toml"), "--engine.steps", "2", "--schedule.warmup", "1", "--out", str(out)]) == 0
    )
    config = json.loads((out / "run.json").read_text())["config"]
    assert (config["seed"], config["optim"]["lr"], config["engine"]["steps"], config["model"]["width"]) == (5, 0.03, 2, 16)


def test_flags_are_read_in_every_spelling(tmp_path):
    from nofm.cli.options import parse
    from nofm.recipes import find

    base = find("digits")
    for args, value in (
        (["--engine.ema", "0.5", "--engine.channels_last"], True),
        (["--engine.channels-last", "true"], True),
        (["--engine.channels_last=false"], False),
        (["--engine.no_channels_last"], False),
    ):
        config, _, origins = parse("digits", base, args)
        assert config.engine.channels_last is value
        assert origins
    assert parse("digits", base, ["--optim.betas", "0.8", "0.9"])[0].optim.betas == (0.8, 0.9)
    assert parse("digits", base, ["--sparsity.skip"])[0].sparsity.skip == ()


def test_piped_output_is_plain_lines(tmp_path, capsys):
    assert main([*SHORT, "--out", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert any(line.startswith("step 4 ") and "loss" in line and "SAD" in line and "images/s" in line for line in lines)
    assert any("eval" in line and "accuracy" in line for line in lines)
    assert lines[-2].startswith("done in")
    assert lines[-1].endswith(f"nofm report {tmp_path / 'run'}")
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_terminal_gets_a_progress_bar(tmp_path):
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "nofm", *SHORT, "--out", str(tmp_path / "run")], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
    assert process.wait() == 0, shown.decode()
    for word in (b"12/12", b"loss", b"accuracy", b"SAD", b"images/s", b"\x1b["):
        assert word in shown


def test_check_tells_a_sparse_file_from_a_dense_one(run, tmp_path, capsys):
    import torch
    from safetensors.torch import save_file

    assert main(["check", str(run / "model.safetensors")]) == 0
    assert "1:16" in capsys.readouterr().out
    save_file({"w": torch.ones(4, 4)}, tmp_path / "dense.safetensors")
    assert main(["check", str(tmp_path / "dense.safetensors"), "--pattern", "2:4"]) == 1
    for command in ("check", "export"):
        assert main([command, str(tmp_path / "dense.safetensor")]) == 2
        said = f"{tmp_path}/dense.safetensor: no such file; give a file of weights or a run folder; did you mean"
        assert capsys.readouterr().err == f"nofm: {said} '{tmp_path}/dense.safetensors'?\n"


def test_analyse_gives_sad_between_any_two_saved_steps(run, capsys):
    from safetensors.torch import load_file

    import nofm

    before, after = (load_file(run / "masks" / f"step-{step:08d}.safetensors") for step in (6, 12))
    shapes = {"conv2": (16, 16, 3, 3), "conv3": (32, 16, 3, 3)}
    expected = {
        name: int((nofm.masks.unpack(before[name], torch_size(s)) != nofm.masks.unpack(after[name], torch_size(s))).sum())
        for name, s in shapes.items()
    }
    assert main(["analyse", str(run), "--steps", "6", "12"]) == 0
    rows = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert {name: int(rows[name].replace(",", "")) for name in shapes} == expected
    assert int(rows["all"].replace(",", "")) == sum(expected.values())
    assert main(["analyse", str(run)]) == 0
    assert "between step 0 and step 12" in capsys.readouterr().out
    assert main(["analyse", str(run), "--steps", "6", "7"]) == 2
    assert "there are 0, 6, 12" in capsys.readouterr().err


def torch_size(shape):
    import torch

    return torch.Size(shape)


def test_cost_of_the_papers_network(capsys):
    assert main(["cost", "torchvision/resnet50", "--pattern", "2:4", "--preset", "paper"]) == 0
    shown = capsys.readouterr().out
    assert "4.089" in shown
    assert "13.781" in shown  # the paper's 13.8 M
    assert main(["cost", "resnet50"]) == 2
    assert "did you mean 'torchvision/resnet50'" in capsys.readouterr().err
    assert main(["cost", "digits"]) == 2
    assert "digits is a recipe, and its network is cnn" in capsys.readouterr().err
    assert main(["cost", "cnn", "--input", "1", "8"]) == 2


def test_bench_of_a_small_network(capsys):
    before = torch.get_num_threads()
    try:
        assert main(["bench", "cnn", "--pattern", "1:16", "--input", "1", "8", "8", "--batch", "32", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(before)
    shown = capsys.readouterr().out
    assert "conv2" in shown
    assert "Medians of 15 rounds in turns; range: the lowest and the highest of a round." in shown
    assert "packed" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["bench", "cnn", "--pattern", "1:16", "--batch", "0"]) == 2
    assert "--batch and --threads: must be above 0" in capsys.readouterr().err
    assert main(["bench", "torchvision/resnet18", "--pattern", "1:16", "--input", "1", "32", "32"]) == 2
    assert "nofm: --input 1 32 32: torchvision/resnet18 cannot compute it:" in capsys.readouterr().err
    assert main(["bench", "digits", "--pattern", "1:16"]) == 2
    assert "digits is a recipe, and its network is cnn" in capsys.readouterr().err


def test_bench_of_a_run_is_of_its_own_weights(run, tmp_path, capsys, monkeypatch):
    """Its zeros lie where training has left them, and its images have the sizes of its data."""
    measured = []
    monkeypatch.setattr("nofm.deploy.bench", lambda model, example, compiled: measured.append((model, example)) or "measured")
    assert main(["bench", str(run), "--batch", "3"]) == 0
    ((model, example),) = measured
    assert tuple(example.shape) == (3, 1, 8, 8)
    assert not model.training
    exported = load_file(run / "model.safetensors")
    assert exported.keys() == model.state_dict().keys()
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
    monkeypatch.undo()
    assert main(["bench", str(run), "--batch", "32"]) == 0
    shown = capsys.readouterr().out
    assert "conv2" in shown
    assert "Medians of 15 rounds in turns" in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["RUN", "--pattern", "2:4"], "--pattern and --preset: RUN is a run, whose weights have their zeros; leave them out"),
        (["RUN", "--input", "3", "8", "8"], "--input 3 8 8: RUN cannot compute it:"),
        (["cnn"], "--pattern is missing: nofm bench cnn --pattern 1:16"),
        (["nosuch"], "'nosuch' is no model, nor is there a run folder of that name; write torchvision/NAME"),
        (["EMPTY"], "EMPTY: no run folder (it has no run.json)"),
        (["ABOVE"], "ABOVE: no run folder (it has no run.json); give a run that is in it, such as UNFINISHED"),
        (["UNFINISHED"], "UNFINISHED/model.safetensors: is not there; has the run ended? Go on with it by nofm resume UNFINISHED"),
        (["OTHER"], "OTHER: is a run of translation; only the networks of classification can be run by themselves yet"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bench_says_what_it_cannot_measure(run, tmp_path, capsys, args, said):
    places = {"RUN": str(run), **{name: str(tmp_path / name) for name in ("EMPTY", "OTHER", "ABOVE")}}
    places["UNFINISHED"] = str(tmp_path / "ABOVE" / "run")
    for place in list(places.values())[1:]:
        Path(place).mkdir()
    facts = json.loads((run / "run.json").read_text())
    Path(places["UNFINISHED"], "run.json").write_text(json.dumps(facts))
    facts["config"]["task"]["kind"] = "translation"
    (tmp_path / "OTHER" / "run.json").write_text(json.dumps(facts))
    assert main(["bench", *(places.get(arg, arg) for arg in args)]) == 2
    for name, place in places.items():
        said = re.sub(rf"\b{name}\b", place, said)
    assert said in capsys.readouterr().err


def test_report_of_a_run(run, tmp_path, capsys):
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert "digits" in (tmp_path / "page.html").read_text()
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no run folder" in capsys.readouterr().err


def test_lines_show_a_resumed_run():
    from nofm.cli.progress import Lines

    stream = io.StringIO()
    Lines(Path("runs/x"), stream).log({"event": "start", "step": 40, "resumed_from": 40})
    assert stream.getvalue() == "run runs/x, resumed from step 40\n"


def test_a_report_says_where_it_is_and_what_came_out(run, tmp_path, capsys, monkeypatch):
    import shutil

    one, two = tmp_path / "all" / "one", tmp_path / "all" / "deep" / "two"
    shutil.copytree(run, one)
    shutil.copytree(run, two)
    info = json.loads((two / "run.json").read_text())
    (two / "run.json").write_text(json.dumps(info | {"seed": 1, "config": info["config"] | {"seed": 1}}))
    names = ("report.html", "report.csv", "report-curves.csv", "report.json")

    assert main(["report", str(one)]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if "report" in line] == [str(one / name) for name in names]
    assert all((one / name).is_file() for name in names)
    accuracy = [json.loads(line) for line in (one / "events.jsonl").read_text().splitlines()][-1]["metrics"]["accuracy"]
    *_, header, row = shown.splitlines()[:4]
    assert header.split() == ["seeds", "accuracy", "%", "layers", "in", "all", "layers", "(SAD)"]
    assert row.split()[:6] == ["digits", "1", f"{accuracy:.2f}", "6.2", "%", "12.1"]

    monkeypatch.chdir(tmp_path)
    assert main(["report", str(one), str(two), "--picture"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-5:] == [f"all/{name}" for name in (*names, "report.png")]
    assert shown.splitlines()[3].split()[:3] == ["digits", "2", f"{accuracy:.2f}"]
    assert (tmp_path / "all" / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main(["report", *map(str, sorted((tmp_path / "all").iterdir()))]) == 0  # all/*, with the report of before in it


def test_help_of_report_names_its_argument(capsys):
    assert main(["report", "--help"]) == 0
    assert "nofm report [-h] RUN [RUN ...] [--out FILE]" in " ".join(capsys.readouterr().out.split())
    assert main(["report"]) == 2


def test_check_of_a_run_takes_its_result_and_of_a_checkpoint_says_where_that_is(run, tmp_path, capsys):
    assert main(["check", str(run)]) == 0
    assert "2 of 4 weights are N:M" in capsys.readouterr().out
    saved = run / "checkpoints" / "step-00000012"
    for path in (saved.parent, saved, saved / "tensors.safetensors"):
        assert main(["check", str(path)]) == 2
        assert f"{path}: a training checkpoint holds dense weights" in (said := capsys.readouterr().err)
        assert f"check {run / 'model.safetensors'}" in said
    assert main(["check", str(tmp_path)]) == 2
    assert "give a safetensors file or a run folder" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{}")
    assert main(["check", str(tmp_path)]) == 2
    assert "this run has not ended" in capsys.readouterr().err


def test_export_leaves_zeros_out_and_puts_them_back(run, tmp_path, capsys):
    packed, plain = tmp_path / "a.packed.safetensors", tmp_path / "a.plain.safetensors"
    result = run / "model.safetensors"
    assert main(["export", str(run), "--out", str(packed)]) == 0
    before, after = result.stat().st_size, packed.stat().st_size
    sizes = f"{before / 1e3:.1f} kB -> {after / 1e3:.1f} kB ({after / before:.1%})"
    assert capsys.readouterr().out == f"{packed}: 2 of 20 tensors packed, {sizes}\n", "the sizes that ls shows"
    assert (before, after < 0.25 * before) == (32144, True)
    assert main(["check", str(packed)]) == 0
    assert main(["export", str(packed), "--form", "plain"]) == 0
    assert capsys.readouterr().out.endswith(f"{plain}: 20 tensors, 32.1 kB\n")
    assert plain.read_bytes() == result.read_bytes(), "nothing is lost on the way, metadata included"
    for words, message in {
        ("export", str(run), "--out", str(result)): "is the file that is read",
        ("export", str(result), "--out", str(tmp_path / "no" / "x")): f"there is no folder {tmp_path / 'no'}",
        ("export", str(result), "--out", str(tmp_path)): f"{tmp_path}: is a folder",
        ("export", str(result), "--out", str(run / "events.jsonl")): "exists, and its name is not that of a safetensors file",
        ("export", str(run.parent)): f"give a safetensors file or a run folder, such as {run}",
        ("export", str(run / "run.json")): "run.json: not a readable safetensors file",
        ("export", str(run / "checkpoints")): "a training checkpoint holds dense weights",
        ("export", str(tmp_path / "gone")): "gone: no such file",
    }.items():
        assert main(list(words)) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "dense"
    assert main([*SHORT, "--sparsity.method.kind", "dense", "--out", str(out)]) == 0
    return out


def test_where_there_are_no_zeros_a_command_is_named_that_goes_on(run, dense_run, tmp_path, capsys):
    """And no function of the library, which who gives commands does not call."""
    file = tmp_path / "a file.safetensors"
    shutil.copy(dense_run / "model.safetensors", file)
    train, bench = "nofm train digits --sparsity.pattern 1:16", "nofm bench cnn --pattern 1:16 --input 1 8 8"
    for words, message in {
        (
            "export",
            str(dense_run),
        ): f"{dense_run}: was trained dense, so there are no zeros to leave out, and {dense_run}/model.safetensors "
        f"is the file to use. With zeros: {train}",
        ("export", str(file)): f"{file}: no weight has zeros worth leaving out; nofm check '{file}' tells how many each has.",
        ("bench", str(dense_run)): f"{dense_run}: was trained dense, so there are no zeros to leave out. What zeros would bring to its "
        f"network: {bench}",
        ("bench", "cnn", "--pattern", "3:4", "--input", "1", "8", "8"): f"leaving them out could pay (40 %); one with more: {bench}",
    }.items():
        assert main(list(words)) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "torch" not in said.replace(str(tmp_path), "")
        assert "verify" not in said
    assert main(["export", str(dense_run), "--form", "plain", "--out", str(tmp_path / "b.safetensors")]) == 0
    few = tmp_path / "few"
    shutil.copytree(dense_run, few)
    (few / "run.json").write_text((run / "run.json").read_text())  # a sparse run with few zeros
    assert main(["bench", str(few)]) == 2
    assert f"{few}: no layer has so many zeros that leaving them out could pay (40 %); nofm check {few}" in capsys.readouterr().err


def test_check_of_a_run_against_a_pattern_judges_the_layers_that_it_made_sparse(run, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    assert main(["check", str(run), "--pattern", "1:16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(line.strip() for line in lines)
    assert "not checked: stayed dense in this run, first convolution (preset default): conv1.weight" in said
    assert "not checked: stayed dense in this run, classifier (preset default): fc.weight" in said
    assert next(line.split()[2] for line in lines if line.startswith("conv2.weight")) == "1:16"
    assert main(["check", str(run), "--pattern", "1:16", "--all"]) == 1, "the run left two layers dense"
    assert f"nofm check {run} --pattern 1:16 --all --skip conv1.weight fc.weight" in capsys.readouterr().out
    assert main(["check", str(run / "model.safetensors"), "--pattern", "1:16", "--all", "--skip", "conv1", "fc.weight"]) == 0
    assert "rule 'conv1' keeps it dense" in capsys.readouterr().out
    assert main(["check", str(run / "model.safetensors"), "--skip", "fc"]) == 2

    copied = tmp_path / "run"
    copied.mkdir()
    weights = load_file(run / "model.safetensors")
    weights["conv2.weight"][0, :2] = 1.0
    save_file(weights, copied / "model.safetensors")
    shutil.copy(run / "run.json", copied)
    assert main(["check", str(copied), "--pattern", "1:16"]) == 1, "a sparse layer that breaks the pattern"
    facts = json.loads((run / "run.json").read_text())
    facts["layers"][1]["name"] = "conv9"
    (copied / "run.json").write_text(json.dumps(facts))
    assert main(["check", str(copied), "--pattern", "1:16"]) == 2
    assert "run.json lists conv9 as sparse, and model.safetensors has no such weight" in capsys.readouterr().err
    (copied / "run.json").write_text("{}")
    assert main(["check", str(copied), "--pattern", "1:16"]) == 2
    assert "does not hold the layers of a run" in capsys.readouterr().err


def test_another_kind_leaves_what_belonged_to_the_recipes_own_behind():
    from nofm.cli.options import parse
    from nofm.recipes import find

    def optim(recipe, *args):
        return parse(recipe, find(recipe), list(args))[0].optim

    assert find("digits").optim.momentum == 0.9
    assert optim("digits", "--optim.kind", "adamw").momentum is None
    assert optim("digits", "--optim.kind", "adamw", "--optim.momentum", "0.8").momentum == 0.8  # asked for, so that it is refused
    assert optim("digits", "--optim.lr", "0.2").momentum == 0.9
    base = find("digits")
    stepped = parse("digits", base, ["--schedule.kind", "step", "--schedule.milestones", "9", "--schedule.gamma", "0.5"])[0]
    back = parse("digits", stepped, ["--schedule.kind", "cosine"])[0].schedule
    assert (back.milestones, back.gamma, back.warmup) == ((), None, base.schedule.warmup)
    assert parse("digits", base, ["--sparsity.method.kind", "ste"])[0].sparsity.method.decay is None


def test_seeds_train_one_after_another_each_in_its_folder(tmp_path, capsys):
    from short_runs import digests

    out = tmp_path / "runs"
    assert main([*SHORT, "--out", str(out), "--seed", "3", "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"run {out}/seed-3: digits, cnn on digits, 12 steps of 64 images, seed 3, on cpu")
    assert lines[1].startswith("srste 1:16")
    for line, seed in zip(lines[2:4], (3, 4), strict=True):
        end = json.loads((out / f"seed-{seed}" / "events.jsonl").read_text().splitlines()[-1])
        assert line.startswith(f"[{seed - 2}/2] seed-{seed}: accuracy {end['metrics']['accuracy']:.4g}, accuracy_top5 ")
        assert line.endswith(f" ({end['seconds']:.1f} s)")
    assert lines[4:] == [f"the networks: {out}/*/model.safetensors; to look at the runs: nofm report {out}"]
    assert sorted(p.name for p in out.iterdir()) == ["seed-3", "seed-4"]
    assert [json.loads((out / f"seed-{s}" / "run.json").read_text())["seed"] for s in (3, 4)] == [3, 4]
    assert main([*SHORT, "--out", str(tmp_path / "alone"), "--seed", "4"]) == 0
    assert digests(tmp_path / "alone") == digests(out / "seed-4")
    assert digests(out / "seed-3")["state model"] != digests(out / "seed-4")["state model"]
    assert main([*SHORT, "--out", str(out), "--seed", "3", "--seeds", "3", "--resume"]) == 0
    assert (out / "seed-5" / "model.safetensors").is_file()


# ---- going on with a run ----


def assert_same_end(out: Path, wanted: Path) -> None:
    from short_runs import digests

    found, whole = digests(out), digests(wanted)
    assert {name for name in whole if found.get(name) != whole[name]} == set()


@pytest.fixture
def stopped(tmp_path) -> Path:
    """The run of `run`, asked to stop at step 8."""
    from test_told import stopped_at

    from nofm.cli.options import parse
    from nofm.recipes import find

    stopped_at(parse("digits", find("digits"), SHORT[2:])[0], tmp_path / "stopped", 8)
    return tmp_path / "stopped"


def test_resume_needs_the_folder_alone(run, stopped, tmp_path, capsys):
    moved = stopped.rename(tmp_path / "moved")
    assert main(["resume", str(moved)]) == 0
    assert "resumed from step 8" in capsys.readouterr().out
    assert_same_end(moved, run)
    assert main(["resume", str(moved)]) == 0
    assert capsys.readouterr().out == f"{moved}: is finished\n"
    assert main(["resume", str(moved), "--engine.steps", "14"]) == 2
    assert "engine.steps = 14: this run was started with 12" in capsys.readouterr().err
    assert main(["resume", str(moved), "--engine.steps", "14", "--allow-change"]) == 0
    assert "resumed from step 12" in capsys.readouterr().out


def test_resume_of_a_run_that_an_earlier_version_began(run, stopped, capsys):
    """Its run.json has not all the keys of today; they are as they usually are, unless something else is asked for."""
    file = stopped / "run.json"
    info = json.loads(file.read_text())
    del info["config"]["schedule"]["restart_warmup"], info["config"]["sparsity"]["axis"]
    file.write_text(json.dumps(info))
    assert main(["resume", str(stopped), "--sparsity.axis", "flat"]) == 2
    assert "sparsity.axis = flat: this run was started with input" in capsys.readouterr().err
    assert main(["resume", str(stopped)]) == 0
    assert_same_end(stopped, run)


def test_resume_with_all_options_again_still_goes(run, stopped):
    assert main([*SHORT, "--out", str(stopped), "--resume"]) == 0
    assert_same_end(stopped, run)


def test_resume_goes_on_with_all_seeds(tmp_path, capsys):
    """Of three, the first is finished, the second was stopped and the third never begun: all end as if nothing had happened."""
    from test_told import stopped_at

    from nofm.cli.options import parse
    from nofm.recipes import find

    whole, out = tmp_path / "whole", tmp_path / "all"
    command = [*SHORT, "--seed", "9", "--seeds", "3", "--out"]
    assert main([*command, str(whole)]) == 0
    shutil.copytree(whole / "seed-9", out / "seed-9")
    stopped_at(parse("digits", find("digits"), [*SHORT[2:], "--seed", "10"])[0], out / "seed-10", 8)
    capsys.readouterr()
    assert main(["resume", str(out)]) == 0
    said = capsys.readouterr().out
    places = [said.index(f"seed-{words}") for words in ("9: is finished\n", "10, resumed from step 8", "10: accuracy", "11: accuracy")]
    assert places == sorted(places)
    assert said.splitlines()[-1] == f"the networks: {out}/*/model.safetensors; to look at the runs: nofm report {out}"
    for seed in (10, 11):
        assert_same_end(out / f"seed-{seed}", whole / f"seed-{seed}")
    assert json.loads((out / "seed-11" / "run.json").read_text())["command"] == ["nofm", *command, str(whole)], "what has asked for it"
    assert main(["resume", str(out)]) == 0
    assert capsys.readouterr().out == "".join(f"{out}/seed-{seed}: is finished\n" for seed in (9, 10, 11))
    assert main(["resume", str(out), "--allow_change", "--engine.steps", "14"]) == 0, "what is finished can be made longer"
    assert re.findall(r"seed-(\d+), resumed from step 12", capsys.readouterr().out) == ["9", "10", "11"]


@pytest.mark.parametrize(
    ("asked", "there", "all_of_them"),
    [
        ("--seeds 3", [0, 1], [0, 1, 2]),
        ("--seeds=3", [0], [0, 1, 2]),
        ("--seed 9 --seeds 3", [10], [9, 10, 11]),
        ("--seeds 2", [0, 1, 5], [0, 1, 5]),
        ("--optim.nesterov", [3, 12], [3, 12]),
    ],
)
def test_resume_knows_which_seeds_were_asked_for(asked, there, all_of_them, run, tmp_path):
    info = json.loads((run / "run.json").read_text())
    for seed in there:
        (tmp_path / f"seed-{seed}").mkdir()
        config = {**info["config"], "seed": seed}
        facts = {**info, "config": config, "command": ["nofm", "train", "digits", *asked.split()]}
        (tmp_path / f"seed-{seed}" / "run.json").write_text(json.dumps(facts))
    assert [(one.folder.name, one.config.seed) for one in begun(tmp_path)] == [(f"seed-{seed}", seed) for seed in all_of_them]


def test_resume_says_how_a_study_goes_on(run, tmp_path, capsys):
    folder = tmp_path / "my study" / "runs" / "ste-1of16" / "seed-0"
    shutil.copytree(run, folder)
    info = json.loads((folder / "run.json").read_text())
    info["command"] = ["nofm", "study", "fig3", "table1", "--on", "digits", "--out", "elsewhere"]
    (folder / "run.json").write_text(json.dumps(info))
    for given in (tmp_path / "my study", folder.parent):
        assert main(["resume", str(given)]) == 2
        assert f"holds runs of a study, which goes on by nofm study fig3 table1 --out '{tmp_path}/my study'; or" in capsys.readouterr().err
    assert main(["resume", str(folder)]) == 0


def test_what_resume_refuses(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "all" / "seed-0")
    (tmp_path / "all" / "seed-1").mkdir()
    (tmp_path / "all" / "seed-1" / "run.json").write_text('{"config": 3}')
    for args, said in (
        ([tmp_path / "nowhere"], "nowhere: no run folder"),
        ([tmp_path / "all"], "all/seed-1/run.json: does not hold the configuration of a run"),
        ([tmp_path / "all" / "seed-1"], "run.json: does not hold the configuration of a run"),
        ([run, "--out", "elsewhere"], "--out: has no effect on nofm resume"),
        ([run, "--optim.lr=fast"], "--optim.lr fast: must be a number"),
        (["--engine.steps", "3"], "stands where a run folder belongs"),
    ):
        assert main(["resume", *map(str, args)]) == 2, args
        assert said in capsys.readouterr().err, args
    info = json.loads((run / "run.json").read_text())
    info["config"]["optim"]["lr"] = "fast"
    (tmp_path / "all" / "seed-1" / "run.json").write_text(json.dumps(info))
    assert main(["resume", str(tmp_path / "all" / "seed-1")]) == 2
    assert f"{tmp_path}/all/seed-1/run.json: optim.lr = fast: must be a number" in capsys.readouterr().err
    assert main(["train", "--resume", str(run)]) == 2
    assert "to go on with a run: nofm resume DIR" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    """By the folder of all its seeds."""
    out = tmp_path / "my runs"
    args = ["train", "digits", "--engine.steps", "1000000", "--engine.eval_every", "1", "--seeds", "2", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "nofm", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert any(line.startswith("srste 1:16") for line in process.stdout)  # it trains
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said.strip().endswith(f"a checkpoint is written, go on with nofm resume '{out}'")


# ---- the help of a recipe ----


def options_in(shown: str) -> set[str]:
    return {name.replace(".no_", ".") for name in re.findall(r"--((?:task|model|data)\.\w+)", shown)}


@pytest.mark.parametrize("recipe", ["digits", "multi30k/small", "flow/stamps", "bccd/fasterrcnn", "nuclei/maskrcnn"])
def test_help_of_a_recipe_lists_the_options_of_its_task(recipe, capsys):
    from nofm.engine.problems import PROBLEMS, SHARED
    from nofm.recipes import find

    assert main(["train", recipe, "--help"]) == 0
    shown, kind = capsys.readouterr().out, find(recipe).task.kind
    assert options_in(shown) == {*PROBLEMS[kind].fields, *SHARED}
    others = re.findall(r"nofm train (\S+) --help", shown)
    assert {find(other).task.kind for other in others} == set(PROBLEMS) - {kind}
    assert "Folder of the data" in shown, "an option has lost its words"
    assert f"(default: {kind})" in shown


def test_help_after_other_options_is_help(capsys):
    assert main(["train", "digits", "--engine.steps", "3", "--task.beams", "4", "--help"]) == 0
    assert "usage: nofm train digits" in capsys.readouterr().out
