"""The same run in one process and in two, started by torchrun as a user would: same masks, weights within 1e-6 after 50 steps.

A sum over 32 images and two sums over 16 round differently, and a ReLU that this turns over makes a jump of 1e-5 (with seed 0, for
one). So the seed is one without such a jump, and the same micro-batches, taken one after the other, must give the same bits.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from short_runs import digests, events

import nofm
from nofm.engine.checkpoint import Store

# Group norm: batch norm would see half a batch in each process.
OPTIONS = [
    "train", "digits", "--engine.steps", "50", "--engine.batch_size", "32", "--engine.log_every", "10", "--engine.eval_every", "25",
    "--engine.checkpoint_every", "25", "--engine.threads", "1", "--model.norm", "group", "--sparsity.pattern", "2:4", "--data.crop", "1",
    "--schedule.warmup", "5", "--optim.lr", "0.02", "--device", "cpu", "--seed", "1",
]  # fmt: skip


def run(out: Path, processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    start = torchrun if processes > 1 else [sys.executable]
    return subprocess.run([*start, "-m", "nofm", *OPTIONS, "--out", str(out), *options], capture_output=True, text=True)


@pytest.fixture(scope="module")
def one_in_halves(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("halves") / "run"
    assert run(out, 1, "--engine.accumulate", "2").returncode == 0
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    result = run(out, 1)
    assert result.returncode == 0, result.stderr
    return out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_as_one(parallel, one, one_in_halves, tmp_path):
    out = tmp_path / "run"
    result = run(out, 2, "--engine.parallel", parallel)
    assert result.returncode == 0, result.stderr
    assert_alike(out, one, atol=1e-6)
    assert_alike(out, one_in_halves, atol=0)
    # And two new processes go on from the middle, as after a kill.
    whole = digests(out)
    shutil.rmtree(out / "checkpoints" / "step-00000050")
    (out / "checkpoints" / "latest").write_text("step-00000025\n")
    result = run(out, 2, "--engine.parallel", parallel, "--resume")
    assert result.returncode == 0, result.stderr
    assert "resumed from step 25" in result.stdout
    assert digests(out) == whole


def assert_alike(out: Path, one: Path, atol: float) -> None:
    wanted, found = (Store(folder / "checkpoints").load()["model"] for folder in (one, out))
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=atol, rtol=0)
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
    shutil.copytree(one, tmp_path / "run")
    result = run(tmp_path / "run", 2, "--resume")
    assert result.returncode != 0
    assert "is of 1 processes and cannot be resumed exactly by 2" in result.stderr
