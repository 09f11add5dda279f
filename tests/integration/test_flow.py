"""Optical flow from files to metrics: RAFT overfits a handful of generated pairs in FlyingChairs' layout, dense and 2:4."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nofm
from nofm.data.flow import FlowFiles
from nofm.data.flow_augment import Augmentation
from nofm.data.flow_files import read_flow
from nofm.data.flow_layouts import find_pairs
from nofm.data.loader import batches
from nofm.data.order import Order, Share
from nofm.data.stamp_sets import write_folder
from nofm.data.stamp_sources import find_sources
from nofm.data.stamps import Motions, make_pairs
from nofm.tasks.flow import OpticalFlow, build_flow_model

SIDE = 128
EXAMPLES = Path(__file__).parents[2] / "examples"
AS_THEY_ARE = Augmentation(
    size=(SIDE, SIDE), scale_chance=0, mirror_chance=0, upside_down_chance=0, colour=0, hue=0, asymmetric_chance=0, erase_chance=0
)


def write_sources(root: Path) -> None:
    """Discs of noise as stamps, noise as photographs."""
    rng, axis = np.random.default_rng(0), np.arange(80) - 39.5
    disc = (255 * (np.hypot(axis[:, None], axis) < 38)).astype(np.uint8)
    for folder in ("stamps/discs", "photographs"):
        (root / folder).mkdir(parents=True)
    for i in range(5):
        coarse = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
        Image.fromarray(np.dstack([np.asarray(coarse.resize((80, 80))), disc])).save(root / "stamps" / "discs" / f"{chr(97 + i)}.png")
        coarse.resize((320, 320)).save(root / "photographs" / f"{chr(97 + i)}.jpg")


@pytest.fixture(scope="module")
def chairs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("flow")
    write_sources(root)
    slow = Motions(stamps=(1, 2), drift=2, stamp_drift=3, turn=0.01, zoom=0.01)
    made = list(make_pairs(find_sources(root, "train"), 3, SIDE, SIDE, seed=2, motions=slow))
    write_folder(root / "chairs", made, made)  # validation shows the same pairs: this is about fitting them
    return root / "chairs"


def overfit(root: Path, model: str, method: nofm.Method, steps: int, lr: float) -> tuple[dict[str, float], OpticalFlow]:
    """The paper's optimizer and schedule in an ordinary loop; metrics on the pairs that were trained on."""
    torch.manual_seed(0)
    train, val = (find_pairs("chairs", root, part) for part in ("train", "val"))
    loader = FlowFiles(train, val, Order(len(train), len(train), seed=0), Share(), AS_THEY_ARE)
    task = OpticalFlow(build_flow_model(model), updates=3)
    optimizer = torch.optim.AdamW(task.parameters(), lr=lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1, pct_start=0.05, anneal_strategy="linear")
    nofm.sparsify_(task.model, "2:4", preset="paper")
    nofm.attach(method, task.model, optimizer)
    for batch in islice(batches(loader, 0), steps):
        optimizer.zero_grad()
        task(batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return evaluated(task, loader), task


@torch.no_grad()
def evaluated(task: OpticalFlow, loader: FlowFiles) -> dict[str, float]:
    task.eval()
    sums: dict[str, float] = {}
    for batch in loader.test():
        for name, value in task.measure(batch).items():
            sums[name] = sums.get(name, 0.0) + value.item()
    return task.metrics(sums)


def assert_fits(root: Path, model: str, method: nofm.Method, steps: int, lr: float) -> None:
    found, task = overfit(root, model, method, steps, lr)
    still = np.mean([np.linalg.norm(read_flow(pair.flow)[0], axis=-1).mean() for pair in find_pairs("chairs", root, "val")])
    assert still > 2, "pairs that hardly move would be fitted by no motion"
    assert found["epe"] < 1
    assert found["outliers_3px"] < 10
    if not isinstance(method, nofm.Dense):
        dense = {f"{row.name}.weight" for row in nofm.summary(task.model).dense}
        nofm.fold_(task.model)
        assert {weight.name for weight in nofm.verify(task.model, "2:4").weights if not weight.ok} == dense


def test_a_sparse_raft_overfits_a_handful_of_pairs(chairs):
    assert_fits(chairs, "raft_tiny", nofm.SRSTE(decay=2e-4), steps=50, lr=4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", [nofm.Dense(), nofm.SRSTE(decay=2e-4)], ids=["dense", "srste"])
@pytest.mark.parametrize(("model", "steps"), [("raft_small", 80), ("raft_large", 50)])
def test_torchvisions_rafts_overfit_a_handful_of_pairs(chairs, model, steps, method):
    assert_fits(chairs, model, method, steps, lr=1e-3)


@pytest.mark.slow
def test_the_examples_make_pairs_train_and_leave_results(tmp_path):
    """make_stamps.py and flow.py as a user runs them, at toy size, on packs, on rendered pairs and on a FlyingChairs folder."""
    write_sources(tmp_path)
    run = lambda *words: subprocess.run([sys.executable, *map(str, words)], cwd=tmp_path, check=True)  # noqa: E731
    few = ("--pairs", 2, "--val-pairs", 1)
    run(EXAMPLES / "make_stamps.py", tmp_path, *few, "--size", 128, 136, "--pack", "set", "--folder", "chairs", "--sources", "small")
    toy = ("--model", "raft_tiny", "--steps", 2, "--batch", 2, "--crop", 128, 128, "--updates", 2, "--test-updates", 2, "--device", "cpu")
    sources = (
        ("--pack", "set-train.npz", "set-val.npz", "--method", "srste", "--placement", "decoupled", "--precision", "bf16"),
        ("--sources", "small", *few, "--frame", 128, 136, "--method", "dense", "--eval", "chairs=chairs"),
        ("--chairs", "chairs", "--method", "ste", "--pattern", "1:4", "--seeds", 0, 1),
    )
    for number, words in enumerate(sources):
        run(EXAMPLES / "flow.py", *words, *toy, "--out", f"{number}.json", "--pictures", "pictures")
        found = json.loads((tmp_path / f"{number}.json").read_text())
        assert len(found["runs"]) == (2 if number == 2 else 1)
        assert all(np.isfinite(run["eval"][-1]["epe"]) for run in found["runs"])
    assert len(list((tmp_path / "pictures").glob("*.png"))) >= 3
