"""`nofm train` runs every task by the same loop: to a finished folder with samples and a report, resumed bit for bit, and a step of
several micro-batches is the step of the whole batch also where they do not count alike."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from short_runs import digests, events
from small_runs import assert_close, weights
from task_runs import RUNS, config_of, train_in_two_processes, write_corpus
from test_resume import assert_same, train_until
from torchvision.models.resnet import BasicBlock, ResNet

import nofm
from nofm.cli.main import main
from nofm.data.order import Share
from nofm.data.pairs import PairLoader
from nofm.data.subwords import Subwords, cached_subwords
from nofm.data.text import read_corpus
from nofm.engine import build, chance
from nofm.engine.checkpoint import Store
from nofm.engine.config import ConfigError
from nofm.engine.train import train
from nofm.engine.world import World
from nofm.tasks.transformer import PAD

SIZES = ("", "_50", "_75", "_small", "_medium")  # the data have no large objects
METRICS = {
    "detection": tuple(f"map{size}" for size in SIZES),
    "segmentation": (*(f"map{size}" for size in SIZES), *(f"mask_map{size}" for size in SIZES)),
    "translation": ("bleu", "perplexity", "length_ratio"),
    "flow": ("epe", "outliers_1px", "outliers_3px", "outliers_5px", "fl_all"),
}
UNITS = {"detection": "images", "segmentation": "images", "translation": "tokens", "flow": "pairs"}
VERSIONS = {"detection": "torchmetrics", "segmentation": "torchmetrics", "translation": "sacreBLEU"}  # what counts their metrics
PICTURES = {"detection": 2, "segmentation": 2, "flow": 2}


@pytest.fixture
def data(task_data) -> dict[str, Path]:
    return task_data


def kind(name: str) -> str:
    return name.partition(" ")[0]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_every_task_leaves_what_any_run_does(name, finished, data):
    out, config = finished[name], config_of(name, data[name])
    steps, every = config.engine.steps, config.engine.eval_every
    told = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert (told[0]["event"], told[0]["unit"], told[-1]["event"]) == ("start", UNITS[kind(name)], "end")
    assert [e["step"] for e in told if e["event"] == "eval" and not e["ema"]] == [every, steps]
    assert all(tuple(e["metrics"]) == METRICS[kind(name)] for e in told if e["event"] == "eval")
    assert all(np.isfinite(list(e["metrics"].values())).all() for e in told if e["event"] == "eval")
    averaged = config.engine.ema is not None
    assert [e["ema"] for e in told if e["event"] == "samples"] == [averaged]
    run = json.loads((out / "run.json").read_text())
    assert run["cost"]["macs_sparse"] < run["cost"]["macs"]
    assert set(run["versions"]) - {"nofm", "torch", "python"} >= {VERSIONS[kind(name)]} if kind(name) in VERSIONS else True
    for file in ["model.safetensors", *(["model-ema.safetensors"] if averaged else [])]:
        checked = nofm.verify(out / file)
        assert sum(row.ok for row in checked.weights if row.pattern == nofm.Pattern("2:4")) >= 5


# A detector is resumed alike with masks and without.
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "segmentation" else ()) for name in RUNS])
def test_a_stopped_run_of_every_task_goes_on_to_the_same_end(name, finished, data, tmp_path):
    config = config_of(name, data[name])
    train_until(config, tmp_path / "run", "checkpoint")
    stopped_at = Store(tmp_path / "run" / "checkpoints").latest()
    assert stopped_at == config.engine.eval_every < config.engine.steps
    train(config, tmp_path / "run", resume=True)
    assert_same(digests(tmp_path / "run"), digests(finished[name]), stopped_at=stopped_at)
    wanted = {path.name: path.read_bytes() for path in (finished[name] / "samples").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "run" / "samples").iterdir()} == wanted


def test_the_samples_are_what_the_last_evaluation_saw(finished, data):
    lines = (finished["translation"] / "samples" / "translations.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [s["reference"] for s in samples] == (data["translation"] / "test_2016_flickr.de").read_text().splitlines()
    assert all(set(s) == {"source", "reference", "hypothesis"} for s in samples)
    for name in ("flow", "flow from files"):
        files = sorted((finished[name] / "samples").iterdir())
        assert [file.name for file in files] == ["flow-0.npz", "flow-1.npz"]
        arrays = [np.load(file, allow_pickle=False) for file in files]
        error = np.concatenate([np.hypot(*np.moveaxis(a["prediction"] - a["truth"], -1, 0)).ravel() for a in arrays])
        last = [e for e in events(finished[name]) if e["event"] == "eval"][-1]["metrics"]
        assert error.mean() == pytest.approx(last["epe"], rel=1e-5)
        assert all(a["frame"].dtype == np.uint8 and a["frame"].std() > 10 for a in arrays)


def test_the_samples_of_a_detector_are_images_with_what_is_there(finished, data):
    wanted = json.loads((data["detection"] / "instances_val.json").read_text())
    for name in ("detection", "segmentation"):
        files = sorted((finished[name] / "samples").iterdir())
        assert [file.name for file in files] == ["objects-0.npz", "objects-1.npz"]
        for file, image in zip(files, wanted["images"], strict=True):
            arrays = np.load(file, allow_pickle=False)
            boxes = [a["bbox"] for a in wanted["annotations"] if a["image_id"] == image["id"]]
            corners = [(x, y, x + width, y + height) for x, y, width, height in boxes]
            np.testing.assert_array_equal(arrays["truth_boxes"], corners)
            assert arrays["image"].shape == (image["height"], image["width"], 3)
            assert list(arrays["names"]) == ["background", "rectangle", "disc"]
            assert ("truth_masks" in arrays) == (name == "segmentation")


def test_a_report_of_every_task_shows_its_samples(all_finished, capsys):
    for name, out in all_finished.items():
        assert main(["report", str(out)]) == 0
        page = (out / "report.html").read_text()
        assert f"{UNITS[kind(name)]}/s" in page
        assert page.count('<img src="data:image/png;base64,') == PICTURES.get(kind(name), 0)
        assert ("translations side by side" in page) == (kind(name) == "translation")
    assert "final BLEU" in capsys.readouterr().out


# ---- a step is the step of its whole batch ----


def by_hand(config, data, steps: int, whole: bool) -> dict[str, torch.Tensor]:
    """The loop that a user would write; a step's batch at once, or its micro-batches as if they counted alike."""
    corpus = read_corpus("multi30k", data)
    words = cached_subwords([*corpus.train.source, *corpus.train.target], 280, None)
    loader = PairLoader(corpus, words, config.engine.batch_size, config.seed, Share(0, 1, config.engine.accumulate))
    chance.seed_all(config.seed)
    task = build.make_task(config, loader)
    build.sparsified_(task.model, config)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=config.optim.lr, momentum=0.9)
    nofm.attach(nofm.SRSTE(decay=config.sparsity.method.decay), task.model, optimizer)
    keys = loader.keys(0)
    for _ in range(steps):
        micro = [loader.make(key) for key in islice(keys, config.engine.accumulate)]
        tokens = [int((batch["target"] != PAD).sum()) for batch in micro]
        assert len(set(tokens)) > 1, "micro-batches that count alike would show nothing"
        optimizer.zero_grad()
        if whole:
            task({name: torch.cat([batch[name] for batch in micro]) for name in ("source", "target")})["loss"].backward()
        else:
            for batch in micro:
                (task(batch)["loss"] / len(micro)).backward()
        optimizer.step()
    return task.model.state_dict()


def test_micro_batches_of_unequal_length_are_one_batch(tmp_path):
    root = write_corpus(tmp_path / "text")
    for file in root.glob("test_*"):  # one sentence to be measured on, so that one of two processes has none
        file.write_text(file.read_text().splitlines(keepends=True)[0])
    changes = {"optim_kind": "sgd", "optim_lr": 0.05, "schedule_kind": "constant", "schedule_warmup": 0, "model_dropout": 0.0}
    config = config_of("translation", root, engine_accumulate=4, engine_batch_size=768, engine_steps=4, **changes)
    train(config, tmp_path / "run")
    found = weights(tmp_path / "run")
    assert_close(found, by_hand(config, root, 4, whole=True), atol=1e-6)
    with pytest.raises(AssertionError):
        assert_close(found, by_hand(config, root, 4, whole=False), atol=1e-5)
    # Two processes with two micro-batches each have the same four.
    halves = replace(config, engine=replace(config.engine, accumulate=2))
    train_in_two_processes(halves, tmp_path / "two")
    assert_close(weights(tmp_path / "two"), found, atol=1e-6)
    one, two = ([e for e in events(out) if e["event"] in ("train", "eval")] for out in (tmp_path / "run", tmp_path / "two"))
    for a, b in zip(one, two, strict=True):
        assert a.get("metrics", a.get("loss")) == pytest.approx(b.get("metrics", b.get("loss")), rel=1e-4)


# ---- a backbone from elsewhere ----


def test_a_detector_begins_with_a_backbone_and_leaves_its_first_stages_alone(data, tmp_path):
    torch.manual_seed(5)
    backbone = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10).state_dict()
    save_file(backbone, tmp_path / "model.safetensors")
    changes = {"model_backbone": tmp_path, "sparsity_method.placement": "decoupled", "engine_steps": 3, "schedule_milestones": 2}
    config = config_of("detection", data["detection"], **changes)
    train(config, tmp_path / "run")
    found = weights(tmp_path / "run")
    moved = {
        stage: not torch.equal(found[f"backbone.body.{stage}"], backbone[stage]) for stage in backbone if stage.endswith("conv1.weight")
    }
    assert moved == {
        "conv1.weight": False,
        "layer1.0.conv1.weight": False,
        "layer2.0.conv1.weight": True,
        "layer3.0.conv1.weight": True,
        "layer4.0.conv1.weight": True,
    }
    checked = {row.name: row.ok for row in nofm.verify(tmp_path / "run" / "model.safetensors", "2:4").weights}
    assert all(checked[f"backbone.body.layer{i}.0.conv1.weight"] for i in (1, 2, 3, 4))
    close = found["backbone.body.layer4.0.conv1.weight"] - backbone["layer4.0.conv1.weight"]
    assert close.abs().max() < 0.05, "it did not begin there"


# ---- what belongs to a run beside its weights ----


def test_a_run_keeps_its_vocabulary_and_goes_on_with_no_other(finished, data, tmp_path):
    words = Subwords.load(finished["translation"] / "vocabulary.json")
    assert words.decode(words.encode(["the small dog"])) == ["the small dog"]
    config = config_of("translation", data["translation"])
    train_until(config, tmp_path / "run", "checkpoint")
    file = data["translation"] / "train.en"
    text = file.read_text()
    try:
        file.write_text(text.replace("dog", "cat"))
        with pytest.raises(ConfigError, match=r"vocabulary.json does not follow from these data"):
            train(config, tmp_path / "run", resume=True)
    finally:
        file.write_text(text)


def test_tokens_of_a_step_are_those_that_it_has(data):
    config = config_of("translation", data["translation"])
    loader = build.make_loader(config, World(torch.device("cpu")))
    epoch = islice(loader.keys(0), loader.order.steps_per_epoch * config.engine.accumulate)
    counted = sum(len(key["pair"]) * len(key["position"]) for key in epoch)
    assert loader.tokens_of_step == pytest.approx(counted / loader.order.steps_per_epoch)
    assert loader.tokens_of_step < config.engine.batch_size
