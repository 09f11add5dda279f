"""Fifty steps of SET, RigL, SNFS, DSR and DEEP R on the digits: the losses are those of tests/golden/rewiring.json.

A change of them is a change of the method. If it is meant, `python tests/unit/test_rewiring_golden.py` writes the file again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_runs import losses

import nofm

GOLDEN = Path(__file__).parent.parent / "golden" / "rewiring.json"
METHODS: dict[str, nofm.Method] = {
    "set": nofm.SET(every=10),
    "rigl, erk": nofm.RigL(every=10, end_at=40),
    "rigl, uniform": nofm.RigL(allocation="uniform", every=10, end_at=40),
    "snfs": nofm.SNFS(every=10),
    "snfs, cosine": nofm.SNFS(every=10, end_at=40),
    "dsr": nofm.DSR(every=10),
    "deepr": nofm.DeepRewiring(l1=1e-3, temperature=1e-6),
}


# DEEP R draws in every step, and a weight whose sign hangs on a rounding differs from processor to processor (2e-4 was seen).
TOLERANCE = {"deepr": 1e-3}


@pytest.mark.parametrize("name", METHODS)
def test_fifty_steps(name):
    assert losses("1:1", METHODS[name]) == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=TOLERANCE.get(name, 1e-4))


def test_the_golden_runs_learn_and_differ():
    golden = json.loads(GOLDEN.read_text())
    assert set(golden) == set(METHODS)
    assert all(last < 0.8 * first for first, last in golden.values())
    assert len({last for _, last in golden.values()}) == len(golden)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: losses("1:1", method) for name, method in METHODS.items()}, indent=2) + "\n")
