"""The options of a training run: each does what it says, compared with the formula or with a loop written out here."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file
from short_runs import events
from small_runs import SMALL, assert_close, changed, weights
from torch._dynamo.utils import counters
from torch.nn import functional as F

import nofm
from nofm.engine import build, chance, snapshot
from nofm.engine.checkpoint import Store
from nofm.engine.config import ConfigError, MethodConfig, OptimConfig, RunConfig, ScheduleConfig
from nofm.engine.precision import Precision
from nofm.engine.schedule import Lengths, make_schedule
from nofm.engine.train import train
from nofm.report.compare import group_runs
from nofm.report.notices import notices
from nofm.report.read import load
from nofm.tasks.classification import Classification
from nofm.tasks.models import build_model


@pytest.fixture(autouse=True, scope="module")
def settings_of_the_process_as_before():
    threads, deterministic, compiler = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch._dynamo.config
    with compiler.patch(recompile_limit=compiler.recompile_limit, accumulated_recompile_limit=compiler.accumulated_recompile_limit):
        yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def rates(config: RunConfig, total: int = 12) -> list[float]:
    lengths = Lengths(config, 4)
    optimizer = build.make_optimizer(config, [torch.nn.Parameter(torch.zeros(1))])
    schedule = make_schedule(config, optimizer, lengths)
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
    lengths = Lengths(config, 44)
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
    metrics = train(changed(SMALL, optim={"kind": kind, "lr": 0.003}, engine={"steps": 90}), tmp_path / "run")
    assert metrics["accuracy"] > 60


@pytest.mark.parametrize("accumulate", [2, 4])
def test_micro_batches_make_the_same_step(accumulate, tmp_path):
    train(SMALL, tmp_path / "whole")
    train(changed(SMALL, engine={"accumulate": accumulate}), tmp_path / "parts")
    assert_close(weights(tmp_path / "whole"), weights(tmp_path / "parts"), atol=1e-6)
    whole, parts = (next(e["loss"] for e in events(tmp_path / name) if e["event"] == "train") for name in ("whole", "parts"))
    assert whole == pytest.approx(parts, rel=1e-5)


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
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).requires_grad_(False)
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


def test_a_first_step_that_is_skipped_leaves_no_momentum_of_whatever_was_in_memory(monkeypatch):
    """torch's fused SGD makes its momentum in a step whose kernel then does nothing."""
    monkeypatch.setattr(torch, "empty_like", lambda like, **options: torch.full_like(like, float("nan"), **options))
    precision = Precision("fp16", "cpu")
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9, fused=True)
    for factor, expected in ((float("inf"), 1.0), (1.0, 0.5), (float("inf"), 0.5), (1.0, 0.5 - 0.5 * 1.9)):
        precision.backward((weight * factor).sum())
        precision.step(optimizer, [weight])
        optimizer.zero_grad()
        torch.testing.assert_close(weight.detach(), torch.full((3,), expected), msg=f"after a gradient of {factor}")


def test_a_run_whose_steps_were_skipped_until_its_method_had_no_time_left_says_so(tmp_path, monkeypatch):
    def overflowing(name, device, clip):
        precision = Precision("fp16", device, clip)
        precision.scaler = torch.amp.GradScaler(device, init_scale=2.0**100)  # halved at each skipped step
        return precision

    config = changed(SMALL, sparsity={"method": MethodConfig(kind="srste", begin_at=4)})
    left = "SRSTE has taken 0 steps, and its dense start lasts until step 4 (begin_at)"
    with monkeypatch.context() as patched:
        patched.setattr("nofm.engine.train.Precision", overflowing)
        with pytest.warns(UserWarning, match=re.escape(f"{left}. The run has ended before that")):
            train(config, tmp_path / "skipped")
    assert events(tmp_path / "skipped")[-1]["unfinished"] == left
    groups = group_runs([load(tmp_path / "skipped")])
    assert f"it: {left}, which the run did not come to." in notices(groups, {tmp_path / "skipped": "it"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(config, tmp_path / "whole")
    end = events(tmp_path / "whole")[-1]
    assert end["event"] == "end"
    assert "unfinished" not in end


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


def test_the_second_network_of_a_kind_is_not_compiled_again(tmp_path):
    """A study trains many of them in one process, each with hooks of its own."""
    graphs = []
    for seed in (1, 2):
        train(changed(SMALL, engine={"compile": True, "ema": 0.9}, seed=seed), tmp_path / str(seed))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[1] == graphs[0]


def test_a_resumed_optimizer_has_the_layout_of_its_weights(tmp_path):
    """Fused optimizers refuse momentum that is laid out otherwise than its weight; copies of copies lose channels_last."""
    config = changed(SMALL, engine={"channels_last": True})
    seen: list[dict[str, tuple[int, ...]]] = []
    train(config, tmp_path / "run")
    restore = snapshot.restore

    def looked_at(trainer, state, **options):
        restore(trainer, state, **options)
        named = dict(trainer.task.model.named_parameters())
        seen.append({name: trainer.optimizer.state[p]["momentum_buffer"].stride() for name, p in named.items()})
        seen.append({name: p.stride() for name, p in named.items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "restore", looked_at)
        train(changed(config, engine={"steps": 18}), tmp_path / "run", resume=True, allow_change=True)
    momentum, layouts = seen
    assert momentum == layouts
    assert any(len(stride) == 4 and stride[1] == 1 and stride[3] != 1 for stride in layouts.values())


@pytest.mark.parametrize(
    "schedule",
    [{"warmup": 0.9}, {"restarts": (0.9,)}, {"restarts": (0.3, 0.4)}, {"warmup": 0.4, "restarts": (0.5,)}],
    ids=["warm-up to the end", "restart at the end", "restarts in one step", "restart in the warm-up's last step"],
)
def test_a_cosine_without_a_step_is_refused(schedule):
    """In epochs they are apart, in the four steps of this one they are not."""
    config = changed(SMALL, schedule={"kind": "cosine", **schedule}, engine={"epochs": 1.0, "steps": None})
    with pytest.raises(
        ConfigError, match=r"schedule\.warmup = .*, schedule\.restarts = .*: in whole steps .* to 4, and a part of that has no"
    ):
        rates(config)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_one_cycle_begins_again(shape, warmup):
    """Up to the restart it is torch's cycle of that length, and from there on the same again without its rise."""
    config = changed(SMALL, schedule={"kind": "onecycle", "shape": shape, "warmup": warmup}, engine={"steps": 20}, optim={"lr": 0.1})
    whole, rise = rates(config, 20), warmup or 6  # three tenths where nothing is said
    again = changed(config, schedule={"restarts": (20, 40 - rise)}, engine={"steps": 60 - 2 * rise})
    assert rates(again, 60 - 2 * rise) == pytest.approx([*whole, *whole[rise:], *whole[rise:]], rel=1e-6)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_one_cycle_begins_again_with_its_rise(shape, warmup):
    config = changed(SMALL, schedule={"kind": "onecycle", "shape": shape, "warmup": warmup}, engine={"steps": 20}, optim={"lr": 0.1})
    whole = rates(config, 20)
    again = changed(config, schedule={"restarts": (20, 40), "restart_warmup": True}, engine={"steps": 60})
    assert rates(again, 60) == pytest.approx([*whole, *whole, *whole], rel=1e-6)


def test_a_cosine_begins_again():
    """For methods that go back to the end of the warm-up: both halves are the same cosine, the warm-up comes once."""
    config = changed(SMALL, schedule={"kind": "cosine", "warmup": 4, "restarts": (12,)}, engine={"steps": 20}, optim={"lr": 0.1})
    cosine = [0.05 * (1 + math.cos(math.pi * t / 8)) for t in range(8)]
    assert rates(config, 20) == pytest.approx([0.02, 0.04, 0.06, 0.08, *cosine, *cosine])


def test_a_cosine_begins_again_with_its_warm_up():
    """For methods that repeat a training: all of it comes again."""
    once = changed(SMALL, schedule={"kind": "cosine", "warmup": 4}, engine={"steps": 12}, optim={"lr": 0.1})
    thrice = changed(once, schedule={"restarts": (12, 24), "restart_warmup": True}, engine={"steps": 36})
    assert rates(thrice, 36) == pytest.approx(rates(once, 12) * 3)


def test_a_warm_up_that_is_longer_than_the_repeated_training_is_refused():
    config = changed(SMALL, schedule={"kind": "cosine", "warmup": 4, "restarts": (17,), "restart_warmup": True}, engine={"steps": 20})
    with pytest.raises(ConfigError, match="the rate would fall from 4, 21 to 20"):
        rates(config)
