"""A run that is stopped before its learning rate turns, and resumed, turns as one that was not: every kind of schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from short_runs import digests, events
from small_runs import SMALL, changed
from test_resume import assert_same, train_until

from nofm.engine.checkpoint import Store
from nofm.engine.config import ScheduleConfig
from nofm.engine.train import train

# The run stops at step 4 of 8; all but constant have a rate after it that a fresh schedule would not have.
SCHEDULES = {
    "cosine": ScheduleConfig(kind="cosine", warmup=2),
    "restarts": ScheduleConfig(kind="cosine", restarts=(3, 6)),
    "restarts with warm-up": ScheduleConfig(kind="cosine", warmup=1, restarts=(3, 6), restart_warmup=True),
    "step": ScheduleConfig(kind="step", milestones=(3, 6)),
    "step after warm-up": ScheduleConfig(kind="step", warmup=2, milestones=(3, 6)),
    "one cycle": ScheduleConfig(kind="onecycle", warmup=3),
    "one cycle of lines": ScheduleConfig(kind="onecycle", warmup=3, shape="linear"),
    "one cycle again": ScheduleConfig(kind="onecycle", warmup=2, restarts=(3, 6)),
    "one cycle again with its rise": ScheduleConfig(kind="onecycle", warmup=1, restarts=(3, 6), restart_warmup=True),
    "inverse root": ScheduleConfig(kind="inverse_sqrt", warmup=3),
    "constant after warm-up": ScheduleConfig(kind="constant", warmup=6),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_schedule_goes_on(name, tmp_path):
    threads = torch.get_num_threads()
    config = replace(changed(SMALL, engine={"steps": 8, "log_every": 1, "checkpoint_every": 4, "eval_every": 8}), schedule=SCHEDULES[name])
    train(config, tmp_path / "whole")
    train_until(config, tmp_path / "stopped", "checkpoint")
    train(config, tmp_path / "stopped", resume=True)
    torch.set_num_threads(threads)
    rates = [[e["lr"] for e in events(out) if e["event"] == "train"] for out in (tmp_path / "whole", tmp_path / "stopped")]
    assert rates[0] == rates[1]
    assert len(set(rates[0][4:])) > 1, "nothing happens after the stop"
    assert_same(digests(tmp_path / "stopped"), digests(tmp_path / "whole"), stopped_at=4)


def test_a_cycle_of_lines_is_straight(tmp_path):
    threads = torch.get_num_threads()
    config = replace(changed(SMALL, engine={"steps": 8, "log_every": 1, "eval_every": 8}), schedule=SCHEDULES["one cycle of lines"])
    train(config, tmp_path / "run")
    torch.set_num_threads(threads)
    rates = [e["lr"] for e in events(tmp_path / "run") if e["event"] == "train"]
    down = [b - a for a, b in pairwise(rates[3:])]
    assert all(step == pytest.approx(down[0]) for step in down)
    assert down[0] < 0


def test_the_inverse_root_is_that_of_the_step(tmp_path):
    threads = torch.get_num_threads()
    config = replace(changed(SMALL, engine={"steps": 8, "log_every": 1, "eval_every": 8}), schedule=SCHEDULES["inverse root"])
    train(config, tmp_path / "run")
    torch.set_num_threads(threads)
    peak = config.optim.lr
    wanted = [peak * min(step / 3, (3 / step) ** 0.5) for step in range(1, 9)]
    assert [e["lr"] for e in events(tmp_path / "run") if e["event"] == "train"] == pytest.approx(wanted)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_changed_in_a_resume_holds_from_then_on(name, tmp_path):
    """A longer run with another optimizer's options: the rates of the rest are those of such a run from its start."""
    threads = torch.get_num_threads()
    config = replace(changed(SMALL, engine={"steps": 8, "log_every": 1, "checkpoint_every": 4, "eval_every": 8}), schedule=SCHEDULES[name])
    longer = changed(config, engine={"steps": 12}, optim={"lr": 0.03, "momentum": 0.5})
    train(longer, tmp_path / "longer")
    train_until(config, tmp_path / "stopped", "checkpoint")
    train(longer, tmp_path / "stopped", resume=True, allow_change=True)
    torch.set_num_threads(threads)
    rates = [[e["lr"] for e in events(out) if e["event"] == "train"] for out in (tmp_path / "longer", tmp_path / "stopped")]
    assert rates[1][4:] == rates[0][4:]
    groups = Store(tmp_path / "stopped" / "checkpoints").load()["optimizer"]["groups"]
    assert [group["momentum"] for group in groups] == [0.5]
