"""Optical-flow data: what augmentation does to flow, and loaders that are functions of seed and step."""

from __future__ import annotations

from pathlib import Path

import flow_scenes
import pytest
import torch
from torch.nn import functional as F

from nofm.data.errors import DataError
from nofm.data.flow import FlowArrays, FlowFiles, ResidentFlow, read_example
from nofm.data.flow_augment import Augmentation, Example, augment, crop, flip, resize
from nofm.data.flow_layouts import find_pairs
from nofm.data.loader import batches
from nofm.data.order import Order, Share
from nofm.data.stamp_sets import as_arrays, write_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def chairs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("chairs")
    made = flow_scenes.some_pairs(5)
    write_folder(root / "FlyingChairs", made[:4], made[4:])
    return root


# ---- augmentation ----


def example_of(pair) -> Example:
    frames = (torch.from_numpy(x).permute(2, 0, 1) for x in (pair.frame1, pair.frame2))
    return Example(*frames, torch.from_numpy(pair.flow).permute(2, 0, 1), torch.from_numpy(~pair.occluded))


def misfit(example: Example) -> tuple[float, float]:
    """How far frame 2 at pixel + flow is from frame 1, and without the flow, where it is valid and inside."""
    height, width = example.valid.shape
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    there = torch.stack([x, y]) + example.flow
    limits = torch.tensor([width - 1, height - 1]).view(2, 1, 1)
    inside = example.valid & (there >= 0).all(0) & (there <= limits).all(0)
    grid = (2 * there / limits - 1).permute(1, 2, 0)[None]
    seen = F.grid_sample(example.image2[None].float(), grid, align_corners=True)[0]
    first = example.image1.float()
    return (seen - first).abs()[:, inside].mean().item(), (example.image2.float() - first).abs()[:, inside].mean().item()


CHANGES = {
    "nothing": lambda e: e,
    "crop": lambda e: crop(e, 5, 9, (96, 104)),
    "mirror": lambda e: flip(e, True, False),
    "upside down": lambda e: flip(e, False, True),
    "both": lambda e: flip(e, True, True),
    "larger": lambda e: resize(e, 200, 260),
    "smaller, stretched": lambda e: resize(e, 120, 100),
}


BACKGROUND = flow_scenes.render(flow_scenes.scene(136, 152, flow_scenes.affine((4.3, -3.1), 0.03, 1.02, (70, 60))))


@pytest.mark.parametrize("pair", [BACKGROUND, *flow_scenes.some_pairs(2)], ids=["dense", "sparse", "another"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_flow_follows_what_is_done_to_the_frames(change, pair):
    whole = example_of(pair)
    if pair is BACKGROUND:  # nothing is hidden
        whole = Example(whole.image1, whole.image2, whole.flow, torch.ones_like(whole.valid))
    before, still = misfit(whole)
    after, _ = misfit(change(whole))
    assert after < before + 2.5 < 0.5 * still


def test_sparse_flow_is_moved_and_never_mixed_with_what_is_unknown():
    flow, valid = torch.zeros(2, 4, 6), torch.zeros(4, 6, dtype=torch.bool)
    flow[:, 1, 2], valid[1, 2] = torch.tensor([3.0, -2.0]), True
    image = torch.zeros(3, 4, 6, dtype=torch.uint8)
    larger = resize(Example(image, image, flow, valid), 8, 18)
    assert larger.valid.nonzero().tolist() == [[3, 7]]
    assert larger.flow[:, 3, 7].tolist() == [9.0, -4.0]
    assert larger.flow.abs().sum() == 13


def test_augmentation_is_a_function_of_its_generator_and_gives_the_crops_size():
    whole, a = example_of(flow_scenes.some_pairs(1)[0]), Augmentation(size=(128, 144))
    made = [augment(whole, a, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(made[0].image1, made[1].image1)
    assert not torch.equal(made[0].image1, made[2].image1)
    shapes = [(3, 128, 144), (3, 128, 144), (2, 128, 144), (128, 144)]
    assert [tuple(x.shape) for x in (made[0].image1, made[0].image2, made[0].flow, made[0].valid)] == shapes
    assert (made[0].image1.dtype, made[0].flow.dtype, made[0].valid.dtype) == (torch.uint8, torch.float32, torch.bool)


def test_flow_survives_every_augmentation_of_geometry():
    plain = Augmentation(size=(128, 136), colour=0, hue=0, erase_chance=0, stretch_chance=1, scale_chance=1, upside_down_chance=0.5)
    for seed, pair in enumerate(flow_scenes.some_pairs(6)):
        moved, still = misfit(augment(example_of(pair), plain, torch.Generator().manual_seed(seed)))
        assert moved < 6 < 0.5 * still


def test_frames_smaller_than_the_crop_are_enlarged_and_a_bare_crop_refuses():
    whole = example_of(flow_scenes.some_pairs(1)[0])
    made = augment(whole, Augmentation(size=(160, 160), scale_chance=0), torch.Generator().manual_seed(0))
    assert made.valid.shape == (160, 160)
    with pytest.raises(DataError, match="frames of 136x152 pixels are too small for a crop of 160x160"):
        crop(whole, 0, 0, (160, 160))


# ---- the resident loader ----


@pytest.fixture(scope="module")
def arrays() -> FlowArrays:
    found = as_arrays(flow_scenes.some_pairs(8))
    valid = torch.rand(8, 136, 152, generator=torch.Generator().manual_seed(0)) < 0.9
    return FlowArrays(found.frames1, found.frames2, found.flow, valid)


def resident(arrays: FlowArrays, seed: int = 7, **share: int) -> ResidentFlow:
    return ResidentFlow(arrays, arrays[:3], Order(8, 4, seed), Share(**share), CPU, (128, 144))


def take(loader, start: int, count: int) -> list[dict[str, torch.Tensor]]:
    found = batches(loader, start)
    return [next(found) for _ in range(count)]


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() == {"image1", "image2", "flow", "valid"}
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_resident_loader_is_the_same_from_any_step_and_for_any_number_of_processes(arrays):
    straight = take(resident(arrays), 0, 7)
    for a, b in zip(straight[5:], take(resident(arrays), 5, 2), strict=True):
        assert_same(a, b)
    halves = [take(resident(arrays, rank=rank, world=2), 0, 3) for rank in (0, 1)]
    quarters = take(resident(arrays, accumulate=4), 0, 4)
    for name in straight[0]:
        assert torch.equal(torch.cat([halves[0][2][name], halves[1][2][name]]), straight[2][name])
        assert torch.equal(torch.cat([q[name] for q in quarters]), straight[0][name])
    assert not torch.equal(take(resident(arrays, seed=8), 0, 1)[0]["image1"], straight[0]["image1"])


def test_a_resident_batch_is_cut_and_turned_as_its_key_says(arrays):
    loader = resident(arrays)
    turns = set()
    for key in [next(keys) for keys in [loader.keys(0)] for _ in range(8)]:
        made = loader.make(key)
        for row, (index, top, left, mirror, turn) in enumerate(key["key"].tolist()):
            turns.add((mirror, turn))
            one = Example(arrays.frames1[index], arrays.frames2[index], arrays.flow[index] / 64, arrays.valid[index])
            expected = flip(crop(one, top, left, (128, 144)), bool(mirror), bool(turn))
            assert torch.allclose(made["image1"][row], expected.image1 / 127.5 - 1)
            assert torch.allclose(made["image2"][row], expected.image2 / 127.5 - 1)
            assert torch.equal(made["flow"][row], expected.flow)
            assert torch.equal(made["valid"][row], expected.valid)
    assert len(turns) == 4


def test_resident_tests_are_whole_frames_shared_by_processes(arrays):
    (whole,) = resident(arrays).test()
    assert whole["image1"].shape == (3, 3, 136, 152)
    parts = [next(resident(arrays, rank=rank, world=2).test()) for rank in (0, 1)]
    assert [len(part["flow"]) for part in parts] == [2, 1]
    assert torch.equal(parts[1]["flow"][0], whole["flow"][1])


@pytest.mark.parametrize(
    ("size", "told"),
    [((124, 128), "divisible by 8"), ((64, 128), "at least 128"), ((128, 160), "larger than the frames of 136x152")],
)
def test_crops_that_raft_cannot_take_are_refused(arrays, size, told):
    with pytest.raises(DataError, match=told):
        ResidentFlow(arrays, arrays, Order(8, 4, 0), Share(), CPU, size)


def test_arrays_must_agree(arrays):
    with pytest.raises(DataError, match=r"flow of \(7, 2, 136, 152\) do not fit frames of \(8, 3, 136, 152\)"):
        FlowArrays(arrays.frames1, arrays.frames2, arrays.flow[:7])


# ---- loader processes ----


def files(root: Path, workers: int = 0, skip: bool = False, seed: int = 3, **share: int) -> FlowFiles:
    train, val = (find_pairs("chairs", root, part) for part in ("train", "val"))
    return FlowFiles(train, val, Order(len(train), 2, seed), Share(**share), Augmentation(size=(128, 144)), workers, skip=skip)


def test_a_file_loader_is_the_same_from_any_step_with_any_number_of_processes(chairs):
    straight = take(files(chairs), 0, 4)
    helped = files(chairs, workers=2)
    later = take(helped, 2, 2)
    helped.close()
    for a, b in zip(straight[2:], later, strict=True):
        assert_same(a, b)
    assert straight[0]["image1"].shape == (2, 3, 128, 144)
    assert not torch.equal(take(files(chairs, seed=4), 0, 1)[0]["flow"], straight[0]["flow"])
    halves = [take(files(chairs, rank=rank, world=2), 0, 1)[0] for rank in (0, 1)]
    assert torch.equal(torch.cat([h["flow"] for h in halves]), straight[0]["flow"])


def test_file_tests_are_whole_frames_one_by_one(chairs):
    (batch,) = files(chairs).test()
    assert batch["image1"].shape == (1, 3, 136, 152)
    example = read_example(find_pairs("chairs", chairs, "val")[0])
    assert torch.equal(batch["flow"][0], example.flow)
    assert torch.allclose(batch["image1"][0], example.image1 / 127.5 - 1)
    assert -1 <= batch["image1"].min() < batch["image1"].max() <= 1


def test_reading_pairs_does_not_touch_the_generator_of_dropout(chairs):
    before = torch.get_rng_state()
    take(files(chairs), 0, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_pair_is_named_or_skipped_and_counted(tmp_path, workers):
    made = flow_scenes.some_pairs(1) * 5
    write_folder(tmp_path, made[:4], made[4:])
    broken = tmp_path / "data" / "00003_flow.flo"
    broken.write_bytes(broken.read_bytes()[:100])
    loader = files(tmp_path, workers)
    with pytest.raises(DataError, match=r"00003_flow.flo: cut short"):
        take(loader, 0, 2)
    loader.close()
    skipping = files(tmp_path, workers, skip=True)
    assert sum(len(batch["flow"]) for batch in take(skipping, 0, 2)) == 4
    skipping.close()
    assert skipping.skipped == 1
