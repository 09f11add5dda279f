"""Data-parallel training: two processes hold the same masks in every step, train as one process would, and a difference is named.

Both processes are real and talk over gloo (`two_ranks`); the jobs are in `rank_jobs`. Each test looks at what one job brought back
from both ranks.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import rank_jobs
import torch
import two_ranks
from torch import nn

import nofm
from nofm.analysis.ranks import check_ranks, fingerprints

TIE_STEPS = 200

METHODS = {"srste": rank_jobs.SRSTE, "dense": nofm.Dense(), "asp, at once": nofm.ASP(), "asp, at step 4": nofm.ASP(prune_at=4)}
DDP = {
    f"ddp: {name}, {order}": functools.partial(rank_jobs.ddp, order=order, method=method)
    for name, method in METHODS.items()
    for order in ("sparsify attach wrap", "sparsify wrap attach", "wrap sparsify attach")
}
PLANTED = {
    "nothing": ("nothing", [], []),
    "same mask": ("nothing", [], []),
    "one weight": ("MaskDivergenceError", ["1"], [1]),
    "two layers": ("MaskDivergenceError", ["0", "2"], [1]),
    "frozen, nothing": ("nothing", [], []),
    "frozen, one bit": ("MaskDivergenceError", ["2"], [1]),
    "other layers": ("LayerError", [], []),
}
JOBS = {
    **DDP,
    **{f"planted: {plant}": functools.partial(rank_jobs.planted, plant=plant) for plant in PLANTED},
    "ties": functools.partial(rank_jobs.masks_with_ties, steps=TIE_STEPS),
    "batch norm": rank_jobs.ddp_with_batch_norm,
    "zero redundancy": rank_jobs.sharded_optimizer,
    "a group": rank_jobs.planted_in_a_group,
}


@pytest.fixture(scope="module")
def results() -> dict:
    found = two_ranks.run(JOBS)
    two_ranks.assert_all_ran(found)
    return found


@pytest.mark.parametrize("job", DDP)
def test_ddp_trains_as_one_process_does(results, job):
    for rank in results[job]:
        assert rank["same masks"]
        assert rank["farthest weight"] < 1e-6
        if "srste" in job or "dense" in job:
            assert rank["mask changes"] >= 3  # or it would be no wonder that they are the same


def test_masks_are_identical_in_every_step_though_magnitudes_tie(results):
    a, b = results["ties"]
    assert len(a["masks"]) == TIE_STEPS
    differing = [step for step, (x, y) in enumerate(zip(a["masks"], b["masks"], strict=True)) if x != y]
    assert not differing
    assert a["ties"] > TIE_STEPS  # several tied groups each time they are looked for
    assert sum(x != y for x, y in itertools.pairwise(a["masks"])) > TIE_STEPS / 2


def test_frozen_masks_survive_the_broadcast_of_buffers(results):
    for rank in results["batch norm"]:
        assert rank == {"frozen": True, "zeros": True, "mask buffers": 2, "steps": rank_jobs.STEPS}


def test_an_optimizer_that_is_spread_over_ranks(results):
    for rank in results["zero redundancy"]:
        assert rank["same masks"]
        assert rank["farthest weight"] < 1e-6
        assert rank["mask changes"] >= 3


@pytest.mark.parametrize(("plant", "told"), PLANTED.items(), ids=PLANTED)
def test_a_planted_difference_is_named_on_every_rank(results, plant, told):
    assert results[f"planted: {plant}"] == [told, told]


def test_ranks_are_compared_within_their_group(results):
    for message in results["a group"]:
        assert message.startswith("masks differ between ranks: weight on rank(s) 1 are not those of rank 0.")


# ---- fingerprints, in one process ----


def sparse_linear() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(16, 24)
    nofm.sparsify_(layer, "2:4")
    return layer


def test_every_single_bit_has_its_own_fingerprint():
    layer = sparse_linear()
    site = next(nofm.sites(layer))
    site.freeze(site.mask())
    seen = {fingerprints(layer)["weight"]}
    for index in range(site.stored_mask.numel()):
        site.stored_mask.view(-1)[index] ^= True
        seen.add(fingerprints(layer)["weight"])
        site.stored_mask.view(-1)[index] ^= True
    assert len(seen) == 1 + site.stored_mask.numel()


def test_masks_with_the_same_number_of_bits_in_every_byte_differ():
    """What a plain sum of bytes, or of bits, would not see: groups that trade their patterns."""
    layer = sparse_linear()
    site = next(nofm.sites(layer))
    mask = site.mask()
    seen = set()
    for shift in range(len(mask)):
        site.freeze(mask.roll(shift, 0))
        seen.add(fingerprints(layer)["weight"])
    assert len(seen) == len(mask)


def test_fingerprints_are_of_masks_not_of_weights():
    layer = sparse_linear()
    before = fingerprints(layer)
    with torch.no_grad():
        layer.weight.mul_(-3)
    assert fingerprints(layer) == before
    assert list(before) == ["weight"]
    assert isinstance(before["weight"], int)


def test_without_processes_there_is_nothing_to_check():
    with pytest.raises(nofm.NofmError, match=r"there is no process group; call torch.distributed.init_process_group first"):
        check_ranks(sparse_linear())


def test_without_sparse_layers_there_is_nothing_to_check():
    with pytest.raises(nofm.LayerError, match="this Linear has no sparse layer; sparsify_ comes first"):
        fingerprints(nn.Linear(4, 4))
