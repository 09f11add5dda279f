"""COCO's masks, decoded pixel for pixel as COCO's own tools decode them."""

from __future__ import annotations

import re

import coco_scenes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from nofm.data.coco_masks import MaskError, check_segmentation, decode, decode_runs, fill_polygon, unpack_runs

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:pycocotools")

SEEDS = st.integers(0, 2**32 - 1)


def random_mask(rng: np.random.Generator) -> np.ndarray:
    """Noise of some density, or large blocks of it, whose runs need several characters."""
    height, width = rng.integers(1, 50, 2)
    block = int(rng.choice([1, 7, 40]))
    coarse = rng.random((height // block + 1, width // block + 1)) < rng.random()
    return np.kron(coarse, np.ones((block, block), bool))[:height, :width]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(SEEDS)
def test_runs_are_decoded_as_they_were_written(seed):
    mask = random_mask(np.random.default_rng(seed))
    packed = coco_scenes.compressed(mask)
    for written in (packed, packed | {"counts": packed["counts"].encode()}, coco_scenes.uncompressed(mask)):
        assert np.array_equal(decode_runs(written), mask)
        assert np.array_equal(decode(written, *mask.shape), mask)


def test_a_long_run_that_becomes_short_is_a_negative_difference():
    mask = np.zeros((300, 400), bool)
    mask[:, :200] = True
    mask[5, 300] = mask[7, 310] = True
    assert np.array_equal(decode_runs(coco_scenes.compressed(mask)), mask)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(SEEDS, st.sampled_from([None, 1, 2, 5]))
def test_polygons_are_filled_as_coco_fills_them(seed, grid):
    """On a grid corners and edges fall onto the borders of pixels, where rounding decides. Some lie outside, some corners twice."""
    rng = np.random.default_rng(seed)
    height, width = (int(side) for side in rng.integers(1, 60, 2))
    xy = rng.uniform(-12, 72, 2 * int(rng.integers(3, 9)))
    xy = xy if grid is None else np.round(xy * grid) / grid
    if rng.random() < 0.2:
        xy[2:4] = xy[:2]
    theirs = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects([xy.tolist()], height, width)))
    assert np.array_equal(fill_polygon(xy.tolist(), height, width), theirs.astype(bool))


def test_several_polygons_are_one_mask():
    polygons = [[1, 1, 8, 1, 8, 8, 1, 8], [5, 5, 15, 5, 15, 12, 5, 12]]
    theirs = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, 16, 20)))
    assert np.array_equal(decode(polygons, 16, 20), theirs.astype(bool))


SQUARE = [1, 1, 4, 1, 4, 4, 1, 4]
BAD = {
    "too few pixels": ({"size": [4, 5], "counts": [3, 4]}, "cover 7 pixels, but its size is 4x5 = 20"),
    "packed, too few pixels": ({"size": [4, 5], "counts": "34"}, "cover 7 pixels"),
    "negative run": ({"size": [4, 5], "counts": [25, -5]}, "negative length"),
    "cut text": ({"size": [4, 5], "counts": "4Q"}, "end in the middle of a number"),
    "strange text": ({"size": [4, 5], "counts": "4 5"}, "characters that are none of COCO's"),
    "text of another alphabet": ({"size": [4, 5], "counts": "4é"}, "characters that are none of COCO's"),
    "endless number": ({"size": [4, 5], "counts": "Q" * 12 + "0"}, "too long"),
    "no size": ({"counts": [20]}, "its runs need"),
    "no numbers": ({"size": [4, 5], "counts": ["a"]}, "no list of numbers"),
    "another size": ({"size": [5, 4], "counts": [3, 17]}, "for an image of [5, 4] (height, width), not [4, 5]"),
    "nothing inside": ({"size": [4, 5], "counts": [20]}, "its mask is empty"),
    "no segmentation": ([], "has no segmentation"),
    "nothing at all": (None, "has no segmentation"),
    "two corners": ([[1, 1, 2, 2]], "its polygon has 4 numbers"),
    "half a corner": ([[*SQUARE, 3]], "its polygon has 9 numbers"),
    "an infinite corner": ([[*SQUARE[:7], float("inf")]], "a corner that is no number"),
    "a corner far away": ([[*SQUARE[:7], 1e12]], "far outside"),
    "text as a polygon": ([["a", "b"]], "no list of numbers"),
}


@pytest.mark.parametrize(("segmentation", "said"), BAD.values(), ids=BAD)
def test_what_cannot_be_a_mask_is_said(segmentation, said):
    with pytest.raises(MaskError, match=re.escape(said)):
        check_segmentation(segmentation, 4, 5)


def test_good_masks_pass():
    for good in ([SQUARE], [SQUARE, SQUARE], {"size": [4, 5], "counts": [3, 17]}, {"size": [4, 5], "counts": "3a0"}):
        check_segmentation(good, 4, 5)
    assert unpack_runs("").size == 0
