"""Pictures of detections: where boxes, names and masks come to lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nofm.report.boxes import colour_of, draw_detection, draw_objects

NAMES = ["background", "cell", "platelet"]


def objects(**changes: Any) -> Any:
    masks = np.zeros((2, 400, 500), bool)
    masks[0, 110:190, 60:140] = True
    masks[1, 300:320, 400:420] = True
    boxes = np.array([[50.0, 100, 150, 200], [390, 290, 430, 330]], np.float32)
    return SimpleNamespace(**{"boxes": boxes, "labels": np.array([1, 2]), "scores": np.array([0.9, 0.4]), "masks": masks, **changes})


GREY = np.full((400, 500, 3), 100, np.uint8)


def test_a_box_is_drawn_on_its_border_and_a_mask_shows_what_is_under_it():
    drawn = draw_objects(GREY, objects(), NAMES)
    assert drawn.shape == GREY.shape
    for row, column in ((100, 100), (199, 100), (150, 50), (150, 149)):
        assert tuple(drawn[row, column]) == colour_of(0), (row, column)
    assert (drawn[105, 100] == 100).all(), "inside of the box and outside of the mask"
    assert (drawn[205, 100] == 100).all()
    assert np.allclose(drawn[150, 100], 0.55 * 100 + 0.45 * np.array(colour_of(0)), atol=1)
    assert tuple(drawn[290, 410]) == colour_of(1)
    assert (drawn[90:98, 51:90] == colour_of(0)).all(2).any(0).mean() > 0.5, "the name's ground, above the box"
    assert not np.array_equal(drawn[85:100], draw_objects(GREY, objects(), ["background", "red cell", "platelet"])[85:100])


def test_scores_below_the_least_are_left_out():
    drawn = draw_objects(GREY, objects(), NAMES, least_score=0.5)
    assert (drawn[270:340, 380:440] == 100).all()
    assert tuple(drawn[150, 50]) == colour_of(0)


def test_with_one_category_every_object_has_its_own_colour():
    drawn = draw_objects(GREY, objects(labels=np.array([1, 1])), NAMES[:2])
    assert tuple(drawn[150, 50]) == colour_of(0) != colour_of(1) == tuple(drawn[310, 390])
    same = draw_objects(GREY, objects(labels=np.array([1, 1])), NAMES)
    assert tuple(same[310, 390]) == colour_of(0)


def test_truth_without_scores_masks_or_objects():
    plain = draw_objects(GREY, objects(scores=None, masks=None), NAMES)
    assert (plain[150, 100] == 100).all()
    none = objects(boxes=np.zeros((0, 4)), labels=np.zeros(0, int), scores=np.zeros(0), masks=np.zeros((0, 400, 500), bool))
    assert np.array_equal(draw_objects(GREY, none, NAMES), GREY)


def test_small_images_are_enlarged():
    image = np.random.default_rng(0).integers(0, 256, (100, 130, 3)).astype(np.uint8)
    small = objects(boxes=np.array([[10.0, 20, 30, 40]]), labels=np.array([1]), scores=None, masks=None)
    drawn = draw_objects(image, small, NAMES)
    assert drawn.shape == (400, 520, 3)
    assert tuple(drawn[20 * 4, 20 * 4]) == colour_of(0)
    assert np.array_equal(drawn[2::4, 2::4][60:], image[60:])


def test_a_picture_has_predictions_beside_the_truth(tmp_path):
    path = tmp_path / "pictures" / "one.png"
    draw_detection(path, GREY, {"dense": objects(), "srste 2:4": objects()}, objects(scores=None), NAMES)
    picture = np.asarray(Image.open(path))
    title = 24  # a line of letters of 1/32 of the width
    assert picture.shape == (title + 400, 3 * 504 - 4, 3)
    assert tuple(picture[title + 150, 504 + 50]) == colour_of(0)
    assert (picture[title + 310, 504 + 390] == 100).all(), "not sure enough"
    assert tuple(picture[title + 310, 1008 + 390]) == colour_of(1), "the truth has no scores"
    assert (picture[:, 500:504] == 255).all()


@pytest.mark.parametrize(
    ("image", "found", "said"),
    [
        (GREY[..., 0], objects(), r"an image is \(height, width, 3\), not \(400, 500\)"),
        (GREY[:300], objects(), r"masks of \(2, 400, 500\) do not fit 2 boxes in an image of \(300, 500\)"),
    ],
)
def test_shapes_that_do_not_fit(image, found, said):
    with pytest.raises(ValueError, match=said):
        draw_objects(image, found, NAMES)
