"""Training runs from a configuration to a run folder: the loop is an ordinary one, the folder holds what others read, and what goes
wrong is named.

Runs are real and small, on the embedded digits, in this process. What the engine does is compared with loops written out here,
never with itself alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from short_runs import digests, events
from small_runs import SMALL, assert_close, changed, weights
from torch.nn import functional as F

import nofm
from nofm.data.arrays import read_arrays
from nofm.data.loader import ResidentLoader, batches
from nofm.data.order import Order, Share
from nofm.engine import build, chance, validate
from nofm.engine.checkpoint import Store
from nofm.engine.config import MethodConfig
from nofm.engine.precision import NonFiniteLossError
from nofm.engine.schedule import Lengths, make_schedule
from nofm.engine.sinks import scalars
from nofm.engine.train import train
from nofm.errors import NonFiniteWeightError
from nofm.recipes import find
from nofm.report.numbers import macs_kept
from nofm.report.read import load
from nofm.tasks.classification import Classification
from nofm.tasks.models import build_model


@pytest.fixture(autouse=True, scope="module")
def threads_and_determinism_as_before():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


# ---- the loop ----


def test_the_loop_is_an_ordinary_loop(tmp_path):
    """Bit for bit the same as the loop that a user of the library would write."""
    train(SMALL, tmp_path / "run")

    chance.seed_all(SMALL.seed)
    model = build_model("cnn", 10, 1, width=16, norm="group")
    nofm.sparsify_(model, "2:4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    nofm.attach(nofm.SRSTE(decay=5e-3), model, optimizer)
    digits = read_arrays("digits", None)
    drawn = batches(ResidentLoader(digits, Order(1437, 32, SMALL.seed), Share(), torch.device("cpu"), crop=1), 0)
    schedule = make_schedule(SMALL, optimizer, Lengths(SMALL, 44))
    for _ in range(12):
        batch = next(drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(batch["image"]), batch["label"]).backward()
        optimizer.step()
        schedule.step()
    assert_close(weights(tmp_path / "run"), model.state_dict(), atol=0)


def test_the_digits_recipe_learns_and_is_the_same_every_time(tmp_path):
    config = find("digits")
    metrics = train(config, tmp_path / "one", recipe="digits")
    assert metrics["accuracy"] > 95
    train(config, tmp_path / "two", recipe="digits")
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    train(dataclasses.replace(config, seed=1), tmp_path / "three", recipe="digits")
    assert digests(tmp_path / "three")["state model"] != digests(tmp_path / "one")["state model"]


METHOD_OPTIONS: dict[str, dict[str, Any]] = {
    "asp": {"prune_at": 5},
    "gmp": {"end_at": 8, "every": 2},
    "lottery": {"every": 4, "rounds": 2},
    "rigl": {"every": 4, "end_at": 9},
    **{kind: {"every": 4} for kind in ("set", "snfs", "dsr")},
    "str": {"initial": -3.0},
}


@pytest.mark.parametrize("kind", nofm.METHODS)
def test_every_method_trains(kind, tmp_path):
    free = nofm.METHODS[kind].method.unstructured
    method = MethodConfig(kind=kind, **METHOD_OPTIONS.get(kind, {}), sparsity=0.75 if free and kind != "str" else None)
    train(changed(SMALL, sparsity={"pattern": "1:1" if free else "2:4", "method": method}, engine={"ema": 0.5}), tmp_path / "run")
    for name in ("model.safetensors", "model-ema.safetensors"):
        if free:
            exported = load_file(tmp_path / "run" / name)
            zeros = sum(int((exported[key] == 0).sum()) for key in ("conv2.weight", "conv3.weight"))
            total = sum(exported[key].numel() for key in ("conv2.weight", "conv3.weight"))
            # A connection that has just grown is zero too (deepr grows some in every step); str's sparsity is what comes out.
            assert (0.2 if kind == "str" else 0.75) * total <= zeros < 0.9 * total
        else:
            assert nofm.verify(tmp_path / "run" / name).ok is (kind != "dense")


@pytest.mark.parametrize("kind", ["rigl", "gmp", "snip"])
def test_multiply_adds_of_an_unstructured_network_are_those_of_its_layers(kind, tmp_path):
    """RigL's layers keep what they began with, so `cost` knew them beforehand; GMP's were whole then."""
    options = METHOD_OPTIONS.get(kind, {}) | ({"allocation": "erk"} if kind == "rigl" else {})
    method = MethodConfig(kind=kind, **options, sparsity=0.75)
    train(changed(SMALL, sparsity={"pattern": "1:1", "method": method}), tmp_path / "run")
    run = load(tmp_path / "run")
    kept = {layer.name: layer.kept for layer in run.layers if layer.unstructured}
    exported = load_file(tmp_path / "run" / "model.safetensors")
    places = {layer.name: layer.macs / layer.weights for layer in run.layers}
    cost = run.info["cost"]
    whole = sum(places[name] * exported[f"{name}.weight"].numel() for name in kept)
    assert macs_kept(run) == pytest.approx(cost["macs"] - whole + sum(places[name] * count for name, count in kept.items()))
    assert sum(kept.values()) == pytest.approx(0.25 * sum(exported[f"{name}.weight"].numel() for name in kept), abs=2)
    for name, count in kept.items():
        assert int((exported[f"{name}.weight"] != 0).sum()) <= count
    assert (macs_kept(run) == pytest.approx(cost["macs_sparse"])) is (kind == "rigl")


def test_a_method_that_the_engine_has_never_heard_of_trains(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Halving(nofm.Method):
        def after_step(self, step):
            for owned in step.weights:
                owned.weight.mul_(0.5)

    from nofm.methods import MethodInfo

    monkeypatch.setitem(nofm.METHODS, "halving", MethodInfo(Halving, "a test", 1))
    monkeypatch.setitem(validate.METHOD_OPTIONS, "halving", ())
    train(changed(SMALL, sparsity={"method": MethodConfig(kind="halving")}), tmp_path / "run")
    assert weights(tmp_path / "run")["conv2.weight"].abs().max() < 0.01


def test_no_method_is_named_in_the_engine():
    folder = Path(build.__file__).parent
    for file in folder.glob("*.py"):
        if file.name not in ("config.py", "validate.py"):  # the words of the configuration
            text = file.read_text().lower()
            assert not [name for name in ("srste", "asp(", "isinstance(method") if name in text], file.name


# ---- the run folder ----


def test_the_run_folder_holds_what_reports_read(tmp_path):
    out = tmp_path / "run"
    train(SMALL, out, recipe="small", command=["nofm", "train", "small"])
    run = json.loads((out / "run.json").read_text())
    assert set(run) == {
        "format",
        "recipe",
        "config",
        "command",
        "seed",
        "versions",
        "commit",
        "workdir_commit",
        "hardware",
        "started",
        "layers",
        "cost",
    }
    assert (run["format"], run["recipe"], run["seed"], run["command"]) == (1, "small", 1, ["nofm", "train", "small"])
    assert run["config"]["sparsity"]["method"]["decay"] == 5e-3
    assert set(run["versions"]) == {"nofm", "torch", "python"}
    assert run["hardware"] | {"name": ""} == {"device": "cpu", "name": "", "cpus": run["hardware"]["cpus"], "world_size": 1}
    assert {row["name"]: row["pattern"] for row in run["layers"]} == {"conv1": "", "conv2": "2:4", "conv3": "2:4", "fc": ""}
    assert run["cost"]["weights_sparse"] < run["cost"]["weights"]
    assert run["cost"]["macs_sparse"] < run["cost"]["macs"]

    told = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [(e["event"], e["step"]) for e in told] == [
        ("start", 0),
        ("sad_from_start", 1),
        ("train", 4), ("sad", 4),
        ("eval", 6), ("checkpoint", 6),
        ("train", 8), ("sad", 8),
        ("sad_from_start", 10),
        ("train", 12), ("sad", 12), ("eval", 12), ("checkpoint", 12),
        ("end", 12),
    ]  # fmt: skip
    assert told[0]["resumed_from"] is None
    assert all(isinstance(e["time"], float) for e in told)
    assert all(set(e) == {"event", "step", "time", "loss", "lr", "images_per_second", "epoch"} for e in told if e["event"] == "train")
    assert all(set(e["metrics"]) == {"accuracy", "accuracy_top5", "loss"} and e["ema"] is False for e in told if e["event"] == "eval")
    assert (out / "checkpoints" / "latest").read_text() == "step-00000012\n"
    assert sorted(p.name for p in (out / "masks").iterdir()) == [f"step-{step:08d}.safetensors" for step in (0, 6, 12)]


def test_masks_and_sad_are_those_of_the_weights(tmp_path):
    out = tmp_path / "run"
    train(changed(SMALL, engine={"log_every": 6}), out)
    store, shapes = Store(out / "checkpoints"), {"conv2": (16, 16, 3, 3), "conv3": (32, 16, 3, 3)}
    bits = {step: load_file(out / "masks" / f"step-{step:08d}.safetensors") for step in (0, 6, 12)}
    for step in (6, 12):
        for name, shape in shapes.items():
            kept = nofm.masks.unpack(bits[step][name], torch.Size(shape))
            assert torch.equal(kept, nofm.mask(store.load(step)["model"][f"{name}.weight"], "2:4"))
    sad = {e["step"]: e for e in events(out) if e["event"] == "sad"}
    assert (sad[6]["since"], sad[12]["since"]) == (0, 6)
    for before, after in ((0, 6), (6, 12)):
        expected = {name: int(nofm.masks.differing(bits[before][name], bits[after][name])) for name in shapes}
        assert sad[after]["changed"] == expected
        assert sad[after]["weights"] == 16 * 16 * 9 + 32 * 16 * 9
    assert sum(sad[6]["changed"].values()) > 0


def test_masks_of_the_first_steps_are_compared_with_those_of_the_start(tmp_path):
    """The paper's SAD_{0:1} and SAD_{0:10} of each layer, in dense training too, whatever the log's interval is."""
    for method in ("ste", "dense"):
        out = tmp_path / method
        config = changed(SMALL, sparsity={"method": MethodConfig(kind=method)}, engine={"log_every": 3, "checkpoint_every": 1, "keep": 2})
        train(config, out)
        told = {e["step"]: e for e in events(out) if e["event"] == "sad_from_start"}
        assert list(told) == [1, 10]
        for step, event in told.items():
            start, then = (load_file(out / "masks" / f"step-{at:08d}.safetensors") for at in (0, step))
            assert event["changed"] == {name: int(nofm.masks.differing(start[name], then[name])) for name in ("conv2", "conv3")}
            assert event["weights"] == 16 * 16 * 9 + 32 * 16 * 9
        assert sum(told[10]["changed"].values()) > sum(told[1]["changed"].values())


def test_the_log_tells_the_mean_loss_and_the_last_rate(tmp_path):
    train(changed(SMALL, engine={"log_every": 1}), tmp_path / "every")
    train(changed(SMALL, engine={"log_every": 4}), tmp_path / "fourth")
    every = {e["step"]: e for e in events(tmp_path / "every") if e["event"] == "train"}
    for e in events(tmp_path / "fourth"):
        if e["event"] == "train":
            assert e["loss"] == pytest.approx(sum(every[e["step"] - i]["loss"] for i in range(4)) / 4, rel=1e-12)
            assert e["lr"] == every[e["step"]]["lr"]


def test_exported_weights_load_strictly_into_a_plain_network(tmp_path):
    train(SMALL, tmp_path / "run")
    plain = build_model("cnn", 10, 1, width=16, norm="group")
    plain.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"), strict=True)
    digits = read_arrays("digits", None)
    batch = next(ResidentLoader(digits, Order(1437, 32, 0), Share(), torch.device("cpu")).test())
    task = Classification(plain.eval().requires_grad_(False))
    metrics = task.metrics({name: float(value) for name, value in task.measure(batch).items()})
    assert metrics == pytest.approx([e for e in events(tmp_path / "run") if e["event"] == "eval"][-1]["metrics"])


# ---- what goes wrong ----


def test_a_loss_that_is_no_number_stops_at_once_and_names_the_step(tmp_path, monkeypatch):
    real, calls = Classification.forward, [0]

    def forward(self, batch):
        calls[0] += 1
        result = real(self, batch)
        return {"loss": result["loss"] * (math.nan if calls[0] == 9 else 1)}

    monkeypatch.setattr(Classification, "forward", forward)
    with pytest.raises(NonFiniteLossError, match="the loss of step 9 is nan"):
        train(SMALL, tmp_path / "run")
    assert calls[0] == 9
    assert Store(tmp_path / "run" / "checkpoints").latest() == 6
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "error"
    assert "step 9" in last["message"]


def test_a_weight_that_is_no_number_stops_and_is_named(tmp_path, monkeypatch):
    real, calls = Classification.forward, [0]

    def forward(self, batch):
        calls[0] += 1
        loss = real(self, batch)["loss"]
        if calls[0] == 3:
            self.model.conv3.weight.register_hook(lambda grad: grad * math.inf)
        return {"loss": loss}

    monkeypatch.setattr(Classification, "forward", forward)
    with pytest.raises(NonFiniteWeightError, match=r"conv3.weight.*after step 3"):
        train(SMALL, tmp_path / "run")


# ---- trackers ----


def test_tensorboard_gets_scalars_and_histograms(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(changed(SMALL, engine={"track": ("tensorboard",), "histogram_every": 6}), tmp_path / "run")
    seen = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"histograms": 0}).Reload()  # 0: all of them
    tags = seen.Tags()
    assert {"train/loss", "train/lr", "eval/accuracy", "sad/total", "sad/conv2"} <= set(tags["scalars"])
    assert set(tags["histograms"]) == {"weights/conv2", "weights/conv3"}
    assert [(h.step, h.histogram_value.num) for h in seen.Histograms("weights/conv2")] == [(4, 2304), (12, 2304)]
    told = {e["step"]: e["loss"] for e in events(tmp_path / "run") if e["event"] == "train"}
    assert {s.step: s.value for s in seen.Scalars("train/loss")} == pytest.approx(told, rel=1e-6)


def test_the_average_is_told_apart_from_the_weights():
    assert dict(scalars({"event": "eval", "ema": True, "metrics": {"accuracy": 3.0}})) == {"eval_ema/accuracy": 3.0}
