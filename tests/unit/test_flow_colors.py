"""The colour wheel of Baker et al. 2007, by its known directions and against torchvision's, and the pictures made with it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.utils import flow_to_image

from nofm.report.flow_colors import draw_flow, flow_to_rgb, wheel


def test_the_wheel_has_55_colours_with_the_pure_ones_at_their_places():
    colours = wheel()
    assert colours.shape == (55, 3)
    places = {0: (255, 0, 0), 15: (255, 255, 0), 21: (0, 255, 0), 25: (0, 255, 255), 36: (0, 0, 255), 49: (255, 0, 255)}
    for place, colour in places.items():
        assert tuple(colours[place]) == colour


# The length is the longest of the field, so colours are full. Positions on the wheel: 54 * (angle from right, clockwise as seen) / 360.
DIRECTIONS = {
    "right": ((1, 0), (255, 0, 0)),
    "down": ((0, 1), (255, 229, 0)),
    "left": ((-1, 0), (0, 208, 255)),
    "up": ((0, -1), (87, 0, 255)),
}


@pytest.mark.parametrize(("vector", "colour"), DIRECTIONS.values(), ids=DIRECTIONS)
def test_directions_have_their_colours(vector, colour):
    shown = flow_to_rgb(np.full((1, 1, 2), vector, float))[0, 0].astype(int)
    assert np.abs(shown - colour).max() <= 2


def test_no_motion_is_white_and_half_of_it_half_as_full():
    field = np.array([[[0.0, 0.0], [2.0, 0.0], [4.0, 0.0]]])
    assert flow_to_rgb(field)[0].tolist() == [[255, 255, 255], [255, 127, 127], [255, 0, 0]]
    assert flow_to_rgb(np.zeros((2, 2, 2))).min() == 255


def test_longer_than_the_longest_is_darkened_and_the_unknown_black():
    field = np.array([[[2.0, 0.0], [np.nan, 0.0], [1.0, 0.0]]])
    shown = flow_to_rgb(field, longest=1.0, valid_HW=np.array([[True, True, False]]))
    assert shown[0].tolist() == [[191, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_colours_are_those_of_torchvision():
    field = np.random.default_rng(0).normal(0, 10, (60, 70, 2))
    witness = flow_to_image(torch.from_numpy(field).float().permute(2, 0, 1)).permute(1, 2, 0).numpy()
    apart = np.abs(flow_to_rgb(field).astype(int) - witness.astype(int)).max(-1)
    # torchvision's own colour of the longest vector goes below 0 by a rounding error and comes out as 255.
    apart[np.unravel_index(np.hypot(field[..., 0], field[..., 1]).argmax(), apart.shape)] = 0
    assert apart.max() <= 1


def test_a_picture_shows_frame_prediction_and_truth_in_one_scale(tmp_path):
    frame = np.full((20, 30, 3), 9, np.uint8)
    truth, wrong = np.zeros((20, 30, 2)), np.zeros((20, 30, 2))
    truth[..., 0], wrong[..., 0] = 4.0, 2.0
    draw_flow(tmp_path / "new" / "x.png", frame, {"half": wrong}, truth)
    sheet = np.asarray(Image.open(tmp_path / "new" / "x.png"))
    assert sheet.shape == (20 + 20, 98, 3)
    assert sheet[30, 10].tolist() == [9, 9, 9]
    assert sheet[30, 44].tolist() == [255, 127, 127]
    assert sheet[30, 78].tolist() == [255, 0, 0]
    assert (sheet[:20] < 128).any(), "titles are written"


def test_titles_of_large_pictures_can_be_read_when_they_are_shown_small(tmp_path):
    def heights(width):
        frame, field = np.full((20, width, 3), 255, np.uint8), np.zeros((20, width, 2))
        draw_flow(tmp_path / "x.png", frame, {"mine": field}, field)
        sheet = np.asarray(Image.open(tmp_path / "x.png").convert("L"))[:-20, :width]
        rows = np.flatnonzero((sheet < 128).any(1))
        return rows[-1] - rows[0]

    assert heights(1400) > 3 * heights(280)


def test_a_picture_of_fields_that_do_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"prediction 'mine' is \(2, 2, 2\), the true flow \(3, 2, 2\)"):
        draw_flow(tmp_path / "x.png", np.zeros((3, 2, 3), np.uint8), {"mine": np.zeros((2, 2, 2))}, np.zeros((3, 2, 2)))
    with pytest.raises(ValueError, match=r"\(height, width, 2\), not \(2, 3, 3\)"):
        flow_to_rgb(np.zeros((2, 3, 3)))


def test_it_needs_no_torch():
    code = "import nofm.report.flow_colors, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
