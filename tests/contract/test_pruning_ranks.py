"""Methods that prune by rank or threshold choose the same in two processes (DDP, FSDP2) as in one that sees all of every batch.

In float64, so that the order of sums decides no rank; the processes are real and talk over gloo.
"""

from __future__ import annotations

import functools

import prune_jobs
import pytest
import torch
import two_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results():
    found = two_ranks.run({name: functools.partial(prune_jobs.compared, name=name) for name in prune_jobs.METHODS})
    two_ranks.assert_all_ran(found)
    return found


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", prune_jobs.METHODS)
def test_two_processes_train_the_network_of_one(results, name, how):
    for rank in range(two_ranks.WORLD):
        alone, together = results[name][rank]["alone"], results[name][rank][how]
        assert list(alone) == list(together)
        for key in alone:
            assert torch.equal(alone[key] != 0, together[key] != 0), key
            torch.testing.assert_close(together[key], alone[key], rtol=1e-8, atol=1e-10)
