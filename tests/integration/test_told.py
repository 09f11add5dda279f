"""What a run tells people on its way, in its events and on a terminal: nothing that is not so, and nothing in checkpoints alone."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, changed

from nofm.cli.progress import Bar, Lines, Turn
from nofm.engine.checkpoint import Store
from nofm.engine.config import RunConfig
from nofm.engine.meter import Meter
from nofm.engine.signals import Stopped, StopRequest
from nofm.engine.train import train
from nofm.engine.world import cpu_name
from nofm.report import write_report


@pytest.fixture(autouse=True, scope="module")
def threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def lines_of(config: RunConfig, out: Path, **options: Any) -> list[str]:
    """Train, and return what a pipe would have shown."""
    stream = io.StringIO()
    train(config, out, sinks=[Lines(out, stream)], **options)
    return stream.getvalue().splitlines()


def stopped_at(config: RunConfig, out: Path, step: int) -> None:
    """Train until a signal comes at `step`, which must be one with a line of the log."""
    request = StopRequest()

    class Listener:
        def log(self, event):
            if event["event"] == "train" and event["step"] == step:
                request(signal.SIGTERM, None)

        def close(self):
            pass

    with pytest.raises(Stopped):
        train(config, out, sinks=[Listener()], stop=request)


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    return [event for line in (out / "events.jsonl").read_text().splitlines() if (event := json.loads(line))["event"] == kind]


# ---- what is going to be trained ----

METHOD = SMALL.sparsity.method.__class__
OPENINGS = {
    "2:4": (SMALL, "srste 2:4, decay 0.005: 2 of 4 layers sparse, 4,058 of 7,514 parameters kept (54.0 %)"),
    "dense": (
        changed(SMALL, sparsity={"method": METHOD(kind="dense")}),
        "dense: 7,514 parameters; SAD is of the 2:4 masks that pruning would give",
    ),
    "unstructured": (
        changed(SMALL, sparsity={"pattern": "1:1", "method": METHOD(kind="gmp", end_at=8, every=4)}),
        "gmp, every 4, end_at 8: 2 of 4 layers sparse, unstructured; 7,514 parameters before pruning",
    ),
    "patterns by layer": (
        changed(SMALL, sparsity={"pattern": None, "rules": ("conv2=2:4", "conv3=1:4")}),
        "srste 2:4, 1:4, decay 0.005: 2 of 4 layers sparse, 2,906 of 7,514 parameters kept (38.7 %)",
    ),
}


@pytest.mark.parametrize("case", OPENINGS)
def test_the_first_lines_say_what_is_trained(case, tmp_path):
    config, sparse = OPENINGS[case]
    lines = lines_of(config, tmp_path / "run", recipe="digits")
    assert lines[:2] == [
        f"run {tmp_path / 'run'}: digits, cnn on digits, 12 steps of 32 images, seed 1, on cpu ({cpu_name()})",
        sparse,
    ]
    assert lines[2].startswith("step 4  loss"), "and no more"


def test_a_resumed_run_says_from_where_and_epochs_are_told(tmp_path):
    config = changed(SMALL, engine={"epochs": 0.25, "steps": None, "eval_every": 1.0, "checkpoint_every": 1.0}, schedule={"warmup": 0.0})
    stopped_at(config, tmp_path / "run", 8)
    first, second = lines_of(config, tmp_path / "run", resume=True)[:2]
    assert first.startswith(
        f"run {tmp_path / 'run'}, resumed from step 8: cnn on digits, 0.25 epochs, 11 steps of 32 images, seed 1, on cpu"
    )
    assert second == OPENINGS["2:4"][1]


def test_a_terminal_shows_names_as_they_are_and_commands_in_one_piece(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = tmp_path / "with [red] brackets and many more letters than a line"
    bar = Bar(out)
    train(SMALL, out, sinks=[bar])
    shown = [line for line in capsys.readouterr().out.splitlines() if line]
    assert any(line.startswith("  ") for line in shown)
    assert all(len(line) <= 80 or str(tmp_path) in line for line in shown), "but for the name"
    lines = "\n".join(shown).replace("\n  ", " ").splitlines()
    assert lines[0].startswith(f"run {out}: cnn on digits, 12 steps of 32 images, seed 1, on cpu (")
    assert lines[1] == OPENINGS["2:4"][1]
    assert lines[-1] == f"the network: {out}/model.safetensors; to look at the run: nofm report '{out}'"
    assert any(line.startswith(f"{out}: accuracy ") for line in lines)


# ---- what a method finds by itself ----

AUTO = changed(SMALL, sparsity={"method": SMALL.sparsity.method.__class__(kind="srste", decay="auto", probe=8)}, engine={"log_every": 3})


def test_the_lambda_that_is_found_is_told(tmp_path):
    out = tmp_path / "run"
    lines = lines_of(AUTO, out)
    (found,) = events(out, "found")
    decay = float(Store(out / "checkpoints").load()["method"]["memory"]["tensors"]["decay"])
    assert (found["step"], found["values"]) == (8, {"decay": decay})
    assert f"step 8  found  decay {decay:.3g}" in lines
    assert [f"decay {decay:.2g}" in line for line in lines if re.match(r"step \d+  loss", line)] == [False, False, True, True]
    page = write_report([out], tmp_path / "page.html")
    assert '<th scope="col">decay found</th>' in page.read_text()
    assert f"{decay:.2g}" in page.read_text()
    assert json.loads((tmp_path / "page.json").read_text())["runs"][0]["found"] == {"decay": decay}


def test_a_resumed_run_knows_what_was_found(tmp_path):
    stopped_at(AUTO, tmp_path / "run", 9)
    lines = lines_of(AUTO, tmp_path / "run", resume=True)
    (found,) = events(tmp_path / "run", "found")
    assert events(tmp_path / "run", "start")[-1]["found"] == found["values"]
    assert [f"decay {found['values']['decay']:.2g}" in line for line in lines if re.match(r"step \d+  loss", line)] == [True]


# ---- how long it took ----


@pytest.mark.parametrize("earlier", [1000.0, None], ids=["as a checkpoint says", "an old checkpoint, which says nothing"])
def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts(earlier, tmp_path):
    out = tmp_path / "run"
    stopped_at(SMALL, out, 8)
    store = Store(out / "checkpoints")
    state = store.load()
    assert state["clock"]["seconds"] > 0
    state.pop("clock")
    store.save(8, state if earlier is None else state | {"clock": {"seconds": earlier}})
    store.close()
    began = time.perf_counter()
    train(SMALL, out, resume=True)
    took = time.perf_counter() - began
    (end,) = events(out, "end")
    at_the_last_checkpoint = Store(out / "checkpoints").load()["clock"]["seconds"]
    assert (earlier or 0) < at_the_last_checkpoint < end["seconds"] < (earlier or 0) + took
    train(SMALL, out, resume=True)  # over already: nothing is done again
    assert events(out, "end")[-1]["seconds"] > at_the_last_checkpoint


def test_the_speed_after_a_resume_is_of_the_steps_since():
    meter = Meter(torch.device("cpu"))
    meter.load_state_dict({"loss": torch.zeros((), dtype=torch.float64), "steps": 18})
    meter.began -= 1000
    for _ in range(2):
        meter.add(torch.ones(()))
    assert meter.steps == 20
    assert 1 / 1000 < meter.steps_per_second() <= 2 / 1000


# ---- several runs ----


def several_lines(tmp_path: Path, turn: Turn, seconds: float, resumed_from: int | None = None) -> list[str]:
    """What a pipe is shown of one of several runs, in which so many seconds go by between two records."""
    now = [0.0]
    stream = io.StringIO()
    lines = Lines(tmp_path / turn.name, stream, turn, clock=lambda: now[0])
    lines.log({"event": "start", "step": 0, "resumed_from": resumed_from, "steps": 40, "unit": "images"})
    for step in (10, 20, 30, 40):
        now[0] += seconds
        lines.log({"event": "train", "step": step, "loss": 1.0 / step, "lr": 0.1, "images_per_second": 50.0})
        lines.log({"event": "eval", "step": step, "metrics": {"accuracy": 70.0 + step}, "ema": False})
        lines.log({"event": "found", "step": step, "values": {"decay": 0.0021}})
        lines.log({"event": "sad", "step": step, "changed": {"conv": 3, "fc": 4}})
    lines.log({"event": "end", "step": 40, "metrics": {"accuracy": 97.5, "loss": 0.123456}, "seconds": 4 * seconds})
    return stream.getvalue().splitlines()


def test_of_several_runs_each_has_a_line_and_what_they_are_is_told_once(tmp_path):
    end = "accuracy 97.5, loss 0.1235, decay 0.0021 found (8.0 s)"
    assert several_lines(tmp_path, Turn(1, 12, "seed-0"), 2.0) == [f"run {tmp_path}/seed-0", f"[1/12] seed-0: {end}"]
    assert several_lines(tmp_path, Turn(2, 12, "seed-1"), 2.0) == [f"[2/12] seed-1: {end}"]
    assert several_lines(tmp_path, Turn(2, 12, "seed-1"), 2.0, resumed_from=5)[0] == f"run {tmp_path}/seed-1, resumed from step 5"


def test_of_a_long_one_of_several_runs_there_is_a_line_now_and_then(tmp_path):
    lines = several_lines(tmp_path, Turn(2, 12, "seed-1"), 20.0)
    assert [line.partition(": ")[2].split("  ")[0] for line in lines[:-1]] == ["step 20", "step 40"], "not less than half a minute apart"
    assert lines[0] == "[2/12] seed-1: step 20  loss 0.0500  lr 0.1  decay 0.0021  accuracy 90.00 at step 20  SAD 7 weights  50 images/s"


def test_on_a_terminal_the_bars_of_several_runs_go(tmp_path, capsys):
    for number in (1, 2):
        train(SMALL, tmp_path / f"seed-{number}", sinks=[Bar(tmp_path / f"seed-{number}", Turn(number, 2, f"seed-{number}"))])
    lines = [line for line in capsys.readouterr().out.replace("\n  ", " ").splitlines() if line.strip()]
    assert [line.partition(":")[0] for line in lines] == [f"run {tmp_path}/seed-1", "srste 2", "[1/2] seed-1", "[2/2] seed-2"]


# ---- the metric ----


def test_a_line_between_evaluations_does_not_repeat_the_last_one(tmp_path):
    lines = lines_of(changed(SMALL, engine={"log_every": 2}), tmp_path / "run")
    assert [line.split("  ")[0] for line in lines if "accuracy" in line and not line.startswith("done")] == ["step 6", "step 12"]
    assert sum("loss" in line and "images/s" in line for line in lines) == 6


def test_a_bar_says_of_which_step_its_metric_is(tmp_path):
    bar = Bar(tmp_path)
    try:
        bar.log({"event": "start", "step": 0, "resumed_from": None, "steps": 12})
        bar.log({"event": "eval", "step": 6, "metrics": {"accuracy": 71.25}, "ema": False})
        bar.log({"event": "train", "step": 8, "loss": 1.0, "lr": 0.1, "images_per_second": 5.0})
        assert "accuracy 71.25 at step 6" in bar._progress.tasks[0].fields["words"]
    finally:
        bar.close()


def test_a_warning_of_a_command_is_a_line_without_its_place_in_the_code(tmp_path):
    """In a process of its own: pytest shows warnings by itself."""
    search = ["--sparsity.method.decay", "auto", "--sparsity.method.probe", "8", "--engine.steps", "10", "--schedule.warmup", "1"]
    for debug, shape in (([], r"warning: decay="), (["--debug"], r".+:\d+: UserWarning: decay=")):
        command = [sys.executable, "-m", "nofm", "train", "digits", *search, "--out", str(tmp_path / f"run{len(debug)}"), *debug]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        [line] = [line for line in said.splitlines() if "so short a search" in line]
        assert re.match(shape, line)
