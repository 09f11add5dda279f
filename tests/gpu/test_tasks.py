"""Every task by the engine on a GPU: finite numbers, samples, the same end after a stop; and steps as CUDA graphs, of translation and of
RAFT, are the steps that they stand for.

With engine.deterministic, translation and flow are compared bit by bit. Without, the gradient of RAFT's look-ups is added up in any order,
and Adam makes steps of full size of whatever is left of gradients that should be zero: such runs are compared by their losses.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrices are multiplied, whoever does it
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from short_runs import events
from small_runs import assert_close, weights
from task_runs import RUNS, write_all
from test_resume import train_until

import nofm
from nofm.data.flow import ResidentFlow
from nofm.data.order import Order, Share
from nofm.data.stamp_sets import read_pack
from nofm.engine.config import RunConfig
from nofm.engine.train import Job, train, train_together
from nofm.recipes import find
from nofm.tasks.flow import OpticalFlow, build_flow_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("data"))


def config_of(name: str, root: Path, **changes: Any) -> RunConfig:
    """The run of that name on the GPU, made without the command line, which needs more packages; changes as engine_steps=3."""
    recipe, options = RUNS[name]
    options = {**options, "data.root": str(root), "device": "cuda", **{key.replace("_", ".", 1): value for key, value in changes.items()}}
    as_tuples = {"data.crop_size": lambda text: tuple(map(int, text.split())), "schedule.milestones": lambda step: (step,)}
    config = find(recipe)
    for key, value in options.items():
        group, _, field = key.rpartition(".")
        value = as_tuples[key](value) if key in as_tuples else value
        part = dataclasses.replace(getattr(config, group), **{field: value}) if group else value
        config = dataclasses.replace(config, **{group or field: part})
    return config


def losses(out: Path) -> list[float]:
    return [e["loss"] for e in events(out) if e["event"] == "train"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", RUNS)
def test_every_task_trains_and_leaves_samples(name, precision, data, tmp_path):
    train(config_of(name, data[name], engine_precision=precision), tmp_path / "run")
    assert np.isfinite(losses(tmp_path / "run")).all()
    assert list((tmp_path / "run" / "samples").iterdir())


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on(name, data, tmp_path):
    """To the same end: to the last bit where kernels can be made to add in one order. Detectors cannot, and a proposal more or less changes
    what comes after it; they are compared by their losses here, and bit by bit on the CPU."""
    detector = name in ("detection", "segmentation")
    config = config_of(name, data[name], engine_tf32=False, engine_deterministic=not detector)
    train(config, tmp_path / "whole")
    train_until(config, tmp_path / "stopped", "checkpoint")
    train(config, tmp_path / "stopped", resume=True)
    assert losses(tmp_path / "stopped") == pytest.approx(losses(tmp_path / "whole"), rel=1e-2)
    if not detector:
        assert_close(weights(tmp_path / "stopped"), weights(tmp_path / "whole"), atol=0.0)
    rates = [[e["lr"] for e in events(tmp_path / out) if e["event"] == "train"] for out in ("whole", "stopped")]
    assert rates[0] == rates[1]


def test_translation_in_graphs_is_translation_without(data, tmp_path):
    """Long enough that every width of sentences is captured and replayed."""
    changes = {"model_dropout": 0.0, "engine_deterministic": True, "engine_steps": 24, "engine_eval_every": 24}
    for graph in ("on", "off"):
        train(config_of("translation", data["translation"], engine_graph=graph, **changes), tmp_path / graph)
    assert_close(weights(tmp_path / "on"), weights(tmp_path / "off"), atol=0.0)
    assert losses(tmp_path / "on") == losses(tmp_path / "off")


# ---- RAFT as a CUDA graph ----


@pytest.fixture
def one_algorithm():
    """Look-ups as usual, whatever the run before has asked for, but cuDNN the same every time: two forwards then have the same bits."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    yield
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["raft_large", "raft_tiny"])
def test_a_captured_forward_has_the_bits_of_one_that_is_not(name, precision, one_algorithm):
    torch.manual_seed(0)
    model = build_flow_model(name).to(CUDA)
    nofm.sparsify_(model, "2:4", preset="paper")
    task = OpticalFlow(model, updates=3)
    frames = torch.rand(2, 2, 3, 128, 160, device=CUDA) * 2 - 1
    flow, valid = torch.randn(2, 2, 128, 160, device=CUDA) * 5, torch.ones(2, 128, 160, dtype=torch.bool, device=CUDA)
    batch = {"image1": frames[0], "image2": frames[1], "flow": flow, "valid": valid}

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        task.zero_grad(set_to_none=True)
        with torch.autocast("cuda", precision, enabled=precision is not torch.float32):
            loss = task(batch)["loss"]
        loss.backward()
        return loss, [p.grad for p in task.parameters()]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss, gradients = step()
        expected, kept = loss.detach().clone(), [g.clone() for g in gradients]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured, their = step()
        for _ in range(2):
            graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    largest = max(g.abs().max() for g in kept)
    tolerance = 1e-4 if precision is torch.float32 else 2e-2
    assert all((a - b).abs().max() <= tolerance * largest for a, b in zip(their, kept, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_host_waits_for_nothing_in_a_step_of_raft(deterministic, data):
    torch.use_deterministic_algorithms(deterministic)
    arrays = read_pack(data["flow"] / "train.npz")
    loader = ResidentFlow(arrays, arrays, Order(len(arrays), 2, 0), Share(), CUDA, (128, 128))
    task = OpticalFlow(build_flow_model("raft_tiny"), updates=2).to(CUDA)
    nofm.sparsify_(task.model, "2:4", preset="paper")
    optimizer = torch.optim.AdamW(task.parameters(), lr=1e-4, fused=True)

    def step(key: dict[str, torch.Tensor]) -> None:
        loss = task(loader.make(key))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    keys = list(islice(loader.keys(0), 4))
    step(keys[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for key in keys:
            step(key)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("method", "deterministic"), [("srste", True), ("dense", True), ("srste", False)])
def test_flow_in_graphs_is_flow_without(method, deterministic, data, tmp_path):
    """Steps 4 to 10 are replayed. Two evaluations, each with pairs to look at, of which the second has the last word."""
    changes = {
        "engine_steps": 10,
        "engine_eval_every": 5,
        "engine_log_every": 1,
        "engine_deterministic": deterministic,
        "engine_tf32": False,
    }
    for graph in ("on", "off"):
        config = config_of("flow", data["flow"], engine_graph=graph, **changes)
        options = dataclasses.replace(config.sparsity.method, kind=method, decay=2e-4 if method == "srste" else None)
        train(dataclasses.replace(config, sparsity=dataclasses.replace(config.sparsity, method=options)), tmp_path / graph)
    assert losses(tmp_path / "on") == pytest.approx(losses(tmp_path / "off"), rel=0 if deterministic else 5e-3)
    if deterministic:
        assert_close(weights(tmp_path / "on"), weights(tmp_path / "off"), atol=0.0)
    shown = [sorted(path.name for path in (tmp_path / graph / "samples").iterdir()) for graph in ("on", "off")]
    assert shown[0] == shown[1] != []
    predicted = [np.load(tmp_path / graph / "samples" / shown[0][0])["prediction"] for graph in ("on", "off")]
    assert np.abs(predicted[0] - predicted[1]).mean() <= (0 if deterministic else 0.05)


def test_flow_runs_share_a_gpu_and_their_pairs(data, tmp_path):
    configs = [config_of("flow", data["flow"], engine_deterministic=True, engine_log_every=1, seed=seed) for seed in (1, 2)]
    for seed, config in enumerate(configs):
        train(config, tmp_path / f"alone-{seed}")
    results = train_together([Job(config, tmp_path / f"together-{seed}") for seed, config in enumerate(configs)], lanes=2)
    assert all(isinstance(metrics, dict) for metrics in results)
    for seed in range(2):
        assert losses(tmp_path / f"together-{seed}") == losses(tmp_path / f"alone-{seed}")
        assert_close(weights(tmp_path / f"together-{seed}"), weights(tmp_path / f"alone-{seed}"), atol=0.0)
