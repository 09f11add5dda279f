"""Every task by the engine on a GPU: finite numbers, samples, the same end after a stop; and translation's steps as CUDA graphs are the
steps that they stand for."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from short_runs import events
from small_runs import assert_close, weights
from task_runs import RUNS, config_of, write_all
from test_resume import train_until

from nofm.engine.train import train

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RUNS)
def test_every_task_trains_and_leaves_samples(name, precision, data, tmp_path):
    train(config_of(name, data[name], device="cuda", engine_precision=precision), tmp_path / "run")
    told = [e for e in events(tmp_path / "run") if e["event"] in ("train", "eval")]
    assert np.isfinite([e["loss"] for e in told if e["event"] == "train"]).all()
    assert list((tmp_path / "run" / "samples").iterdir())


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on(name, data, tmp_path):
    """To the same end, as near as kernels that add in any order allow."""
    config = config_of(name, data[name], device="cuda", engine_tf32="false")
    train(config, tmp_path / "whole")
    train_until(config, tmp_path / "stopped", "checkpoint")
    train(config, tmp_path / "stopped", resume=True)
    assert_close(weights(tmp_path / "stopped"), weights(tmp_path / "whole"), atol=1e-3)
    rates = [[e["lr"] for e in events(tmp_path / out) if e["event"] == "train"] for out in ("whole", "stopped")]
    assert rates[0] == rates[1]


def test_translation_in_graphs_is_translation_without(data, tmp_path):
    """Without dropout, which draws other numbers in a graph. Long enough that every width of sentences is captured and replayed."""
    changes = {"device": "cuda", "model_dropout": 0.0, "engine_tf32": "false", "engine_steps": 24, "engine_eval_every": 24}
    for graph in ("on", "off"):
        train(config_of("translation", data["translation"], engine_graph=graph, **changes), tmp_path / graph)
    assert_close(weights(tmp_path / "on"), weights(tmp_path / "off"), atol=1e-3)
    on, off = ([e["loss"] for e in events(tmp_path / graph) if e["event"] == "train"] for graph in ("on", "off"))
    assert on == pytest.approx(off, rel=1e-3)
