"""Weights spread over processes: FSDP2 and tensor parallelism give the masks and weights of one process, or say that they cannot.

Both processes are real and talk over gloo (`two_ranks`); the jobs are in `shard_jobs`. Each test looks at what one job brought back
from both ranks.
"""

from __future__ import annotations

import functools

import pytest
import rank_jobs
import shard_jobs
import two_ranks

import nofm

METHODS = {
    "srste": rank_jobs.SRSTE,
    "decoupled": nofm.SRSTE(decay=0.05, placement="decoupled"),
    "backward": nofm.SRSTE(decay=0.05, placement="backward"),
    "asp, at once": nofm.ASP(),
    "asp, at step 4": nofm.ASP(prune_at=4),
}
FSDP = {
    f"fsdp: {name}, {optimizer}, {'sparsify_ first' if sparsify_first else 'fully_shard first'}, {'by layer' if by_layer else 'at once'}": (
        functools.partial(shard_jobs.fsdp, sparsify_first=sparsify_first, by_layer=by_layer, optimizer=optimizer, method=method)
    )
    for name, method in METHODS.items()
    if name != "backward"  # whose lambda doubles in the two backward passes of the one process
    for sparsify_first, by_layer, optimizer in ((True, True, "sgd"), (False, True, "adamw"), (False, False, "sgd"))
}
AXIS_0 = {
    f"axis 0: {kind}, {inputs} inputs, {'fully_shard' if shard_first else 'sparsify_'} first": functools.partial(
        shard_jobs.groups_along_the_cut_axis, kind=kind, inputs=inputs, shard_first=shard_first
    )
    for kind in shard_jobs.AXIS_0
    for inputs in (16, 12)
    for shard_first in (True, False)
}
TP = {
    f"tp: {name}, {'sparsify_ first' if sparsify_first else 'parallelize_module first'}": functools.partial(
        shard_jobs.tensor_parallel, sparsify_first=sparsify_first, method=method
    )
    for name, method in METHODS.items()
    for sparsify_first in (True, False)
}
TP_CUT = {
    "sparsify_ first": functools.partial(shard_jobs.tensor_parallel, sparsify_first=True, method=nofm.STE(), hidden=12),
    "parallelize_module first": functools.partial(shard_jobs.tensor_parallel, sparsify_first=False, method=nofm.STE(), hidden=12),
}
JOBS = {
    **FSDP,
    **AXIS_0,
    **TP,
    **{f"tp, cut: {order}": job for order, job in TP_CUT.items()},
    "after a forward": shard_jobs.attach_after_a_forward_without_backward,
    "fold after a forward": shard_jobs.fold_after_a_forward,
    "fold of cut groups": shard_jobs.fold_of_cut_groups,
    "packed": shard_jobs.packed_by_all,
    "movement": functools.partial(shard_jobs.movement, spread=True),
    "movement, one process": functools.partial(shard_jobs.movement, spread=False),
    "sharded after attach": shard_jobs.sharded_after_attach,
    "flattened": shard_jobs.flattened,
    "replicated": shard_jobs.lambda_on_a_replicated_weight,
}


@pytest.fixture(scope="module")
def results() -> dict:
    found = two_ranks.run(JOBS)
    two_ranks.assert_all_ran(found)
    return found


@pytest.mark.parametrize("job", FSDP)
def test_fsdp2_trains_and_folds_as_one_process_does(results, job):
    for rank in results[job]:
        assert rank["same masks"]
        assert rank["farthest weight"] < 1e-6
        assert rank["fold differs by"] == 0.0
        assert rank["zeros"] == [0.5, 0.5, 0.5, 0.5]
        assert rank["still spread"]
        assert rank["plain"]
        if "asp" not in job:
            assert rank["mask changes"] >= 3


@pytest.mark.parametrize("job", AXIS_0)
def test_groups_along_the_axis_that_fsdp2_cuts(results, job):
    for rank in results[job]:
        if "16 inputs" in job:
            assert rank["same masks"]
            assert rank["fold differs by"] < 1e-6
        else:
            shape = "(12, 8, 2, 2)" if "convolution" in job else "(12, 8)"
            assert f"0: axis 0 of shape {shape} is spread over 2 processes in parts of 6, which cuts groups of 2:4" in rank["refused"]


def test_attach_after_a_forward_without_backward(results):
    for rank in results["after a forward"]:
        assert rank["shows copies"]  # the trap is there
        assert rank["same masks"]
        assert rank["farthest weight"] < 1e-6


def test_fold_after_a_forward_without_backward_writes_to_the_parameters(results):
    for zeros in results["fold after a forward"]:
        assert zeros == [0.5] * 4


def test_the_movement_of_a_sharded_model_is_that_of_one_process_however_often_it_is_asked_for(results):
    (alone, _), _ = results["movement, one process"]
    assert results["movement"] == [[alone, alone], [alone, alone]]


def test_a_sharded_model_is_packed_by_all_and_written_by_the_first(results):
    first, second = results["packed"]
    assert first == {"written": True, "same": True, "bytes": second["bytes"]}
    assert not second["written"]


def test_fold_of_groups_that_are_cut_is_refused(results):
    for message in results["fold of cut groups"]:
        assert "0: axis 0 of shape (12, 8, 1, 1) is spread over 2 processes" in message


def test_sharding_after_attach_is_noticed_in_the_next_step(results):
    for message in results["sharded after attach"]:
        assert "0.weight is no longer the parameter that the optimizer owns" in message


def test_flattened_weights_are_refused(results):
    for message in results["flattened"]:
        assert "FullyShardedDataParallel flattens weights" in message
        assert "use fully_shard" in message


@pytest.mark.parametrize("job", TP)
def test_tensor_parallelism_trains_as_one_process_does(results, job):
    for rank in results[job]:
        assert rank["same masks"]
        assert rank["farthest weight"] < 1e-6


@pytest.mark.parametrize("order", TP_CUT)
def test_tensor_parallelism_that_cuts_groups_is_refused(results, order):
    name = "a weight in forward" if order == "sparsify_ first" else "2"
    for rank in results[f"tp, cut: {order}"]:
        assert rank["refused"].startswith(f"{name}: axis 1 of shape (8, 12) is spread over 2 processes in parts of 6")


def test_lambda_counts_once_on_a_replicated_weight(results):
    assert results["replicated"] == pytest.approx([0.0, 0.0], abs=1e-6)
