"""Fifty steps of GMP, STR, top-k STE, DNW, SNIP, lottery tickets and SR-STE with a lambda of its own on the digits: the losses are those
of tests/golden/pruning.json.

A change of them is a change of the method. If it is meant, `python tests/unit/test_pruning_golden.py` writes the file again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_runs import losses

import nofm

GOLDEN = Path(__file__).parent.parent / "golden" / "pruning.json"
METHODS: dict[str, tuple[str, nofm.Method]] = {
    "gmp, uniform": ("1:1", nofm.GMP(begin_at=5, end_at=40, every=5)),
    "gmp, erk": ("1:1", nofm.GMP(begin_at=5, end_at=40, every=5, allocation="erk")),
    "gmp, global": ("1:1", nofm.GMP(begin_at=5, end_at=40, every=5, allocation="global")),
    "str": ("1:1", nofm.STR(initial=-3.0)),
    "ste, uniform": ("1:1", nofm.UnstructuredSTE()),
    "ste, erk": ("1:1", nofm.UnstructuredSTE(allocation="erk")),
    "ste, global": ("1:1", nofm.UnstructuredSTE(allocation="global")),
    "dnw": ("1:1", nofm.DNW()),
    "snip": ("1:1", nofm.SNIP(batches=2)),
    "lottery": ("1:1", nofm.LotteryTicket(rounds=2, every=20, rewind_to=5)),
    "srste, auto": ("1:16", nofm.SRSTE(decay="auto", probe=30)),
}


# The search compares counts of flips, which the last bit of a weight can tip: kernels of another processor find a lambda a little beside,
# and what follows the search is beside too.
BESIDE = {"srste, auto": 1e-2}


@pytest.mark.parametrize("name", METHODS)
def test_fifty_steps(name):
    (early, late), golden = losses(*METHODS[name]), json.loads(GOLDEN.read_text())[name]
    assert early == pytest.approx(golden[0], rel=1e-4)
    assert late == pytest.approx(golden[1], rel=BESIDE.get(name, 1e-4))


def test_the_golden_runs_learn_and_differ():
    golden = json.loads(GOLDEN.read_text())
    assert set(golden) == set(METHODS)
    assert all(last < 0.85 * first for first, last in golden.values())
    assert golden["dnw"] == golden["ste, uniform"], "on layers they are one method"
    assert len({last for _, last in golden.values()}) == len(golden) - 1


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: losses(*case) for name, case in METHODS.items()}, indent=2) + "\n")
