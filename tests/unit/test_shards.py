"""Where groups of weights that are spread over processes are cut, and that parts and wholes fit together again.

Whether a boundary cuts a group is decided by arithmetic; here the boundaries are laid out one by one, first for the arithmetic
alone, then for real DTensors on a pretended mesh (torch's "fake" backend: one process that believes in all the others).
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import nofm
from nofm import shards, ste
from nofm.masks import Grouping

WORLD = 24


@pytest.fixture(scope="module")
def meshes():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield lambda *shape: DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).view(shape))
    distributed.destroy_process_group()


def boundaries(size: int, counts: list[int]) -> set[int]:
    """All ends of parts, found by cutting a row of numbers with torch.chunk, again and again."""
    parts = [torch.arange(size)]
    for count in counts:
        parts = [piece for part in parts if len(part) for piece in part.chunk(count)]
    return {int(part[-1]) + 1 for part in parts if len(part)} - {size}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_arithmetic_is_right_about_every_small_case(depth):
    verdicts = []
    for size, m in itertools.product(range(1, 33), (1, 2, 3, 4, 8)):
        for counts in itertools.product(range(1, 9) if depth == 1 else (2, 3, 4, 8), repeat=depth):
            for unit in (1, 2, 3):
                truth = any(end * unit % m for end in boundaries(size, list(counts)))
                assert shards.cuts_groups(size, unit, m, counts) == truth, (size, unit, m, counts)
                verdicts.append(truth)
    assert 0.2 < sum(verdicts) / len(verdicts) < 0.8  # both answers are common


def test_the_arithmetic_is_right_about_random_large_cases():
    rng = random.Random(0)
    for _ in range(2000):
        m = rng.choice([2, 4, 8, 16, 32])
        size = m * rng.randint(1, 200) + rng.choice([0, 0, 0, 1, m // 2])
        counts = [rng.randint(1, 8) for _ in range(rng.randint(1, 2))]
        truth = any(end % m for end in boundaries(size, counts))
        assert shards.cuts_groups(size, 1, m, counts) == truth, (size, m, counts)


PLACED = {
    # a shape, the mesh, how it is placed, how it is grouped, whether a group is cut
    "inputs whole under FSDP2": ((6, 8), (4,), [Shard(0)], Grouping(nofm.Pattern("2:4"), 1), False),
    "transposed, parts of 8": ((16, 6), (2,), [Shard(0)], Grouping(nofm.Pattern("2:4"), 0), False),
    "transposed, parts of 6": ((12, 6), (2,), [Shard(0)], Grouping(nofm.Pattern("2:4"), 0), True),
    "row-parallel, parts of 8": ((6, 16), (2,), [Shard(1)], Grouping(nofm.Pattern("2:4"), 1), False),
    "row-parallel, parts of 6": ((6, 12), (2,), [Shard(1)], Grouping(nofm.Pattern("2:4"), 1), True),
    "negative axes": ((6, 12), (2,), [Shard(1)], Grouping(nofm.Pattern("2:4"), -1), True),
    "replicated": ((6, 12), (2,), [Replicate()], Grouping(nofm.Pattern("2:4"), 1), False),
    "one process": ((6, 12), (1,), [Shard(1)], Grouping(nofm.Pattern("2:4"), 1), False),
    "a short last part is cut again": ((10, 4), (3, 2), [Shard(0), Shard(0)], Grouping(nofm.Pattern("1:2"), 0), True),
    "a short last group": ((4, 10), (3,), [Shard(1)], Grouping(nofm.Pattern("2:4"), 1, pad=True), False),
    "flat rows, cut between channels": ((4, 8, 3, 3), (2,), [Shard(1)], Grouping(nofm.Pattern("2:4"), "flat"), False),
    "flat rows, cut in a group": ((4, 4, 3, 3), (2,), [Shard(1)], Grouping(nofm.Pattern("2:4"), "flat"), True),
    "flat rows, cut along the kernel": ((4, 4, 4, 4), (2,), [Shard(2)], Grouping(nofm.Pattern("2:4"), "flat"), True),
    "flat rows under FSDP2": ((4, 4, 3, 3), (2,), [Shard(0)], Grouping(nofm.Pattern("2:4"), "flat"), False),
}


@pytest.mark.parametrize(("shape", "mesh", "placements", "grouping", "cut"), PLACED.values(), ids=PLACED)
def test_weights_on_a_mesh(meshes, shape, mesh, placements, grouping, cut):
    weight = distribute_tensor(torch.randn(shape), meshes(*mesh), placements, src_data_rank=None)
    if not cut:
        shards.check_groups_whole("layer", weight, grouping)
        assert shards.mask(weight, grouping).placements == tuple(placements)
        return
    with pytest.raises(nofm.LayerError, match=r"layer: axis \d of shape \(.*\) is spread over \d processes in parts of \d"):
        shards.check_groups_whole("layer", weight, grouping)
    with pytest.raises(nofm.LayerError, match="which cuts groups of"):  # and so in a forward
        ste.straight_through(weight, grouping, None)


def test_a_refusal_names_layer_shape_axis_and_parts(meshes):
    weight = distribute_tensor(torch.randn(12, 6), meshes(2), [Shard(0)], src_data_rank=None)
    message = r"up: axis 0 of shape \(12, 6\) is spread over 2 processes in parts of 6, which cuts groups of 2:4; leave this layer unsh"
    with pytest.raises(nofm.LayerError, match=message):
        shards.check_groups_whole("up", weight, Grouping(nofm.Pattern("2:4"), 0))


@pytest.mark.parametrize(("inputs", "cut"), [(24, True), (48, False)])
def test_fsdp2_on_top_of_tensor_parallelism(meshes, inputs, cut):
    """Its placement is a strided shard, which does not call itself a shard: 48 rows over 2 x 3 processes are parts of 8."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (4, 3, 2), mesh_dim_names=("other", "dp", "tp"))
    layer = nn.Sequential(nn.Linear(8, inputs))
    parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(layer, mesh=mesh["dp"])
    weight, grouping = layer[0].weight, Grouping(nofm.Pattern("2:8"), 0)
    assert weight.to_local().shape == (inputs // 6, 8)
    assert len(shards.groups_of(weight)) == 2
    if cut:
        with pytest.raises(nofm.LayerError, match=rf"axis 0 of shape \({inputs}, 8\) is spread over 6 processes in parts of 4"):
            shards.check_groups_whole("layer", weight, grouping)
    else:
        shards.check_groups_whole("layer", weight, grouping)


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_a_mask_are_masks_of_parts(meshes, axis):
    """For every process of the mesh in turn."""
    grouping, whole = Grouping(nofm.Pattern("2:4"), 0), torch.randn(16, 8)
    mask = grouping.mask(whole)
    for part_of_weight, part_of_mask in zip(whole.chunk(2, axis), mask.chunk(2, axis), strict=True):
        assert torch.equal(grouping.mask(part_of_weight), part_of_mask)
    spread = distribute_tensor(whole, meshes(2), [Shard(axis)], src_data_rank=None)
    assert torch.equal(shards.part_of(mask, spread), mask.chunk(2, axis)[0])
    assert torch.equal(shards.local(shards.mask(spread, grouping)), mask.chunk(2, axis)[0])
    joined = shards.joined(shards.part_of(mask, spread), spread)
    assert isinstance(joined, DTensor)
    assert joined.shape == mask.shape


def test_plain_tensors_go_through_untouched():
    weight, grouping = torch.randn(4, 8), Grouping(nofm.Pattern("2:4"), 1)
    for function in (shards.local, shards.whole):
        assert function(weight) is weight
    for function in (shards.part_of, shards.whole_of, shards.spread, shards.joined):
        assert function(weight, weight) is weight
    assert shards.groups_of(weight) == []
    assert torch.equal(shards.mask(weight, grouping), grouping.mask(weight))
    shards.check_groups_whole("layer", torch.randn(4, 6), grouping)
    assert not shards.gathers(weight, weight.clone())
