"""The same run in one process and in two, started by torchrun as a user would: same masks, weights within 1e-6 after 50 steps. Then the
two are killed, stopped, and go on as one.

A sum over 32 images and two sums over 16 round differently, and a ReLU that this turns over makes a jump of 1e-5 (with seed 0, for
one). So the seed is one without such a jump, and the same micro-batches, taken one after the other, must give the same bits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from short_runs import digests, events
from torch import distributed

import nofm
from nofm.cli.main import main
from nofm.engine.checkpoint import Store
from nofm.engine.meeting import agreed_name
from nofm.engine.world import Polls, World

# Group norm: batch norm would see half a batch in each process.
OPTIONS = {
    "engine.steps": 50, "engine.batch_size": 32, "engine.log_every": 10, "engine.eval_every": 25, "engine.checkpoint_every": 25,
    "engine.threads": 1, "engine.ema": 0.9, "model.norm": "group", "sparsity.pattern": "2:4", "data.crop": 1, "schedule.warmup": 5,
    "optim.lr": 0.02, "device": "cpu", "seed": 1,
}  # fmt: skip


def arguments(out: Path, *flags: str, **changes: object) -> list[str]:
    """The command line of `nofm`: the options above with changes (engine_ema=0.5), and flags."""
    options = OPTIONS | {name.replace("_", ".", 1): value for name, value in changes.items()}
    return ["train", "digits", "--out", str(out), *flags, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def started(out: Path, *flags: str, restarts: int = 0, **changes: object) -> subprocess.Popen[str]:
    """Two processes by torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command = [*torchrun, "-m", "nofm", *arguments(out, *flags, **changes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_two(out: Path, *flags: str, **changes: object) -> str:
    process = started(out, *flags, **changes)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    return said


def run_one(out: Path, *flags: str, **changes: object) -> Path:
    """One process, this one."""
    threads = torch.get_num_threads()
    assert main(arguments(out, *flags, **changes)) == 0
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return run_one(tmp_path_factory.mktemp("one") / "run")


@pytest.fixture(scope="module")
def one_in_halves(tmp_path_factory) -> Path:
    return run_one(tmp_path_factory.mktemp("halves") / "run", engine_accumulate=2)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("two") / "run"
    run_two(out)
    return out


def back_to_the_middle(run: Path, copy: Path) -> Path:
    """The folder as it was when the first of its two checkpoints was the last."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000050")
    (copy / "checkpoints" / "latest").write_text("step-00000025\n")
    return copy


def assert_alike(out: Path, one: Path, atol: float, mean_begins_at: int = 0) -> None:
    """`mean_begins_at`: a step where the mean loss of the log started anew, so that the next line of it differs."""
    wanted, found = (Store(folder / "checkpoints").load() for folder in (one, out))
    for part in ("model", "average"):
        assert wanted[part].keys() == found[part].keys()
        for name in wanted[part]:
            torch.testing.assert_close(found[part][name], wanted[part][name], atol=atol, rtol=0)
    for name in ("conv2.weight", "conv3.weight"):
        assert torch.equal(nofm.mask(found["model"][name], "2:4"), nofm.mask(wanted["model"][name], "2:4"))
    assert nofm.verify(out / "model.safetensors").ok
    assert nofm.verify(out / "model-ema.safetensors").ok
    kinds = [[(e["event"], e["step"]) for e in events(folder)] for folder in (one, out)]
    assert kinds[0] == kinds[1]
    for a, b in zip(events(one), events(out), strict=True):
        if a["event"] == "sad":
            assert a["changed"] == b["changed"]
        if a["event"] == "eval":
            assert a["metrics"]["accuracy"] == pytest.approx(b["metrics"]["accuracy"])
        if a["event"] == "train" and not mean_begins_at < a["step"] < mean_begins_at + 10:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_two_processes_train_as_one(two, one, one_in_halves):
    assert_alike(two, one, atol=1e-6)
    assert_alike(two, one_in_halves, atol=0)


def test_shards_train_as_one_and_resume(one, one_in_halves, tmp_path):
    out, options = tmp_path / "run", {"engine_parallel": "fsdp", "engine_track": "tensorboard", "engine_histogram_every": 20}
    run_two(out, **options)
    assert_alike(out, one, atol=1e-6)
    assert_alike(out, one_in_halves, atol=0)
    assert_histograms_are_of_whole_weights(out)
    resumed = back_to_the_middle(out, tmp_path / "resumed")
    assert "resumed from step 25" in run_two(resumed, "--resume", **options)
    assert digests(resumed) == digests(out)


def assert_histograms_are_of_whole_weights(out: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(out / "tensorboard"), {"histograms": 0}).Reload()  # 0: all of them
    weights = Store(out / "checkpoints").load()["model"]
    for layer in ("conv2", "conv3"):
        told, weight = seen.Histograms(f"weights/{layer}"), weights[f"{layer}.weight"]
        assert [each.step for each in told] == [10, 30, 50]
        last = told[-1].histogram_value  # of the step of the last checkpoint
        assert (last.num, last.min, last.max) == (weight.numel(), weight.min().item(), weight.max().item())


@pytest.mark.slow
def test_a_refusal_of_the_first_process_ends_the_other_without_a_traceback(two):
    process = started(two)
    said = process.communicate()[0]
    assert process.returncode != 0
    assert "this folder is not empty; go on with that run by --resume" in said
    assert "the first process could not go on; its own message says why" in said
    assert said.count("Traceback") == 1, said  # torchrun's own


# ---- killed and stopped ----


def ranks(torchrun: int) -> dict[str, int]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == torchrun:
                environment = dict(line.partition("=")[::2] for line in (folder / "environ").read_text().split("\0"))
                found[environment["RANK"]] = int(folder.name)
        except (OSError, KeyError):  # it has ended, or is not a worker
            continue
    return found


def wait_for(path: Path, process: subprocess.Popen[str]) -> bool:
    """Whether `path` came to be while the process ran."""
    while not path.exists():
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


@pytest.mark.parametrize("victim", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_torchrun_starts_a_killed_run_again_and_it_ends_the_same(victim, two, tmp_path):
    said = ""
    while "resumed from step 25" not in said:  # again if the run was over before the kill came
        out = tmp_path / str(time.monotonic_ns())
        process = started(out, "--resume", restarts=3)
        assert wait_for(out / "run.json", process), process.communicate()[0]
        pid = ranks(process.pid)[victim]
        assert wait_for(out / "checkpoints" / "latest", process), process.communicate()[0]
        os.kill(pid, signal.SIGKILL)
        said = process.communicate()[0]
        assert process.returncode == 0, said
    assert digests(out) == digests(two)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.3, 0.6])
def test_a_run_killed_before_its_first_checkpoint_starts_afresh(delay, two, tmp_path):
    out = tmp_path / "run"
    process = started(out, "--resume", restarts=3)
    assert wait_for(out / "checkpoints" / ".lock", process), process.communicate()[0]
    pid = ranks(process.pid)["0"]
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert digests(out) == digests(two)


def test_processes_that_never_log_stop_soon_after_a_signal(tmp_path):
    """torchrun passes the signal on, and kills what has not ended 30 s later."""
    out, never = tmp_path / "run", 1_000_000
    process = started(out, engine_steps=never, engine_log_every=never, engine_eval_every=never, engine_checkpoint_every=20)
    assert wait_for(out / "checkpoints" / "latest", process), process.communicate()[0]
    process.terminate()
    said = process.communicate()[0]
    step = Store(out / "checkpoints").latest()
    assert f"stopped by SIGTERM after step {step}; a checkpoint is written" in said


@pytest.mark.parametrize(("step_seconds", "asked"), [(0.001, 1.0), (0.01, 1.0), (0.3, 1.0), (5.0, 5.0)])
def test_processes_ask_each_other_about_once_a_second(step_seconds, asked):
    now = [100.0]
    polls, times = Polls(World(torch.device("cpu")), clock=lambda: now[0]), []
    polls.ask(700, 0)  # a resumed run
    for step in range(701, 30_000):
        now[0] += step_seconds
        if polls.due(step):
            assert polls.ask(step, 15) == 15
            times.append(now[0])
    gaps = [later - earlier for earlier, later in zip([100.0, *times], times, strict=False)]
    assert max(gaps) <= max(1.2, step_seconds + 1e-6)
    assert gaps[-2] == pytest.approx(asked, rel=0.2)


def test_asking_adapts_to_steps_that_become_slow():
    now = [0.0]
    polls, times = Polls(World(torch.device("cpu")), clock=lambda: now[0]), [0.0]
    for step in range(3000):
        now[0] += 0.001 if step < 2000 else 0.5
        if polls.due(step):
            polls.ask(step, 0)
            times.append(now[0])
    assert times[-1] - times[-2] <= 1.0


# ---- meeting again ----


def meet(store: distributed.Store, order: list[int], pause: float) -> dict[int, str]:
    """What the processes call themselves, here threads, when they come in this order."""
    names: dict[int, str] = {}

    def come(rank: int) -> None:
        names[rank] = agreed_name(store, rank, len(order), patience=timedelta(seconds=20))

    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in order]
    for thread in threads:
        thread.start()
        time.sleep(pause)
    for thread in threads:
        thread.join(timeout=30)
    return names


def test_restarted_processes_meet_under_a_new_name_whatever_was_left():
    """torchrun keeps one store for all restarts, where the addresses of dead processes stay."""
    store = distributed.HashStore()
    seen = set()
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 1], [1, 0]):
        names = meet(store, order, pause=0.05)
        assert len(names) == len(order)
        assert len(set(names.values())) == 1
        seen |= set(names.values())
    assert len(seen) == 5


# ---- another number of processes ----


def start_events(out: Path) -> list[dict]:
    told = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in told if event["event"] == "start"]


def test_another_number_of_processes_is_refused_and_goes_on_where_allowed(two, one, tmp_path, capsys):
    out = back_to_the_middle(two, tmp_path / "run")
    assert main(arguments(out, "--resume")) == 2
    assert "is of 2 processes and cannot be resumed exactly by 1" in capsys.readouterr().err
    run_one(out, "--resume", "--allow-change")
    assert "resumed from step 25 of 2 processes by 1, with new generators" in capsys.readouterr().out
    # No layer of this network draws at random, so the weights are those of one process all the way.
    assert_alike(out, one, atol=1e-6, mean_begins_at=25)
    start = start_events(out)[-1]
    assert (start["resumed_from"], start["processes"], start["processes_before"]) == (25, 1, 2)
    assert "processes_before" not in start_events(one)[0]


def test_a_run_of_one_goes_on_as_two(one, tmp_path):
    out = back_to_the_middle(one, tmp_path / "run")
    run_two(out, "--resume", "--allow-change")
    assert_alike(out, one, atol=1e-6, mean_begins_at=25)
    assert start_events(out)[-1]["processes_before"] == 1
    torch_states = [own["chance"]["torch"] for own in Store(out / "checkpoints").load()["processes"].values()]
    assert not torch.equal(*torch_states), "processes must not draw the same"
