"""The two examples that have a training loop of their own, run as a reader would run them, but shorter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def scores(script: str, *options: str) -> dict[str, float]:
    """The accuracy of each row of the table that it prints."""
    command = [sys.executable, str(EXAMPLES / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    return {name.strip(): float(score) for name, score in re.findall(r"^│ (.+?) +│ +([\d.]+)", done.stdout, re.MULTILINE)}


def test_digits_trains_dense_ste_and_srste():
    found = scores("digits.py", "--seeds", "1", "--steps", "150")
    assert list(found) == ["dense", "STE", "SR-STE"]
    assert min(found.values()) > 85


@pytest.mark.parametrize("pattern", ["1:16", "2:4"])
def test_from_trained_weights_every_way_wins_back_what_pruning_has_lost(pattern):
    found = scores("from_trained.py", "--seeds", "1", "--steps", "150", "--more", "100", "--pattern", pattern)
    dense, pruned, again, *sparse = found.values()
    assert len(sparse) == 4
    assert pruned < dense - 2
    assert min(again, *sparse) > max(pruned + 1, 85)
