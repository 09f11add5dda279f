"""Flying stamps: the flow is exact, layers lie in their order, pictures are held out whole, and sets on disk come back."""

from __future__ import annotations

import gc
import json
import weakref

import flow_scenes
import numpy as np
import pytest
import torch
from flow_scenes import affine, scene, some_pairs, warped_back
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from nofm.data.errors import DataError
from nofm.data.flow import ResidentFlow
from nofm.data.flow_files import read_flo, read_frame
from nofm.data.order import Order, Share
from nofm.data.stamp_sets import as_arrays, coco, read_pack, shared_pack, write_folder, write_pack
from nofm.data.stamp_sources import copy_sources, find_sources, usable_stamp
from nofm.data.stamps import Motions, bilinear, make_pair, make_pairs, render


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return flow_scenes.write_sources(tmp_path_factory.mktemp("packages"))


# ---- exact flow ----


@settings(deadline=None, derandomize=True, max_examples=15)
@given(st.tuples(*[st.integers(-9, 9)] * 6))
def test_whole_pixel_motions_are_exact_to_the_bit(moves):
    """Frame 2 at pixel + flow is frame 1 at pixel, wherever it is not hidden."""
    (a, b), (c, d), (e, f) = moves[:2], moves[2:4], moves[4:]
    pair = render(scene(96, 112, affine((a, b)), ((10, 20), affine((c, d))), ((40, 30), affine((e, f)))))
    flow = pair.flow.astype(int)
    assert np.array_equal(flow, pair.flow)
    assert {tuple(v) for v in flow.reshape(-1, 2).tolist()} <= {(a, b), (c, d), (e, f)}
    y, x = np.nonzero(~pair.occluded)
    assert len(y) > 3000
    there = pair.frame2[y + flow[y, x, 1], x + flow[y, x, 0]]
    assert np.array_equal(there, pair.frame1[y, x])


def test_flow_is_the_motion_of_the_layer_at_the_pixels_centre():
    background, stamp = affine((3.3, -1.7), 0.05, 1.04, (60, 50)), affine((-6.1, 4.9), -0.1, 0.93, (50, 60))
    pair = render(scene(128, 144, background, ((30, 40), stamp)))
    for (x, y), motion, layer in (((5, 7), background, 0), ((130, 100), background, 0), ((50, 60), stamp, 1), ((44, 55), stamp, 1)):
        assert pair.layers[y, x] == layer
        expected = motion[:, :2] @ (x, y) + motion[:, 2] - (x, y)
        assert pair.flow[y, x] == pytest.approx(expected, abs=1e-5)


def test_warping_the_second_frame_back_gives_the_first_but_for_interpolation():
    for pair in some_pairs(4):
        seen = ~pair.occluded
        apart = np.abs(warped_back(pair) - pair.frame1)[seen]
        still = np.abs(pair.frame2.astype(float) - pair.frame1)[seen]
        assert apart.mean() < 2.5 < 20 < still.mean()
        assert 0.6 < seen.mean() < 0.99


def test_what_comes_in_front_or_leaves_is_occluded_and_its_flow_still_known():
    """A disc moves right by 30 over a still background; another leaves the frame."""
    pair = render(scene(100, 120, None, ((10, 20), affine((30, 0))), ((80, 50), affine((60, 0)))))
    assert pair.layers[40, 30] == 1
    assert pair.occluded[40, 65], "the background where the disc arrives"
    assert not pair.occluded[40, 30], "the disc itself"
    assert not pair.occluded[90, 30], "the background elsewhere"
    assert pair.flow[40, 65].tolist() == [0, 0]
    assert pair.occluded[70, 100], "the disc that leaves"
    assert pair.flow[70, 100].tolist() == [60, 0]


def test_the_topmost_layer_that_covers_half_of_a_pixel_owns_it():
    stack = scene(100, 120, None, ((10, 20), affine()), ((30, 20), affine((5, 5))))
    pair = render(stack)
    assert pair.layers[40, 15] == 1
    assert pair.layers[40, 40] == 2, "both are there"
    assert pair.flow[40, 40].tolist() == [5, 5]
    faint = stack.layers[2].picture_HW4.copy() * np.float32(0.4)  # premultiplied: colour and alpha
    shown = render(type(stack)(100, 120, (*stack.layers[:2], type(stack.layers[2])(faint, stack.layers[2].place, stack.layers[2].motion))))
    assert shown.layers[40, 40] == 1, "what is mostly transparent owns nothing"
    below = render(type(stack)(100, 120, stack.layers[:2])).frame1[40, 40].astype(float)
    mixed = 255 * faint[20, 10, :3] + 0.6 * below
    assert np.abs(shown.frame1[40, 40] - mixed).max() < 1, "but is laid over the rest by its alpha"


def test_a_background_goes_on_mirrored_and_a_stamp_ends():
    ramp = np.arange(4, dtype=np.float32)[None, :, None].repeat(2, 0)
    points = np.array([[x, 0.0] for x in (-2.0, -1.0, 0.0, 2.5, 3.0, 4.0, 5.0, 8.0)])
    assert bilinear(ramp, points, mirror=True)[:, 0].tolist() == [1, 0, 0, 2.5, 3, 3, 2, 0]
    assert bilinear(ramp, points, mirror=False)[:, 0].tolist() == [0, 0, 0, 2.5, 3, 0, 0, 0]
    assert bilinear(ramp, np.array([[3.25, 0.0]]), mirror=False)[0, 0] == 2.25


# ---- chance ----


def same(a, b) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("frame1", "frame2", "layers", "motions"))


def test_a_pair_is_a_function_of_seed_and_index(root):
    sources = find_sources(root, "train")
    first, second = make_pair(sources, 96, 128, 3, 0), make_pair(sources, 96, 128, 3, 1)
    assert same(make_pair(sources, 96, 128, 3, 0), first)
    assert not same(first, second)
    assert not same(make_pair(sources, 96, 128, 4, 0), first)
    helped = list(make_pairs(sources, 2, 96, 128, 3, workers=1))
    assert same(helped[0], first)
    assert same(helped[1], second)


def test_scenes_are_drawn_as_asked(root):
    sources = find_sources(root, "train")
    pairs = list(make_pairs(sources, 30, 96, 128, 0, Motions(stamps=(2, 3))))
    assert {len(pair.motions) for pair in pairs} == {3, 4}
    drift = np.array([pair.flow[~pair.layers.astype(bool)].mean(0) for pair in pairs])
    assert 3 < np.abs(drift).mean() < 10, "a Laplace distribution of scale 6 has 6 as its mean length"
    still = make_pair(sources, 96, 128, 0, 0, Motions(drift=0, stamp_drift=0, turn=0, zoom=0))
    assert np.array_equal(still.frame1, still.frame2)


def test_whole_pictures_are_held_out(root):
    train, val = (find_sources(root, part) for part in ("train", "val"))
    assert (train.stamps, val.stamps, train.photographs, val.photographs) == (8, 2, 4, 1)
    assert not set(train.stamp_paths) & set(val.stamp_paths)
    assert not set(train.photograph_paths) & set(val.photograph_paths)
    assert set(train.categories) == set(val.categories) == {"animals", "food"}


def test_versions_of_one_thing_stay_together_and_sizes_of_a_photograph_count_once(root, tmp_path):
    flow_scenes.write_sources(tmp_path)
    stamps = tmp_path / "usr/share/tuxpaint/stamps/people"
    for i, name in enumerate(("zebra1", "zebra2", "zebra240a", "a", "b", "c", "d")):
        flow_scenes.write_stamp(stamps / f"{name}.png", 50 + i)
    views = tmp_path / "usr/share/backgrounds"
    for size in ("", "_1920x1080", "_3840x2160"):
        Image.fromarray(flow_scenes.texture(60, 80, 7)).save(views / f"zoo{size}.jpg")
    train, val = (find_sources(tmp_path, part) for part in ("train", "val"))
    held = [path.stem for path in val.stamp_paths if path.parent == stamps]
    assert held == ["zebra1", "zebra2", "zebra240a"]
    assert [path.stem for path in (*train.photograph_paths, *val.photograph_paths) if "zoo" in path.stem] == ["zoo"]


def opaque(side: int = 80) -> np.ndarray:
    return np.full((side, side), 255, np.uint8)


UNUSABLE = {
    "of a cartoon": ("animals/cartoon/x.png", {}),
    "in no category": ("x.png", {}),
    "tiny": ("animals/x.png", {"side": 60}),
    "a full square": ("animals/x.png", {"alpha": opaque()}),
    "nothing": ("animals/x.png", {"alpha": 0 * opaque()}),
}


@pytest.mark.parametrize(("name", "options"), UNUSABLE.values(), ids=UNUSABLE)
def test_pictures_that_are_no_photographed_cut_outs_are_passed_by(tmp_path, name, options):
    flow_scenes.write_stamp(tmp_path / name, 0, **options)
    assert not usable_stamp(tmp_path / name, tmp_path)


def test_drawings_and_pictures_without_alpha_are_passed_by(tmp_path):
    (tmp_path / "animals").mkdir()
    flat = np.full((80, 80, 4), 90, np.uint8)
    flat[..., 3] = 255 * flow_scenes.disc(80)
    Image.fromarray(flat).save(tmp_path / "animals" / "flat.png")
    Image.fromarray(flow_scenes.texture(80, 80, 0, 3)).save(tmp_path / "animals" / "square.png")
    flow_scenes.write_stamp(tmp_path / "animals" / "good.png", 0)
    assert [usable_stamp(tmp_path / "animals" / f"{name}.png", tmp_path) for name in ("flat", "square", "good")] == [False, False, True]


def test_shrunk_sources_are_the_same_pictures_in_the_same_parts(root, tmp_path):
    copy_sources(root, tmp_path, stamp_side=40, photograph_side=100)
    for part in ("train", "val"):
        before, after = find_sources(root, part), find_sources(tmp_path, part)
        assert [path.name for path in after.stamp_paths] == [path.name for path in before.stamp_paths]
        assert [path.name for path in after.photograph_paths] == [path.name for path in before.photograph_paths]
        assert after.categories == before.categories
    assert Image.open(after.stamp_paths[0]).size == (40, 40)
    make_pair(after, 96, 128, 0, 0)


def test_missing_and_broken_sources_are_named(tmp_path):
    with pytest.raises(DataError, match=r"usr/share/tuxpaint/stamps: no such folder; .*tuxpaint-stamps-default"):
        find_sources(tmp_path, "train")
    flow_scenes.write_sources(tmp_path, stamps=4, photographs=4)
    with pytest.raises(DataError, match=r"stamps: has no picture for the val part"):
        find_sources(tmp_path, "val")
    broken = tmp_path / "usr/share/tuxpaint/stamps/food/athing.png"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DataError, match=r"food/athing.png: this stamp cannot be read"):
        find_sources(tmp_path, "train")


# ---- sets on disk ----


def decoded(segmentation: dict) -> np.ndarray:
    height, width = segmentation["size"]
    values = np.repeat(np.arange(len(segmentation["counts"])) % 2 == 1, segmentation["counts"])
    return values.reshape(width, height).T


def test_boxes_and_masks_are_those_of_what_is_seen_of_each_stamp():
    pair = render(scene(100, 120, None, ((10, 20), affine()), ((30, 20), affine()), ((200, 20), affine())))
    found = coco([("a.ppm", pair.layers, pair.categories)])
    assert found["images"] == [{"id": 1, "file_name": "a.ppm", "width": 120, "height": 100}]
    assert [c["name"] for c in found["categories"]] == ["kind0", "kind1"]
    assert [a["category_id"] for a in found["annotations"]] == [2, 1], "the third stamp is outside"
    for layer, annotation in enumerate(found["annotations"], start=1):
        mask = pair.layers == layer
        assert np.array_equal(decoded(annotation["segmentation"]), mask)
        assert annotation["area"] == mask.sum()
        x, y, w, h = annotation["bbox"]
        assert mask[y : y + h, x : x + w].sum() == mask.sum()
        assert mask[y].any() and mask[:, x].any() and mask[y + h - 1].any() and mask[:, x + w - 1].any()  # noqa: PT018
    assert found["annotations"][1]["bbox"] == [31, 21, 38, 38], "a disc of 40 pixels with a clear border"


def test_a_mask_that_begins_in_the_first_pixel_has_an_empty_first_run():
    layers = np.zeros((3, 4), np.uint8)
    layers[:2, 0] = layers[2, 3] = 1
    assert coco([("a", layers, ("", "x"))])["annotations"][0]["segmentation"]["counts"] == [0, 2, 9, 1]


def test_a_folder_is_written_as_flying_chairs_are(tmp_path):
    pairs = some_pairs(3)
    write_folder(tmp_path, pairs[:2], pairs[2:])
    for number, pair in enumerate(pairs, start=1):
        stem = str(tmp_path / "data" / f"{number:05d}")
        assert np.array_equal(read_frame(f"{stem}_img1.ppm"), pair.frame1)
        assert np.array_equal(read_frame(f"{stem}_img2.ppm"), pair.frame2)
        assert np.array_equal(read_flo(f"{stem}_flow.flo")[0], pair.flow)
    assert (tmp_path / "FlyingChairs_train_val.txt").read_text().split() == ["1", "1", "2"]
    listed = json.loads((tmp_path / "instances_val.json").read_text())
    assert listed["images"][0]["file_name"] == "data/00003_img1.ppm"
    assert len(listed["annotations"]) == 2


def test_a_pack_keeps_the_flow_exactly_and_the_frames_nearly(tmp_path):
    pairs = some_pairs(3)
    size = write_pack(tmp_path / "x.npz", pairs)
    assert size == (tmp_path / "x.npz").stat().st_size < 0.3 * sum(2 * p.frame1.nbytes + p.flow.nbytes / 2 for p in pairs)
    read, made = read_pack(tmp_path / "x.npz"), as_arrays(pairs)
    assert np.array_equal(read.flow, made.flow)
    assert np.abs(read.flow.permute(0, 2, 3, 1).numpy() / 64 - np.stack([p.flow for p in pairs])).max() <= 1 / 128
    for frames, name in ((read.frames1, "frame1"), (read.frames2, "frame2")):
        originals = np.stack([getattr(pair, name) for pair in pairs]).transpose(0, 3, 1, 2)
        assert np.abs(frames.numpy().astype(int) - originals).mean() < 2


def test_a_pack_is_read_once_for_all_that_use_it_at_a_time(tmp_path):
    path, cpu = tmp_path / "x.npz", torch.device("cpu")
    write_pack(path, some_pairs(2))
    pack = shared_pack(path, cpu)
    loader = ResidentFlow(as_arrays(some_pairs(2)), pack, Order(2, 1, 0), Share(), cpu, (128, 128))
    here = weakref.ref(pack)
    del pack
    gc.collect()
    assert shared_pack(path, cpu) is here() is not None, "a loader keeps it"
    write_pack(path, some_pairs(3))
    assert len(shared_pack(path, cpu)) == 3, "another file of the same name is another pack"
    del loader
    gc.collect()
    assert here() is None, "nothing is kept that nobody uses"
    with pytest.raises(DataError, match=r"none.npz: cannot be read"):
        shared_pack(tmp_path / "none.npz", cpu)


def test_broken_packs_are_named(tmp_path):
    path = tmp_path / "x.npz"
    write_pack(path, some_pairs(2))
    whole = path.read_bytes()
    with np.load(path) as file:
        parts = dict(file)
    broken = {
        "is no file of flying stamps": whole[: len(whole) // 2],
        "cut short": b"nothing",
        "Error -3 while decompressing": whole.replace(whole[100:110], b"\xff" * 10),
        "do not make pairs": {**parts, "motions": parts["motions"][:1]},
        "frame 1 of pair 0 cannot be read": {**parts, "jpegs": parts["jpegs"] * 0},
        r"its flow \(136, 100\)": {**parts, "layers": parts["layers"][:, :, :100]},
    }
    for told, content in broken.items():
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.savez(path, **content)
        with pytest.raises(DataError, match=told) as error:
            read_pack(path)
        assert str(error.value).startswith(str(path))


def test_no_pairs_and_flow_beyond_16_bits_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"x.npz: there are no pairs"):
        write_pack(tmp_path / "x.npz", [])
    with pytest.raises(DataError, match=r"flow of 600 pixels does not fit in 16 bits"):
        as_arrays([render(scene(96, 112, affine((600, 0))))])
