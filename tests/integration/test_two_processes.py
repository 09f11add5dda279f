"""The same run in one process and in two, started by torchrun as a user would: same masks, weights within 1e-6 after 50 steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from short_runs import events

import nofm
from nofm.engine.checkpoint import Store

# Group norm: batch norm would see half a batch in each process.
OPTIONS = [
    "train", "digits", "--engine.steps", "50", "--engine.batch_size", "32", "--engine.log_every", "10", "--engine.eval_every", "25",
    "--engine.checkpoint_every", "25", "--engine.threads", "1", "--model.norm", "group", "--sparsity.pattern", "2:4", "--data.crop", "1",
    "--schedule.warmup", "5", "--optim.lr", "0.02", "--device", "cpu",
]  # fmt: skip


def run(out: Path, processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start = torchrun if processes > 1 else [sys.executable]
    return subprocess.run([*start, "-m", "nofm", *OPTIONS, "--out", str(out), *options], capture_output=True, text=True)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    result = run(out, 1)
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_as_one(parallel, one, tmp_path):
    out = tmp_path / "run"
    result = run(out, 2, "--engine.parallel", parallel)
    assert result.returncode == 0, result.stderr
    assert_alike(out, one)
    # And when it goes on from the middle, in two new processes.
    second = tmp_path / "resumed"
    assert run(second, 2, "--engine.parallel", parallel, "--engine.steps", "25").returncode == 0
    result = run(second, 2, "--engine.parallel", parallel, "--resume", "--allow_change")
    assert result.returncode == 0, result.stderr
    assert Store(second / "checkpoints").latest() == 50


def assert_alike(out: Path, one: Path) -> None:
    wanted, found = (Store(folder / "checkpoints").load()["model"] for folder in (one, out))
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-6, rtol=0)
    for name in ("conv2.weight", "conv3.weight"):
        assert torch.equal(nofm.mask(found[name], "2:4"), nofm.mask(wanted[name], "2:4"))
    assert nofm.verify(out / "model.safetensors").ok
    kinds = [[(e["event"], e["step"]) for e in events(folder)] for folder in (one, out)]
    assert kinds[0] == kinds[1]
    for a, b in zip(events(one), events(out), strict=True):
        if a["event"] == "sad":
            assert a["changed"] == b["changed"]
        if a["event"] == "eval":
            assert a["metrics"]["accuracy"] == pytest.approx(b["metrics"]["accuracy"])
        if a["event"] == "train":
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_a_checkpoint_of_one_process_is_not_resumed_by_two(one, tmp_path):
    import shutil

    shutil.copytree(one, tmp_path / "run")
    result = run(tmp_path / "run", 2, "--resume")
    assert result.returncode != 0
    assert "is of 1 processes and cannot be resumed exactly by 2" in result.stderr
