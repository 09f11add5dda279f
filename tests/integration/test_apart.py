"""Several runs in several processes: each ends as if it had been alone, and whatever becomes of a process or its parent, runs can go on."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from short_runs import digests
from small_runs import SMALL, changed

from nofm.engine.apart import _next_ones, train_apart
from nofm.engine.config import ConfigError, MethodConfig
from nofm.engine.signals import Stopped, StopRequest
from nofm.engine.train import Job, train
from nofm.errors import NofmError

DROPOUT = changed(SMALL, model={"dropout": 0.2})
LONG = changed(DROPOUT, engine={"steps": 5000, "checkpoint_every": 5000, "eval_every": 5000})


def wait_for(happened, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


def trains(job: Job) -> bool:
    events = job.out / "events.jsonl"
    return events.exists() and '"event": "train"' in events.read_text()


def test_runs_end_as_if_alone_and_an_error_is_its_own_runs(tmp_path):
    diverging = changed(SMALL, optim={"lr": 1e30}, sparsity={"method": MethodConfig(kind="ste")})
    configs = [changed(DROPOUT, seed=1), diverging, changed(DROPOUT, seed=2)]
    found = train_apart([Job(c, tmp_path / f"apart-{i}") for i, c in enumerate(configs)], processes=2, stop=StopRequest())
    assert isinstance(found[1], NofmError)
    assert "step" in str(found[1])
    for i in (0, 2):
        assert found[i] == train(configs[i], tmp_path / f"alone-{i}")
        assert digests(tmp_path / f"apart-{i}") == digests(tmp_path / f"alone-{i}")


def test_every_run_is_taken_once_by_whoever_asks_next():
    taken = multiprocessing.get_context("spawn").Value("q", 0)
    quick, slow = _next_ones(taken, 4), _next_ones(taken, 4)
    assert [next(slow), next(quick), next(quick), next(quick)] == [0, 1, 2, 3]
    assert list(slow) == list(quick) == []


def test_no_more_processes_than_runs_and_none_under_torchrun(tmp_path, monkeypatch):
    assert train_apart([], processes=4, stop=StopRequest()) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        train_apart([Job(SMALL, tmp_path / "a")], processes=2, stop=StopRequest())


def test_a_process_that_cannot_be_started_leaves_no_other_behind(tmp_path):
    jobs = [Job(LONG, tmp_path / "a"), Job(SMALL, tmp_path / "b", sinks=[lambda: None])]  # which cannot be sent to a process
    with pytest.raises((pickle.PicklingError, AttributeError)):
        train_apart(jobs, processes=2, stop=StopRequest())
    assert not multiprocessing.active_children()


def test_a_signal_is_passed_on_and_every_run_has_a_checkpoint(tmp_path):
    jobs, stop = [Job(changed(LONG, seed=seed), tmp_path / str(seed)) for seed in (1, 2)], StopRequest()

    def when_both_train() -> None:
        wait_for(lambda: all(map(trains, jobs)))
        stop(signal.SIGTERM, None)

    threading.Thread(target=when_both_train, daemon=True).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        train_apart(jobs, processes=2, stop=stop)
    assert all('"event": "checkpoint"' in (job.out / "events.jsonl").read_text() for job in jobs)


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {paths}
from test_apart import LONG
from small_runs import changed
from nofm.engine.apart import _next_ones, train_apart
from nofm.engine.signals import StopRequest
from nofm.engine.train import Job
if __name__ == "__main__":
    train_apart([Job(changed(LONG, seed=seed), Path(sys.argv[1]) / str(seed)) for seed in (1, 2)], processes=2, stop=StopRequest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["parent", "child"])
def test_a_process_that_is_killed(tmp_path, killed):
    """The others stop by themselves, with checkpoints, and the parent says so."""
    here = Path(__file__).parent
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=[str(here)]))
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stderr=subprocess.PIPE, text=True)
    events = [tmp_path / str(seed) / "events.jsonl" for seed in (1, 2)]
    wait_for(lambda: all(file.exists() and '"event": "train"' in file.read_text() for file in events))
    children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    children = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(children) == 2
    os.kill(parent.pid if killed == "parent" else children[0], signal.SIGKILL)
    _, said = parent.communicate(timeout=120)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    saved = [file for file in events if '"event": "checkpoint"' in file.read_text()]
    assert len(saved) == (2 if killed == "parent" else 1)
    if killed == "child":
        assert "ended by itself, with exit code -9" in said
