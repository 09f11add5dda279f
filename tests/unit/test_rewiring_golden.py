"""Fifty steps of SET, RigL, SNFS, DSR and DEEP R on the digits: the losses are those of tests/golden/rewiring.json.

A change of them is a change of the method. If it is meant, `python tests/unit/test_rewiring_golden.py` writes the file again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import nofm
from nofm.tasks.models import build_model

GOLDEN = Path(__file__).parent.parent / "golden" / "rewiring.json"
METHODS: dict[str, nofm.Method] = {
    "set": nofm.SET(every=10),
    "rigl, erk": nofm.RigL(every=10, end_at=40),
    "rigl, uniform": nofm.RigL(allocation="uniform", every=10, end_at=40),
    "snfs": nofm.SNFS(every=10),
    "dsr": nofm.DSR(every=10),
    "deepr": nofm.DeepRewiring(l1=1e-3, temperature=1e-6),
}
STEPS = 50


def losses(method: nofm.Method) -> list[float]:
    """The mean losses of steps 1 to 25 and 26 to 50."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    model = build_model("cnn", 10, 1)
    nofm.sparsify_(model, "1:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    nofm.attach(method, model, optimizer)
    found = []
    for _ in range(STEPS):
        chosen = torch.randint(len(images), (32,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [sum(found[:25]) / 25, sum(found[25:]) / 25]


@pytest.mark.parametrize("name", METHODS)
def test_fifty_steps(name):
    assert losses(METHODS[name]) == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-4)


def test_the_golden_runs_learn_and_differ():
    golden = json.loads(GOLDEN.read_text())
    assert set(golden) == set(METHODS)
    assert all(last < 0.8 * first for first, last in golden.values())
    assert len({last for _, last in golden.values()}) == len(golden)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: losses(method) for name, method in METHODS.items()}, indent=2) + "\n")
