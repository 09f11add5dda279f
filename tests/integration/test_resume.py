"""A run that is killed, anywhere, and resumed ends with the same bits as one that was not: weights, optimizer, average, generators,
masks, events. So does one that is asked to stop.

Kills are real SIGKILLs of a real process; some hit at a random time, some at a chosen call inside a save. That every part of a
checkpoint is needed is shown by leaving them out one at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from short_runs import CONFIG, Launcher, clear_group, digests, events
from small_runs import SMALL, changed
from torch import nn

from nofm.engine.checkpoint import CheckpointError, Store
from nofm.engine.config import ConfigError, EngineConfig, MethodConfig, ModelConfig, RunConfig
from nofm.engine.problems import classification
from nofm.engine.signals import Stopped, StopRequest
from nofm.engine.train import train
from nofm.report.compare import group_runs
from nofm.report.notices import notices
from nofm.report.read import load
from nofm.tasks import models


@pytest.fixture(scope="module")
def launcher():
    started = Launcher.start()
    yield started
    started.close()


@dataclasses.dataclass(frozen=True)
class Reference:
    digests: dict[str, str]
    seconds: float
    calls: int


@pytest.fixture(scope="module")
def reference(launcher, tmp_path_factory) -> Reference:
    """The run that nobody interrupts."""
    out = tmp_path_factory.mktemp("reference")
    began = time.monotonic()
    assert launcher.run(out / "run", count_in=str(out / "calls")) == 0
    return Reference(digests(out / "run"), time.monotonic() - began, int((out / "calls").read_text()))


def assert_same(found: dict[str, str], wanted: dict[str, str], stopped_at: int | None = None) -> None:
    """Raise unless two runs ended alike. One that was asked to stop has also saved the masks of the step where it stopped."""
    assert {name for name in wanted if found.get(name) != wanted[name]} == set()
    assert set(found) - set(wanted) <= {f"masks step-{stopped_at or 0:08d}.safetensors"}


def test_two_runs_are_the_same_run(launcher, reference, tmp_path):
    assert launcher.run(tmp_path / "run") == 0
    assert_same(digests(tmp_path / "run"), reference.digests)


def kill_at_a_time(launcher: Launcher, out: Path, delay: float) -> None:
    """SIGKILL after `delay` seconds; sooner, in a fresh folder, if the run was over by then."""
    while True:
        pid = launcher.begin(out)
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = launcher.end()
        clear_group(pid)  # loader processes notice by themselves, but only after seconds
        if code == -signal.SIGKILL:
            return
        shutil.rmtree(out)
        delay /= 2


def kill_in_a_save(launcher: Launcher, out: Path, call: int) -> None:
    pid = launcher.begin(out, at_call=call)
    assert launcher.end() == -signal.SIGKILL
    clear_group(pid)


def assert_survives(launcher: Launcher, reference: Reference, out: Path, chance: random.Random, in_a_save: bool) -> None:
    if in_a_save:
        kill_in_a_save(launcher, out, chance.randint(20, reference.calls))
    else:
        kill_at_a_time(launcher, out, chance.uniform(0.02, reference.seconds))
    assert launcher.run(out, resume=True) == 0
    assert_same(digests(out), reference.digests)


@pytest.mark.parametrize("number", range(8))
def test_a_killed_run_resumes_to_the_same_end(number, launcher, reference, tmp_path):
    assert_survives(launcher, reference, tmp_path / "run", random.Random(number), in_a_save=number % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_fifty_killed_runs_resume_to_the_same_end(number, launcher, reference, tmp_path):
    assert_survives(launcher, reference, tmp_path / "run", random.Random(1000 + number), in_a_save=number % 2 == 0)


def test_a_run_killed_three_times_resumes_to_the_same_end(launcher, reference, tmp_path):
    out = tmp_path / "run"
    kill_in_a_save(launcher, out, reference.calls // 3)
    for _ in range(2):
        pid = launcher.begin(out, resume=True, at_call=reference.calls // 4)
        assert launcher.end() == -signal.SIGKILL
        clear_group(pid)
    assert launcher.run(out, resume=True) == 0
    assert_same(digests(out), reference.digests)


@pytest.mark.parametrize("phase", ["setup", "training", "logging", "evaluation", "saving"])
def test_sigterm_in_any_phase_leaves_a_checkpoint_and_no_process(phase, launcher, reference, tmp_path):
    out = tmp_path / "run"
    pid = launcher.begin(out, terminate_in=phase)
    assert launcher.end() == 143
    assert not clear_group(pid), "a loader process was left"
    step = Store(out / "checkpoints").latest()
    assert step == {"setup": 0, "training": 13, "logging": 21, "evaluation": 25, "saving": 20}[phase]
    assert launcher.run(out, resume=True) == 0
    assert_same(digests(out), reference.digests, stopped_at=step)


# ---- every part of a checkpoint is needed ----


class Noisy(nn.Module):
    """Draws from every generator that a checkpoint saves."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.net = models.cnn(classes, channels, dropout=0.2)

    def forward(self, x):
        if self.training:
            x = x * (1 + 0.01 * random.random()) + 0.01 * float(np.random.normal())
        return self.net(x)


@pytest.fixture
def noisy(monkeypatch):
    """A run in this process that has something in every part of its checkpoints."""
    import nofm.engine.train as module
    from nofm.engine.precision import Precision

    monkeypatch.setitem(models.MODELS, "noisy", Noisy)
    monkeypatch.setattr(classification, "OWN_MODELS", (*classification.OWN_MODELS, "noisy"))
    # Only fp16 scales its loss, and fp16 is for GPUs; but a scaler counts its steps on the CPU as well.
    monkeypatch.setattr(module, "Precision", lambda name, device, clip: Precision("fp16", device, clip))
    threads = torch.get_num_threads()
    yield dataclasses.replace(
        CONFIG,
        model=ModelConfig(name="noisy"),
        data=dataclasses.replace(CONFIG.data, loader="resident"),
        engine=EngineConfig(steps=16, batch_size=32, ema=0.9, log_every=4, eval_every=5, checkpoint_every=6, threads=1),
        schedule=dataclasses.replace(CONFIG.schedule, warmup=3),
    )
    torch.set_num_threads(threads)


def train_until(config: RunConfig, out: Path, event: str) -> None:
    """Ask the run to stop when the first such event comes."""
    request = StopRequest()

    class Listener:
        def log(self, told):
            if told["event"] == event:
                request(signal.SIGTERM, None)

        def close(self):
            pass

    with pytest.raises(Stopped):
        train(config, out, sinks=[Listener()], stop=request)


COMPONENTS = {
    "progress": ("progress",),
    "sampler": ("sampler",),
    "model": ("model",),
    "optimizer": ("optimizer",),
    "schedule": ("schedule",),
    "scaler": ("scaler",),
    "average": ("average",),
    "method": ("method",),
    "sad": ("sad",),
    "meter": ("processes", "0", "meter"),
    "python generator": ("processes", "0", "chance", "python"),
    "numpy generator": ("processes", "0", "chance", "numpy"),
    "torch generator": ("processes", "0", "chance", "torch"),
}


def resumed(config: RunConfig, stopped: Path, out: Path, fresh: Path | None = None, component: tuple[str, ...] = ()) -> dict[str, str]:
    """What a stopped run ends with when it goes on, one component of its checkpoint being what it is in a fresh run."""
    shutil.copytree(stopped, out)
    if fresh is not None:
        store = Store(out / "checkpoints")
        state = store.load()
        ours, theirs = state, Store(fresh / "checkpoints").load()
        *groups, name = component
        for group in groups:
            ours, theirs = ours[group], theirs[group]
        ours[name] = theirs[name]
        store.save(6, state)
        store.close()
    train(config, out, resume=True)
    return digests(out)


def test_every_part_of_a_checkpoint_is_needed(noisy, tmp_path):
    train(noisy, tmp_path / "whole")
    wanted = digests(tmp_path / "whole")
    train_until(noisy, tmp_path / "fresh", "start")
    train_until(noisy, tmp_path / "stopped", "checkpoint")
    assert Store(tmp_path / "fresh" / "checkpoints").latest() == 0
    assert Store(tmp_path / "stopped" / "checkpoints").latest() == 6
    assert_same(resumed(noisy, tmp_path / "stopped", tmp_path / "nothing left out"), wanted, stopped_at=6)

    def without(name: str) -> dict[str, str]:
        return resumed(noisy, tmp_path / "stopped", tmp_path / name, tmp_path / "fresh", COMPONENTS[name])

    def differs(found: dict[str, str]) -> bool:
        return any(found.get(name) != digest for name, digest in wanted.items())

    assert [name for name in COMPONENTS if not differs(without(name))] == []
    parts = {path[0] for path in COMPONENTS.values()}
    assert parts | {"clock"} == set(Store(tmp_path / "whole" / "checkpoints").load())  # the clock: see test_told.py


def from_start(out: Path) -> dict[int, dict[str, int]]:
    return {event["step"]: event["changed"] for event in events(out) if event["event"] == "sad_from_start"}


def test_a_run_that_goes_on_remembers_its_first_masks_until_it_has_compared_them(noisy, tmp_path):
    train(noisy, tmp_path / "whole")
    train_until(noisy, tmp_path / "run", "checkpoint")
    assert list(from_start(tmp_path / "run")) == [1]
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    store = Store(tmp_path / "old" / "checkpoints")
    state = store.load()
    assert state["sad"].pop("start") is not None
    store.save(6, state)
    store.close()
    train(noisy, tmp_path / "run", resume=True)
    assert from_start(tmp_path / "run") == from_start(tmp_path / "whole")
    assert list(from_start(tmp_path / "whole")) == [1, 10]
    assert Store(tmp_path / "run" / "checkpoints").load()["sad"]["start"] is None, "nobody asks for them any more"
    train(noisy, tmp_path / "old", resume=True)
    assert list(from_start(tmp_path / "old")) == [1], "a checkpoint of an earlier version goes on without"


def test_a_part_that_is_missing_is_an_error(noisy, tmp_path):
    train_until(noisy, tmp_path / "run", "checkpoint")
    store = Store(tmp_path / "run" / "checkpoints")
    state = store.load()
    del state["average"]
    store.save(6, state)
    store.close()
    with pytest.raises((KeyError, CheckpointError)):
        train(noisy, tmp_path / "run", resume=True)


# ---- what resuming refuses ----


@pytest.fixture
def finished(noisy, tmp_path):
    train(noisy, tmp_path / "run")
    return noisy, tmp_path / "run"


def test_another_configuration_is_refused_with_the_difference(finished):
    config, out = finished
    other = dataclasses.replace(config, seed=4, optim=dataclasses.replace(config.optim, lr=0.01))
    with pytest.raises(ConfigError, match=r"(?s)optim.lr = 0.01: this run was started with 0.05.*seed = 4.*--allow_change"):
        train(other, out, resume=True)


def test_a_longer_run_goes_on_where_changes_are_allowed(finished):
    config, out = finished
    longer = dataclasses.replace(config, engine=dataclasses.replace(config.engine, steps=20))
    train(longer, out, resume=True, allow_change=True)
    assert Store(out / "checkpoints").latest() == 20
    assert [e["step"] for e in events(out) if e["event"] == "end"] == [16, 20]


def test_a_changed_run_remembers_all_its_commands(tmp_path):
    """What did not train a step of it, a plain resume and a command that is given again are not among them."""
    out = tmp_path / "run"

    def told(words: str, steps: int, **options: bool) -> list[tuple[str, int]]:
        train(changed(SMALL, engine={"steps": steps}), out, command=words.split(), **options)
        return [(" ".join(words), begin) for words, begin in load(out).commands]

    again = {"resume": True, "allow_change": True}
    first, second = "nofm train small", "nofm resume run --allow_change --engine.steps"
    assert told(first, 12) == [(first, 0)]
    assert told("nofm resume run", 12, resume=True) == [(first, 0)]
    assert told(f"{second} 18", 18, **again) == [(first, 0), (f"{second} 18", 12)]
    assert told(f"{second} 18", 18, **again) == [(first, 0), (f"{second} 18", 12)]
    assert told(f"{second} 24", 24, **again) == [(first, 0), (f"{second} 18", 12), (f"{second} 24", 18)]
    for lost in ("step-00000024", "latest"):
        path = out / "checkpoints" / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert told(f"{second} 30", 30, **again) == [(first, 0), (f"{second} 18", 12), (f"{second} 30", 18)], "of the third nothing is left"
    shutil.rmtree(out / "checkpoints")
    assert told(f"{second} 12", 12, **again) == [(first, 0), (f"{second} 12", 0)], "it has begun anew, with the options of the first"
    shutil.rmtree(out / "checkpoints")
    assert told("nofm train other --resume", 12, **again) == [("nofm train other --resume", 0)], "and here with its own"


def test_a_folder_that_is_not_empty_is_refused(finished):
    config, out = finished
    with pytest.raises(ConfigError, match="not empty; go on with that run by --resume"):
        train(config, out)


def test_a_folder_that_another_run_writes_is_refused(launcher, noisy, tmp_path):
    out = tmp_path / "run"
    pid = launcher.begin(out)
    while not (out / "events.jsonl").exists():
        time.sleep(0.01)
    try:
        with pytest.raises(ConfigError, match=f"pid {pid} .* is writing this run"):
            train(CONFIG, out, resume=True)
    finally:
        clear_group(pid)
        launcher.end()


def test_resuming_a_finished_run_changes_nothing(finished):
    config, out = finished
    before = digests(out)
    train(config, out, resume=True)
    assert_same(digests(out), before)


def test_half_a_line_of_the_log_is_dropped(finished):
    config, out = finished
    before = events(out)
    with (out / "events.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    train(config, out, resume=True)
    assert events(out) == before


@pytest.mark.parametrize("total", [None, 5], ids=["as long", "shorter"])
def test_what_is_finished_is_not_told_to_be_something_else(total, finished):
    config, out = finished
    before, told = digests(out), (out / "run.json").read_bytes()
    other = dataclasses.replace(config, sparsity=dataclasses.replace(config.sparsity, pattern="1:4"))
    if total is not None:
        other = dataclasses.replace(config, engine=dataclasses.replace(config.engine, steps=total))
    with pytest.raises(ConfigError, match=r"has come to step \d+, and what is asked for ends at \d+: no step is left to train"):
        train(other, out, resume=True, allow_change=True)
    assert_same(digests(out), before)
    assert (out / "run.json").read_bytes() == told


def test_a_network_of_another_shape_is_refused(noisy, tmp_path):
    config = dataclasses.replace(noisy, model=ModelConfig(name="cnn", width=16))
    train_until(config, tmp_path / "run", "checkpoint")
    wider = dataclasses.replace(config, model=ModelConfig(name="cnn", width=32))
    before, told = digests(tmp_path / "run"), (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"conv1.weight has shape \(32, 1, 3, 3\), in the checkpoint \(16, 1, 3, 3\)"):
        train(wider, tmp_path / "run", resume=True, allow_change=True)
    assert_same(digests(tmp_path / "run"), before)
    assert (tmp_path / "run" / "run.json").read_bytes() == told


def test_another_pattern_is_refused(tmp_path):
    train_until(SMALL, tmp_path / "run", "checkpoint")
    before, told = digests(tmp_path / "run"), (tmp_path / "run" / "run.json").read_bytes()
    refused = "conv2.weight: 2:4 in this state, 1:4 in this model (and 1 more)"
    said = f"{refused}; give the options that the run was started with, or begin anew in another --out"
    with pytest.raises(CheckpointError, match=f"^{re.escape(said)}$"):
        train(changed(SMALL, sparsity={"pattern": "1:4"}), tmp_path / "run", resume=True, allow_change=True)
    assert_same(digests(tmp_path / "run"), before)
    assert (tmp_path / "run" / "run.json").read_bytes() == told


@pytest.mark.parametrize("start", [{"begin_at": 9}, {"begin_at": 9, "ramp_at": 0}], ids=["dense", "gradual"])
def test_a_start_after_the_start_is_refused(start, tmp_path):
    train_until(SMALL, tmp_path / "run", "checkpoint")
    before, told = digests(tmp_path / "run"), (tmp_path / "run" / "run.json").read_bytes()
    other = changed(SMALL, sparsity={"method": dataclasses.replace(SMALL.sparsity.method, **start)})
    with pytest.raises(CheckpointError) as refused:
        train(other, tmp_path / "run", resume=True, allow_change=True)
    back = "3:4" if "ramp_at" in start else "dense"
    assert f"by which conv2 and 1 more go from 2:4 back to {back} at step 6, until step 9 (begin_at, which" in str(refused.value)
    assert str(refused.value).endswith("nothing); give the options that the run was started with, or begin anew in another --out")
    assert_same(digests(tmp_path / "run"), before)
    assert (tmp_path / "run" / "run.json").read_bytes() == told


def test_a_start_that_was_over_by_then_changes_nothing(tmp_path):
    for name, start in (("as it was", {}), ("begun", {"begin_at": 6})):
        train_until(SMALL, tmp_path / name, "checkpoint")
        method = dataclasses.replace(SMALL.sparsity.method, **start)
        train(changed(SMALL, sparsity={"method": method}), tmp_path / name, resume=True, allow_change=True)
    as_it_was, begun = (digests(tmp_path / name) for name in ("as it was", "begun"))
    assert as_it_was.pop("state method") != begun.pop("state method")  # which names its options
    assert_same(as_it_was, begun)


def test_a_lambda_that_was_changed_holds_and_the_report_says_so(tmp_path):
    """Without the handle's own warning: who types --allow_change has been asked already."""
    train_until(SMALL, tmp_path / "run", "checkpoint")
    other = changed(SMALL, sparsity={"method": dataclasses.replace(SMALL.sparsity.method, decay=0.07)})
    typed = "nofm resume run --allow_change --sparsity.method.decay 0.07"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "this state is of ")
        train(other, tmp_path / "run", command=typed.split(), resume=True, allow_change=True)
    run = load(tmp_path / "run")
    assert f"it went on at step 6 with other options: {typed}." in notices(group_runs([run]), {run.folder: "it"})


def test_an_end_that_is_past_comes_in_the_next_step(tmp_path):
    def gmp(end_at):
        method = MethodConfig(kind="gmp", sparsity=0.9, every=2, end_at=end_at)
        return changed(SMALL, sparsity={"pattern": "1:1", "method": method})

    train_until(gmp(10), tmp_path / "run", "checkpoint")
    train(gmp(4), tmp_path / "run", resume=True, allow_change=True)
    run = load(tmp_path / "run")
    free = [layer for layer in run.layers if layer.unstructured]
    assert sum(layer.kept for layer in free) == pytest.approx(0.1 * sum(layer.weights for layer in free), abs=2)
    assert run.unfinished == ""
