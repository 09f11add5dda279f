"""Training runs from a configuration to a run folder: the loop is an ordinary one, and every option does what it says.

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
from torch.nn import functional as F

import nofm
from nofm.data.arrays import read_arrays
from nofm.data.loader import ResidentLoader
from nofm.data.order import Order, Share
from nofm.engine import build, chance, validate
from nofm.engine.checkpoint import Store
from nofm.engine.config import (
    ConfigError,
    DataConfig,
    EngineConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    SparsityConfig,
)
from nofm.engine.precision import NonFiniteLossError, Precision
from nofm.engine.sinks import make_sink, scalars
from nofm.engine.train import train
from nofm.errors import NonFiniteWeightError
from nofm.recipes import find
from nofm.tasks.classification import Classification
from nofm.tasks.models import build_model

SMALL = RunConfig(
    model=ModelConfig(name="cnn", width=16, norm="group"),
    data=DataConfig(name="digits", crop=1),
    sparsity=SparsityConfig(pattern="2:4", method=MethodConfig(kind="srste", decay=5e-3)),
    optim=OptimConfig(lr=0.05, weight_decay=5e-4),
    schedule=ScheduleConfig(kind="cosine", warmup=4),
    engine=EngineConfig(steps=12, batch_size=32, log_every=4, eval_every=6, checkpoint_every=6, threads=1),
    seed=1,
    device="cpu",
)


@pytest.fixture(autouse=True, scope="module")
def threads_and_determinism_as_before():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def changed(config: RunConfig, **groups: Any) -> RunConfig:
    """`config` with some fields of some groups changed: changed(SMALL, engine={"steps": 3}, seed=2)."""
    values = {k: dataclasses.replace(getattr(config, k), **v) if isinstance(v, dict) else v for k, v in groups.items()}
    return dataclasses.replace(config, **values)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The dense weights of the last checkpoint."""
    return Store(out / "checkpoints").load()["model"]


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


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
    batches = ResidentLoader(digits, Order(1437, 32, SMALL.seed), Share(), torch.device("cpu"), crop=1).train(0)
    schedule = build.make_schedule(SMALL, optimizer, build.Lengths(SMALL, 44))
    for _ in range(12):
        batch = next(batches)
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


@pytest.mark.parametrize("kind", nofm.METHODS)
def test_every_method_trains(kind, tmp_path):
    method = MethodConfig(kind=kind, prune_at=5 if kind == "asp" else None)
    train(changed(SMALL, sparsity={"method": method}, engine={"ema": 0.5}), tmp_path / "run")
    sparse = kind != "dense"
    assert nofm.verify(tmp_path / "run" / "model.safetensors").ok is sparse
    assert nofm.verify(tmp_path / "run" / "model-ema.safetensors").ok is sparse


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
    assert set(run) == {"format", "recipe", "config", "command", "seed", "versions", "commit", "hardware", "started", "layers", "cost"}
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
        ("train", 4), ("sad", 4),
        ("eval", 6), ("checkpoint", 6),
        ("train", 8), ("sad", 8),
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


# ---- options ----


def rates(config: RunConfig, total: int = 12) -> list[float]:
    lengths = build.Lengths(config, 4)
    optimizer = build.make_optimizer(config, [torch.nn.Parameter(torch.zeros(1))])
    schedule = build.make_schedule(config, optimizer, lengths)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def cosine(step: int, total: int) -> float:
    return 0.05 * (1 + math.cos(math.pi * step / total)) / 2


SCHEDULES = {
    "cosine": (ScheduleConfig(kind="cosine"), [cosine(i, 12) for i in range(12)]),
    "cosine after warm-up": (ScheduleConfig(kind="cosine", warmup=4), [0.01, 0.02, 0.03, 0.04] + [cosine(i, 8) for i in range(8)]),
    "cosine to a floor": (ScheduleConfig(kind="cosine", final=0.01), [0.01 + 0.8 * cosine(i, 12) for i in range(12)]),
    "step": (ScheduleConfig(kind="step", milestones=(4, 8)), [0.05] * 4 + [0.005] * 4 + [0.0005] * 4),
    "step after warm-up": (
        ScheduleConfig(kind="step", milestones=(6,), gamma=0.5, warmup=4),
        [0.01, 0.02, 0.03, 0.04] + [0.05] * 2 + [0.025] * 6,
    ),
    "constant": (ScheduleConfig(kind="constant"), [0.05] * 12),
    "constant after warm-up": (ScheduleConfig(kind="constant", warmup=4), [0.01, 0.02, 0.03, 0.04] + [0.05] * 8),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_of_every_step(name):
    schedule, expected = SCHEDULES[name]
    assert rates(dataclasses.replace(SMALL, schedule=schedule)) == pytest.approx(expected, rel=1e-9)


def test_one_cycle_rises_and_falls():
    seen = rates(dataclasses.replace(SMALL, schedule=ScheduleConfig(kind="onecycle", warmup=4)))
    assert seen.index(max(seen)) in (3, 4)
    assert max(seen) == pytest.approx(0.05, rel=0.05)
    assert seen[0] < 0.01
    assert seen[-1] < 0.002
    assert seen[:4] == sorted(seen[:4])
    assert seen[5:] == sorted(seen[5:], reverse=True)


def test_lengths_are_in_epochs_where_the_run_is():
    config = changed(SMALL, engine={"steps": None, "epochs": 3.0, "eval_every": 0.5, "checkpoint_every": 1}, schedule={"warmup": 1})
    lengths = build.Lengths(config, 44)
    assert (lengths.total, lengths.warmup, lengths.eval_every, lengths.checkpoint_every) == (132, 44, 22, 44)


@pytest.mark.parametrize(
    ("optim", "made"),
    [
        (OptimConfig(kind="sgd", lr=0.1), torch.optim.SGD),
        (OptimConfig(kind="sgd", lr=0.1, momentum=0.8, nesterov=True), torch.optim.SGD),
        (OptimConfig(kind="adam", lr=0.1, betas=(0.8, 0.9)), torch.optim.Adam),
        (OptimConfig(kind="adamw", lr=0.1, weight_decay=0.3, eps=1e-4), torch.optim.AdamW),
    ],
)
def test_optimizers_have_their_options(optim, made):
    optimizer = build.make_optimizer(dataclasses.replace(SMALL, optim=optim), [torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is made
    group = optimizer.param_groups[0]
    for name in ("lr", "momentum", "nesterov", "betas", "eps", "weight_decay"):
        given = getattr(optim, name)
        if given is not None and name in group:
            assert group[name] == given


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adam_trains(kind, tmp_path):
    metrics = train(changed(SMALL, optim={"kind": kind, "lr": 0.003}, engine={"steps": 60}), tmp_path / "run")
    assert metrics["accuracy"] > 60


@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_make_the_same_step(accumulate, tmp_path):
    train(SMALL, tmp_path / "whole")
    train(changed(SMALL, engine={"accumulate": accumulate}), tmp_path / "parts")
    assert_close(weights(tmp_path / "whole"), weights(tmp_path / "parts"), atol=1e-6)
    assert events(tmp_path / "whole")[0]["loss"] == pytest.approx(events(tmp_path / "parts")[0]["loss"], rel=1e-5)


def test_clipping_bounds_the_step(tmp_path):
    # Without momentum and decay a first step moves the weights by lr times the gradient, whose norm is clipped.
    config = changed(
        SMALL, engine={"steps": 1, "clip": 1e-3}, optim={"momentum": 0.0, "weight_decay": 0.0}, schedule={"kind": "constant", "warmup": 0}
    )
    config = changed(config, sparsity={"method": MethodConfig(kind="ste")})
    train(config, tmp_path / "run")
    chance.seed_all(SMALL.seed)
    start = build_model("cnn", 10, 1, width=16, norm="group").state_dict()
    after = weights(tmp_path / "run")
    moved = math.sqrt(sum(float((after[name] - start[name]).double().square().sum()) for name in start))
    assert moved == pytest.approx(0.05 * 1e-3, rel=1e-2)


def test_label_smoothing_is_in_the_loss_and_not_in_the_metric():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    batch = {"image": torch.randn(6, 1, 2, 2), "label": torch.tensor([0, 1, 2, 0, 1, 2])}
    logits = model(batch["image"]).log_softmax(1)
    target = F.one_hot(batch["label"]) * 0.7 + 0.1
    task = Classification(model, label_smoothing=0.3)
    torch.testing.assert_close(task(batch)["loss"], -(target * logits).sum(1).mean())
    plain = -logits.gather(1, batch["label"][:, None]).mean()
    assert task.metrics({k: float(v) for k, v in task.measure(batch).items()})["loss"] == pytest.approx(float(plain), rel=1e-6)


def test_accuracy_counts_ties_once():
    task = Classification(torch.nn.Identity())
    scores = torch.tensor([[1.0, 1, 1, 1, 1, 1], [3, 2, 1, 0, 0, 0], [0, 0, 0, 0, 0, 9]])
    sums = task.measure({"image": scores, "label": torch.tensor([5, 0, 5])})
    assert (int(sums["top1"]), int(sums["top5"]), int(sums["count"])) == (2, 2, 3)


def test_the_average_trails_the_weights_and_is_sparse(tmp_path):
    out = tmp_path / "run"
    train(changed(SMALL, engine={"ema": 0.75, "checkpoint_every": 1, "keep": 20}), out)
    store = Store(out / "checkpoints")
    expected = store.load(1)["model"]["conv2.weight"].double()
    for step in range(2, 13):
        expected = 0.75 * expected + 0.25 * store.load(step)["model"]["conv2.weight"].double()
    state = store.load(12)
    average = state["average"]["module.model.conv2.weight"]
    torch.testing.assert_close(average.double(), expected, atol=1e-6, rtol=0)
    exported = load_file(out / "model-ema.safetensors")["conv2.weight"]
    assert torch.equal(exported, torch.where(nofm.mask(average, "2:4"), average, 0.0))
    assert [e["ema"] for e in events(out) if e["event"] == "eval"] == [False, True, False, True]
    assert not torch.equal(exported, load_file(out / "model.safetensors")["conv2.weight"])


def test_bf16_computes_in_bf16_and_keeps_fp32_weights(tmp_path):
    train(SMALL, tmp_path / "fp32")
    train(changed(SMALL, engine={"precision": "bf16"}), tmp_path / "bf16")
    one, two = weights(tmp_path / "fp32"), weights(tmp_path / "bf16")
    assert all(w.dtype == torch.float32 for w in two.values())
    assert not torch.equal(one["conv2.weight"], two["conv2.weight"])
    assert_close(one, two, atol=0.05)


def test_a_scaled_step_that_overflows_is_skipped_and_the_scale_halved():
    precision = Precision("fp16", "cpu", clip=1.0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scale = precision.scaler.get_scale()
    precision.backward((weight * float("inf")).sum())
    precision.step(optimizer, [weight])
    assert torch.equal(weight.detach(), torch.ones(3))
    assert precision.scaler.get_scale() == scale / 2
    optimizer.zero_grad()
    precision.backward(weight.sum() / math.sqrt(3))  # a gradient of norm 1, which is not clipped
    precision.step(optimizer, [weight])
    torch.testing.assert_close(weight.detach(), torch.full((3,), 1 - 0.5 / math.sqrt(3)))


def test_channels_last_reaches_images_and_weights(tmp_path, monkeypatch):
    seen = []
    real = Classification.forward

    def forward(self, batch):
        seen.append((batch["image"].stride(), self.model.conv2.weight.stride()))
        return real(self, batch)

    monkeypatch.setattr(Classification, "forward", forward)
    train(changed(SMALL, engine={"steps": 1, "channels_last": True}, schedule={"warmup": 0}), tmp_path / "run")
    assert all(weight == (144, 1, 48, 16) for _, weight in seen)
    assert nofm.verify(tmp_path / "run" / "model.safetensors").ok


def test_deterministic_mode_is_torchs(tmp_path):
    train(changed(SMALL, engine={"steps": 1, "deterministic": True}, schedule={"warmup": 0}), tmp_path / "run")
    assert torch.are_deterministic_algorithms_enabled()
    train(changed(SMALL, engine={"steps": 1}, schedule={"warmup": 0}), tmp_path / "other")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_compiled_training_is_close_to_eager(tmp_path):
    train(SMALL, tmp_path / "eager")
    train(changed(SMALL, engine={"compile": True}), tmp_path / "compiled")
    assert_close(weights(tmp_path / "eager"), weights(tmp_path / "compiled"), atol=1e-4)


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

    train(changed(SMALL, engine={"track": ("tensorboard",), "histogram_every": 4}), tmp_path / "run")
    seen = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    tags = seen.Tags()
    assert {"train/loss", "train/lr", "eval/accuracy", "sad/total", "sad/conv2"} <= set(tags["scalars"])
    assert {"weights/conv2", "weights/conv3"} <= set(tags["histograms"])
    told = {e["step"]: e["loss"] for e in events(tmp_path / "run") if e["event"] == "train"}
    assert {s.step: s.value for s in seen.Scalars("train/loss")} == pytest.approx(told, rel=1e-6)


def test_a_tracker_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"engine.track = wandb: .*pip install wandb"):
        make_sink("wandb", tmp_path, {}, torch.nn.Identity())
    assert dict(scalars({"event": "eval", "ema": True, "metrics": {"accuracy": 3.0}})) == {"eval_ema/accuracy": 3.0}
