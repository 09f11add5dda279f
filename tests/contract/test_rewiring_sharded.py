"""Methods that choose connections, in two processes: all choose the same, those of one process, with whole weights and with shards.

Both processes are real and talk over gloo (`two_ranks`); the jobs are in `rewiring_jobs`.
"""

from __future__ import annotations

import functools

import pytest
import rewiring_jobs
import two_ranks

import nofm

METHODS = {
    "set": nofm.SET(sparsity=0.8, every=3),
    "rigl": nofm.RigL(sparsity=0.8, every=3, end_at=100),
    "snfs": nofm.SNFS(sparsity=0.8, every=3),
    "dsr": nofm.DSR(sparsity=0.8, every=3, drop=0.05),
    "deepr": nofm.DeepRewiring(sparsity=0.8, l1=1e-2, temperature=1e-4),
}
JOBS = {
    f"{name}, {how}": functools.partial(rewiring_jobs.parallel, method=method, how=how)
    for name, method in METHODS.items()
    for how in ("fsdp", "ddp")
}


@pytest.fixture(scope="module")
def results() -> dict:
    found = two_ranks.run(JOBS)
    two_ranks.assert_all_ran(found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_choose_as_one(results, name):
    for result in results[name]:
        assert result["same masks"]
        assert result["mask changes"] >= 6  # of four layers, at steps 3, 6 and 9
        assert result["farthest weight"] < 1e-5
    first, second = (result["memory"] for result in results[name])
    assert {key: tensor.tolist() for key, tensor in first.items()} == {key: tensor.tolist() for key, tensor in second.items()}
