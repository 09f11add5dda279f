"""Weights & Biases and MLflow get what events.jsonl has: the configuration, every number by its step, and a resumed run in the same
record. Both are the real packages, offline: the first writes to a file, the second to a folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from short_runs import events
from small_runs import SMALL, changed

from nofm.cli.main import main
from nofm.engine.config import ConfigError, RunConfig
from nofm.engine.sinks import SINKS, Guarded, make_sink
from nofm.engine.train import train


@pytest.fixture(autouse=True, scope="module")
def threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def offline(monkeypatch, tmp_path) -> Path:
    """Nothing leaves this machine, and nothing is written outside of `tmp_path`."""
    for name in ("DIR", "CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "home"))
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("CONSOLE", "off")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return tmp_path


def run_and_resume(config: RunConfig, out: Path) -> None:
    """A run of 12 steps that later goes on to 18."""
    train(config, out)
    train(changed(config, engine={"steps": 18}), out, resume=True, allow_change=True)


def told(out: Path, kind: str, field: str) -> dict[int, float]:
    return {e["step"]: e[field] for e in events(out) if e["event"] == kind}


def wandb_records(file: Path) -> Iterator[object]:
    """The records of a .wandb file: a 7-byte header, then LevelDB's log format (blocks of 32 KiB; checksum, length, kind)."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # the end of a block is filled up
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def all_records(files: list[Path]) -> list[object]:
    """Those of files that another process, which outlives the run a little, has finished writing: each ends with an exit."""
    deadline = time.monotonic() + 30
    while True:
        found = [list(wandb_records(file)) for file in files]
        done = all(any(record.WhichOneof("record_type") == "exit" for record in records) for records in found)
        if done or time.monotonic() > deadline:
            return [record for records in found for record in records]
        time.sleep(0.2)


def test_weights_and_biases_gets_every_number_and_a_resumed_run_goes_on(offline):
    out = offline / "run"
    run_and_resume(changed(SMALL, engine={"track": ("wandb",)}), out)
    files = sorted((out / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "the resumed run has another id"
    history, configs, by_step = {}, [], []
    for record in all_records(files):
        if record.WhichOneof("record_type") == "run":
            configs.append({update.key: json.loads(update.value_json) for update in record.run.config.update})
            assert record.run.display_name == "run"
        if record.WhichOneof("record_type") == "metric":
            by_step.append((record.metric.glob_name, record.metric.step_metric))
        if record.WhichOneof("record_type") == "history":
            row = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            history.setdefault(row["step"], {}).update(row)
    assert [config["engine"]["steps"] for config in configs if "engine" in config] == [12, 18]
    assert configs[0]["sparsity"]["method"]["decay"] == 5e-3
    assert ("*", "step") in by_step
    assert {step: row["train/loss"] for step, row in history.items() if "train/loss" in row} == told(out, "train", "loss")
    sad = {step: sum(layers.values()) for step, layers in told(out, "sad", "changed").items()}
    assert {step: row["sad/total"] for step, row in history.items() if "sad/total" in row} == sad
    accuracy = {step: metrics["accuracy"] for step, metrics in told(out, "eval", "metrics").items()}
    assert {step: row["eval/accuracy"] for step, row in history.items() if "eval/accuracy" in row} == accuracy


def test_mlflow_gets_every_number_and_a_resumed_run_goes_on(offline):
    from mlflow import MlflowClient

    out = offline / "run"
    run_and_resume(changed(SMALL, engine={"track": ("mlflow",)}), out)
    client = MlflowClient()
    (run,) = client.search_runs(["0"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert (run.data.params["sparsity.method.decay"], run.data.params["engine.steps"]) == ("0.005", "12")
    written = Path(run.info.artifact_uri.removeprefix("file://"), "config.json")
    assert json.loads(written.read_text())["engine"]["steps"] == 18
    for name, wanted in {
        "train/loss": told(out, "train", "loss"),
        "train/lr": told(out, "train", "lr"),
        "sad/conv2": {step: layers["conv2"] for step, layers in told(out, "sad", "changed").items()},
        "eval/accuracy": {step: metrics["accuracy"] for step, metrics in told(out, "eval", "metrics").items()},
    }.items():
        assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)} == wanted


def test_mlflow_takes_layers_of_any_name(offline):
    from mlflow import MlflowClient

    sink = make_sink("mlflow", offline, {})
    sink.log({"event": "sad", "step": 1, "time": 0.0, "changed": {"a:b[0]*": 3}})
    sink.close()
    (run,) = MlflowClient().search_runs(["0"])
    assert run.data.metrics == {"sad/total": 3, "sad/a_b_0__": 3}
    assert run.info.status == "KILLED"  # it was told of no end


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_named_before_anything_begins(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)  # as if it could not be found
    assert main(["train", "digits", "--engine.track", name, "--out", str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert f"engine.track = {name}" in message
    assert f"pip install {name}" in message
    assert not (tmp_path / "run").exists()
    if name != "tensorboard":  # torch has imported it already
        with pytest.raises(ConfigError, match=rf"engine.track = {name}: .*pip install {name}"):
            make_sink(name, tmp_path, {})


def test_a_tracker_that_does_not_start_is_named(offline, monkeypatch):
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")  # without it MLflow refuses folders
    with pytest.raises(ConfigError, match=r"engine.track = mlflow: does not start: The filesystem tracking backend"):
        train(changed(SMALL, engine={"track": ("mlflow",)}), offline / "run")


def test_a_tracker_that_breaks_does_not_end_the_run(tmp_path, monkeypatch):
    class Breaking:
        calls = 0

        def __init__(self, *args):
            pass

        def log(self, event):
            Breaking.calls += 1
            if event["event"] == "sad":
                raise OSError("the server is gone")

        def close(self):
            raise AssertionError("it is left out by now")

    monkeypatch.setitem(SINKS, "tensorboard", Breaking)
    with pytest.warns(UserWarning, match="engine.track = tensorboard: the server is gone; it is told no more"):
        train(changed(SMALL, engine={"track": ("tensorboard",)}), tmp_path / "run")
    assert Breaking.calls == 4  # start, sad_from_start, train, sad
    assert events(tmp_path / "run")[-1]["event"] == "end"
    assert isinstance(make_sink("tensorboard", tmp_path, {}), Guarded)
