"""data.held_out: options are chosen by training images that were not trained on; `nofm evaluate` then looks at the test images, once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from short_runs import events
from small_runs import SMALL, changed

from nofm.cli.campaign import facts_of
from nofm.cli.main import main
from nofm.data.arrays import Arrays, read_arrays
from nofm.data.errors import DataError
from nofm.engine.config import ConfigError
from nofm.engine.problems import problem_of
from nofm.engine.train import train
from nofm.engine.validate import check
from nofm.engine.world import joined_world
from nofm.recipes import find
from nofm.recipes.studies import STUDIES
from nofm.report.study import Measured
from nofm.report.study_pictures import draw_pictures

HELD_OUT = changed(SMALL, data={"held_out": 300})
PLACES = torch.arange(300) * 1437 // 300  # of the images of digits that are held out


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    train(HELD_OUT, out := tmp_path_factory.mktemp("held-out") / "run")
    torch.set_num_threads(threads)
    return out


@pytest.fixture
def digits() -> Arrays:
    return read_arrays("digits", None)


def test_the_last_training_images_are_those_to_test_by_and_no_others_are(digits):
    assert digits.neighbours_alike, "they stand in the order of their writers"
    digits = dataclasses.replace(digits, neighbours_alike=False)
    arrays = digits.holding_out(300)
    assert torch.equal(torch.cat([arrays.train_NCHW, arrays.test_NCHW]), digits.train_NCHW)
    assert torch.equal(torch.cat([arrays.train_labels, arrays.test_labels]), digits.train_labels)
    assert len(arrays.test_labels) == 300
    assert arrays.mean == digits.mean


@pytest.mark.parametrize(("count", "held"), [(1, [0]), (3, [0, 3, 6]), (4, [0, 2, 5, 7]), (9, [0, 1, 2, 3, 4, 5, 6, 7, 8])])
def test_of_neighbours_that_are_alike_they_are_evenly_spaced(count, held):
    labels = torch.arange(10)
    arrays = Arrays(
        labels.byte().view(10, 1, 1, 1), labels, labels[:0, None, None, None], labels[:0], (0.0,), (1.0,), neighbours_alike=True
    )
    halves = arrays.holding_out(count)
    assert halves.test_labels.tolist() == halves.test_NCHW.flatten().tolist() == held
    assert halves.train_labels.tolist() == halves.train_NCHW.flatten().tolist() == [each for each in range(10) if each not in held]


@pytest.mark.parametrize("count", [1437, 1438])
def test_something_must_be_left_to_train_on(digits, count):
    with pytest.raises(DataError, match=rf"data.held_out = {count}: leaves nothing to train on of 1437 training images"):
        digits.holding_out(count)


@pytest.mark.parametrize("loader", ["resident", "workers"])
def test_loaders_have_those_only(digits, loader):
    config = changed(HELD_OUT, data={"loader": loader})
    with joined_world("cpu") as world:
        there = problem_of(config).loader(config, world)
        assert torch.equal(torch.cat([batch["label"] for batch in there.test()]), digits.train_labels[PLACES])
        drawn = torch.cat([there.order.epoch_indices(epoch) for epoch in range(8)])  # each leaves a few out, less than a batch
        assert drawn.unique().tolist() == list(range(len(digits.train_labels) - 300))


def test_a_run_is_measured_on_them_and_later_on_the_test_images(run, digits, capsys):
    [end] = [each for each in events(run) if each["event"] == "end"]
    assert (end["metrics"]["accuracy"] * 3) % 1 == pytest.approx(0, abs=1e-4)  # of 300 images
    assert main(["evaluate", str(run), "--name", "test", "--data.held_out", "none"]) == 0
    measured = json.loads((run / "evaluations" / "test.json").read_text())
    assert (measured["metrics"]["accuracy"] * 3.6) % 1 == pytest.approx(0, abs=1e-4)  # of 360
    assert measured["metrics"]["accuracy"] != end["metrics"]["accuracy"]


def asked_of(own, **data):
    """What a network is measured on where this is asked for."""
    return problem_of(own).for_tests(own, changed(own, data=data)).data


@pytest.mark.parametrize(("held_out", "asked", "allowed"), [(300, 600, "300, which were held out, or none"), (None, 200, "none")])
def test_a_network_is_not_measured_on_what_it_was_trained_on(held_out, asked, allowed):
    own = changed(SMALL, data={"held_out": held_out})
    with pytest.raises(ConfigError, match=rf"data.held_out = {asked}: among these are images that .* trained on; allowed: {allowed}, "):
        asked_of(own, held_out=asked)
    for fine in {None, held_out}:
        assert asked_of(own, held_out=fine).held_out == fine


def test_a_network_for_cifar_that_held_some_out_looks_at_a_folder(tmp_path):
    (tmp_path / "val" / "cat").mkdir(parents=True)
    own = changed(find("cifar10/resnet20"), data={"held_out": 5000, "root": str(tmp_path)})
    assert asked_of(own, name="folder").held_out is None
    assert asked_of(own, name="folder", held_out=100).held_out == 100, "which the next check refuses: a folder holds none out"


def test_what_is_held_out_changes_no_weight(run, tmp_path, monkeypatch, digits):
    """With other images in their places the same network comes out: it has seen none of them."""
    others = dataclasses.replace(digits, train_NCHW=digits.train_NCHW.clone())
    others.train_NCHW[PLACES] = 255 - others.train_NCHW[PLACES]
    monkeypatch.setattr("nofm.data.arrays.read_arrays", lambda name, root: others)  # which is imported where it is called
    train(HELD_OUT, tmp_path / "run")
    one, other = (load_file(folder / "model.safetensors") for folder in (run, tmp_path / "run"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    ends = [[each for each in events(folder) if each["event"] == "end"][-1]["metrics"]["loss"] for folder in (run, tmp_path / "run")]
    assert ends[0] != ends[1]


def test_a_study_says_so(tmp_path):
    base = changed(find("digits"), data={"held_out": 300})
    facts = facts_of("fig4", STUDIES["fig4"](base), base, "digits")
    assert "Measured on 300 training images held out, not on the test images." in facts["notes"]
    assert facts["measured_on"] == "300 training images held out"
    assert not any("Measured" in note for note in facts_of("fig4", STUDIES["fig4"](find("digits")), find("digits"), "digits")["notes"])


@pytest.mark.parametrize(("held_out", "words"), [(300, "300 training images held out"), (None, "test")])
def test_pictures_of_a_study_say_so(tmp_path, monkeypatch, held_out, words):
    base = changed(find("digits"), data={"held_out": held_out})
    facts = facts_of("fig4", STUDIES["fig4"](base), base, "digits")
    run = Measured("", 0, "1", "accuracy", 90.0, 1.0, 0.0625, 100, None, 60.0, None, None, "2", "a gpu")
    drawn = []
    monkeypatch.setattr("nofm.report.study_figure.write_png", lambda figure, path: drawn.append(figure))
    draw_pictures(tmp_path, facts, {label: [run] for label in ("lambda 0", "lambda 0.0002")}, {})
    [figure] = drawn
    assert (words in figure.get_suptitle()) is (held_out is not None)
    assert figure.axes[1].get_title() == f"accuracy %, {words}"


@pytest.mark.parametrize(("count", "said"), [(0, "data.held_out = 0"), (-5, "data.held_out = -5")])
def test_no_such_number(count, said):
    with pytest.raises(ConfigError, match=said):
        check(changed(SMALL, data={"held_out": count}))


def test_a_folder_of_images_has_its_own(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
    folder = {"name": "folder", "root": str(tmp_path), "loader": "workers", "held_out": 100}
    with pytest.raises(ConfigError, match=r"data.held_out.* has no effect on a folder of images, which is measured on those in val/"):
        check(changed(SMALL, data=folder))
