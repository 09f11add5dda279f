"""model.weights: a run begins with the weights of another, or of a file, or says why not. And a run that is refused leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import SMALL, changed
from task_runs import config_of

import nofm
from nofm.cli.campaign import facts_of
from nofm.cli.main import main
from nofm.engine.build import make_loader, make_task
from nofm.engine.config import ConfigError, RunConfig
from nofm.engine.folder import RunFolder
from nofm.engine.train import train
from nofm.engine.validate import check
from nofm.engine.world import joined_world
from nofm.recipes.studies import STUDIES


@pytest.fixture(scope="module")
def run(tmp_path_factory, one_thread) -> Path:
    """A finished run of the sparse network: its file has the zeros written in."""
    train(SMALL, out := tmp_path_factory.mktemp("first") / "run")
    return out


def beginning(config: RunConfig) -> dict[str, torch.Tensor]:
    """The weights that a run of this configuration begins with."""
    check(config)
    torch.manual_seed(7)
    with joined_world("cpu") as world:
        return make_task(config, make_loader(config, world)).model.state_dict()


def with_weights(source: Path, **groups: Any) -> RunConfig:
    return changed(SMALL, **{**groups, "model": {**groups.get("model", {}), "weights": str(source)}})


@pytest.mark.parametrize("form", ["a run", "a file", "a file in bf16"])
def test_a_run_begins_with_them(run, tmp_path, form):
    source, given = run, load_file(run / "model.safetensors")
    if form != "a run":
        given = {key: value.bfloat16() if "bf16" in form else value for key, value in given.items()}
        save_file(given, source := tmp_path / "somewhere.safetensors")
    begun = beginning(with_weights(source))
    assert begun.keys() == given.keys()
    for key, value in begun.items():
        assert torch.equal(value, given[key].to(value.dtype)), key
    assert not torch.equal(begun["conv1.weight"], beginning(SMALL)["conv1.weight"])


def test_each_of_several_seeds_begins_with_its_own(tmp_path, run):
    held = load_file(run / "model.safetensors")
    for seed in (1, 2):
        save_file({**held, "fc.bias": torch.full_like(held["fc.bias"], seed)}, tmp_path / f"dense-{seed}.safetensors")
    for seed in (1, 2):
        config = changed(with_weights(tmp_path / "dense-{seed}.safetensors"), seed=seed)
        assert beginning(config)["fc.bias"].tolist() == [seed] * 10
    assert "no such file or folder" in refused(changed(config, seed=3))
    facts = facts_of("table1", STUDIES["table1"](config), config, "digits")
    assert any("All rows begin with the weights of " in note and "dense-{seed}.safetensors" in note for note in facts["notes"])


def test_asp_prunes_them_at_once_and_run_json_says_which_they_were(run, tmp_path):
    source = tmp_path / "source.safetensors"
    source.write_bytes((run / "model.safetensors").read_bytes())
    method = type(SMALL.sparsity.method)(kind="asp")
    config = with_weights(source, sparsity={"method": method})
    with pytest.raises(ConfigError, match="prune_at = none: must say when"):
        check(changed(SMALL, sparsity={"method": method}))
    train(config, tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    assert facts["weights_from"] == {"file": str(source), "sha256": hashlib.sha256(source.read_bytes()).hexdigest()}
    before, after = load_file(source), load_file(tmp_path / "out" / "model.safetensors")
    kept = [(before[key] != 0) == (after[key] != 0) for key in ("conv2.weight", "conv3.weight")]  # these were 2:4 already
    assert all(same.double().mean() > 0.99 for same in kept)
    assert main(["check", str(tmp_path / "out")]) == 0


def test_a_classifier_of_other_classes_begins_at_random_and_is_told_of(run, tmp_path):
    given = load_file(run / "model.safetensors")
    last = next(key.removesuffix(".bias") for key in given if key.endswith(".bias") and given[key].shape == (10,))
    given |= {f"{last}.weight": torch.randn(7, given[f"{last}.weight"].shape[1]), f"{last}.bias": torch.randn(7)}
    save_file(given, tmp_path / "seven.safetensors")
    with pytest.warns(UserWarning, match=rf"is of other classes, so the classifier begins at random \({last}\.weight, {last}\.bias\)"):
        begun = beginning(with_weights(tmp_path / "seven.safetensors"))
    random = beginning(SMALL)
    for key, value in begun.items():
        assert torch.equal(value, random[key] if key.startswith(f"{last}.") else given[key]), key


def refused(config: RunConfig) -> str:
    with pytest.raises(nofm.NofmError) as told:
        beginning(config)
    return str(told.value)


def test_weights_of_another_network_are_refused_by_name(run, tmp_path):
    assert "these are not the weights of this network (of another shape: conv1.weight (16, 1, 3, 3) for (24, 1, 3, 3)" in refused(
        with_weights(run, model={"width": 24})
    )
    given = load_file(run / "model.safetensors")
    given["conv9.weight"] = given.pop("conv1.weight")
    save_file(given, tmp_path / "renamed.safetensors")
    assert "(missing: conv1.weight; unexpected: conv9.weight)" in refused(with_weights(tmp_path / "renamed.safetensors"))
    given = {**load_file(run / "model.safetensors"), "fc.weight": torch.randn(7, 5), "fc.bias": torch.randn(7)}
    save_file(given, tmp_path / "other-features.safetensors")  # other classes of other features: not this network's classifier
    assert "fc.weight (7, 5) for (10, " in refused(with_weights(tmp_path / "other-features.safetensors"))


def test_what_is_no_file_of_weights_is_refused(run, tmp_path):
    assert "nothing: no such file or folder; give a finished run's folder or a safetensors file" in refused(
        with_weights(tmp_path / "nothing")
    )
    (tmp_path / "empty").mkdir()
    assert "has no model.safetensors; give a finished run's folder" in refused(with_weights(tmp_path / "empty"))
    assert "run.json: cannot be read as safetensors" in refused(with_weights(run / "run.json"))
    torch.save({"conv1.weight": torch.zeros(2)}, tmp_path / "trained.pt")
    assert "a state dict is written as such by safetensors.torch.save_file" in refused(with_weights(tmp_path / "trained.pt"))
    config = with_weights(run, model={"pretrained": True, "name": "timm/resnet10t", "width": None, "norm": None})
    assert "model.pretrained = true: has no effect beside model.weights" in refused(config)


def test_held_out_images_that_they_were_trained_on_are_refused(run, tmp_path):
    assert "data.held_out = 300: among these are images that the weights of" in refused(with_weights(run, data={"held_out": 300}))
    held_out = changed(SMALL, data={"held_out": 300}, engine={"steps": 6})
    train(held_out, tmp_path / "run")
    beginning(with_weights(tmp_path / "run", data={"held_out": 300}))
    assert "are images that the weights of" in refused(with_weights(run / "model.safetensors", data={"held_out": 300}))
    assert "are images that the weights of" in refused(with_weights(tmp_path / "run", data={"held_out": 100}))  # evenly spaced ones


@pytest.mark.parametrize("form", ["", "model.safetensors"], ids=["the run", "its file"])
def test_a_classifier_of_as_many_other_classes_begins_at_random_too(tmp_path, form):
    folder = tmp_path / "images"
    for split in ("train", "val"):
        for name in ("apple", "pear"):
            (folder / split / name).mkdir(parents=True)
            write_picture(folder / split / name / "1.png")
            write_picture(folder / split / name / "2.png")
    images = {"name": "folder", "root": str(folder), "size": 32, "crop": 0, "loader": "workers"}
    short = {"steps": 2, "batch_size": 2, "workers": 0, "eval_every": 2}
    config = changed(SMALL, data=images, model={"name": "cifar/resnet20"}, engine=short, schedule={"warmup": 0})
    train(config, tmp_path / "fruit")
    again, given = changed(config, model={"weights": str(tmp_path / "fruit" / form)}), load_file(tmp_path / "fruit" / "model.safetensors")
    assert torch.equal(beginning(again)["fc.weight"], given["fc.weight"])
    for split in ("train", "val"):
        (folder / split / "apple").rename(folder / split / "quince")
    with pytest.warns(UserWarning, match=r"is of other classes, so the classifier begins at random \(fc\.weight, fc\.bias\)"):
        begun = beginning(again)
    assert torch.equal(begun["conv1.weight"], given["conv1.weight"])
    assert not torch.equal(begun["fc.weight"], given["fc.weight"])


def copied(run: Path, folder: Path, **groups: dict[str, Any]) -> Path:
    """The run with other values in the configuration that it says it had."""
    shutil.copytree(run, folder)
    info = json.loads((folder / "run.json").read_text())
    for name, values in groups.items():
        info["config"][name] |= values
    (folder / "run.json").write_text(json.dumps(info))
    return folder


def test_data_without_names_of_classes_are_told_apart_by_their_own(run, tmp_path):
    with pytest.warns(UserWarning, match="is of other classes"):
        beginning(with_weights(copied(run, tmp_path / "fashion", data={"name": "fashion"})))


def test_a_detector_whose_norm_was_frozen_does_not_go_on_as_another(finished, task_data, tmp_path):
    frozen = copied(finished["detection"], tmp_path / "frozen", model={"backbone": "somewhere"})
    message = refused(config_of("detection", task_data["detection"], model_weights=frozen))
    assert "were trained with norm frozen; give --model.norm frozen" in message
    beginning(config_of("detection", task_data["detection"], model_weights=frozen, model_norm="frozen"))
    given = load_file(frozen / "model.safetensors")
    save_file({key: value for key, value in given.items() if "num_batches" not in key}, tmp_path / "published.safetensors")
    message = refused(config_of("detection", task_data["detection"], model_weights=tmp_path / "published.safetensors"))
    assert "of a detector give model.norm frozen" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weight: weight.int(), "conv2.weight is torch.int32"),
        (lambda weight: weight.to(torch.float8_e4m3fn), "conv2.weight is torch.float8_e4m3fn"),
        (lambda weight: weight.clone().fill_(float("nan")), "conv2.weight is not finite"),
    ],
)
def test_what_is_no_trained_weight_is_named(run, tmp_path, change, said):
    given = load_file(run / "model.safetensors")
    save_file({**given, "conv2.weight": change(given["conv2.weight"])}, tmp_path / "bad.safetensors")
    assert f"{said}, so it is no trained weight" in refused(with_weights(tmp_path / "bad.safetensors"))


def test_a_damaged_run_is_named(run, tmp_path):
    for text in ("{", "{}", "[]"):
        (broken := copied(run, tmp_path / f"broken{len(text)}{text[0] == '['}") / "run.json").write_text(text)
        assert f"{broken} does not hold the configuration of a run" in refused(with_weights(broken.parent))


def write_picture(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (40, 40), (200, 30, 60)).save(path)


def test_the_other_tasks_begin_with_them_too(finished, task_data):
    for name in ("detection", "segmentation", "flow", "translation"):
        config = config_of(name, task_data[name], model_weights=finished[name])
        begun, given = beginning(config), load_file(finished[name] / "model.safetensors")
        assert begun.keys() == given.keys()
        assert all(torch.equal(begun[key], given[key]) for key in given)
    other = config_of("translation", task_data["translation"], model_weights=finished["translation"], data_vocabulary=272)
    assert "its vocabulary.json is not that of these data: outputs mean other things" in refused(other)


# ---- what cannot be fetched, and what a refused run leaves ----


def test_published_weights_that_cannot_be_fetched_are_one_line_and_leave_no_folder(monkeypatch, tmp_path, capsys):
    import timm

    real = timm.create_model

    def create_model(name: str, *, pretrained: bool, **options: Any) -> Any:
        if pretrained:
            raise OSError("We couldn't connect to the hub\nand many lines more")
        return real(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", create_model)
    monkeypatch.chdir(tmp_path)
    words = "train digits --model.name timm/resnet10t --model.width none --model.dropout none --model.pretrained --out runs/first"
    assert main(words.split()) == 2
    told = capsys.readouterr().err
    assert "model.pretrained = true: the weights of timm/resnet10t could not be fetched (OSError: We couldn't connect to the hub)" in told
    assert "Traceback" not in told
    assert not Path("runs/first").exists()


def test_a_refused_run_leaves_a_folder_that_was_there_and_what_others_have_put_there(monkeypatch, tmp_path, run):
    config = with_weights(run, model={"width": 24})
    (there := tmp_path / "there").mkdir()
    with pytest.raises(ConfigError):
        train(config, there)
    assert os.listdir(there) == []
    RunFolder(killed := tmp_path / "killed", resume=False)._events.close()  # no close: as if it had been killed
    with pytest.raises(ConfigError):
        train(config, killed)
    assert os.listdir(killed) == []
    with pytest.raises(ConfigError):
        train(config, gone := tmp_path / "new" / "run")
    assert not gone.exists()
    train(SMALL, gone)  # and it can be given again
    assert (gone / "model.safetensors").exists()
    assert (gone / "events.jsonl").stat().st_size > 0


def test_a_run_that_has_begun_is_never_removed(run, tmp_path):
    train(changed(SMALL, engine={"steps": 6}), out := tmp_path / "run")
    held = sorted(os.listdir(out))
    with pytest.raises(nofm.NofmError):
        train(changed(SMALL, model={"width": 24}), out, resume=True, allow_change=True)
    assert sorted(os.listdir(out)) == held


def test_nor_one_that_has_said_what_it_is(tmp_path):
    """run.json is there before the first event."""
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.write("run.json", b"{}")
    folder.close()
    assert {"run.json", "events.jsonl", "checkpoints", "masks"} <= set(os.listdir(tmp_path / "run"))


# ---- going on ----


@pytest.mark.parametrize("now", ["gone", "another file", "another shape"])
def test_a_run_that_goes_on_needs_its_weights_no_more_and_remembers_them(run, tmp_path, now):
    source = tmp_path / "source.safetensors"
    given = load_file(run / "model.safetensors")
    save_file(given, source)
    config = changed(with_weights(source), engine={"steps": 6}, out=str(tmp_path / "out"))
    train(config, tmp_path / "out")
    began = json.loads((tmp_path / "out" / "run.json").read_text())["weights_from"]
    if now == "gone":
        source.unlink()
    else:
        save_file({"conv1.weight": torch.ones(3)} if "shape" in now else {**given, "fc.bias": torch.ones(10)}, source)
    train(changed(config, engine={"steps": 12}), tmp_path / "out", resume=True, allow_change=True)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["weights_from"] == began


def test_a_study_does_not_mix_runs_that_began_with_other_weights(run, tmp_path, capsys):
    source = tmp_path / "source.safetensors"
    given = load_file(run / "model.safetensors")
    save_file(given, source)
    options = "--model.width 16 --model.norm group --engine.steps 4 --schedule.warmup 1 --engine.eval_every 4 --engine.checkpoint_every 4"
    command = f"study table1 --on digits {options} --rows dense --model.weights {source} --out {tmp_path / 'study'}".split()
    assert main([*command, "--seeds", "1"]) == 0
    save_file({**given, "fc.bias": torch.ones(10)}, source)
    assert main([*command, "--seeds", "2"]) == 2
    assert "began with other weights than those that lie at" in capsys.readouterr().err
    save_file(given, source)
    assert main([*command, "--seeds", "2"]) == 0
