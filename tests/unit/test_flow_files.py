"""Files of optical flow: exact bytes, exact round trips, torchvision's readers as witnesses, and errors that name the file."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import _optical_flow as witnesses

from nofm.data.errors import DataError
from nofm.data.flow_files import read_flo, read_flow, read_frame, read_kitti_flow, write_flo, write_kitti_flow


def field(height: int = 5, width: int = 7) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 20, (height, width, 2)).astype(np.float32)


# ---- .flo ----


def test_a_flo_file_has_the_bytes_that_the_format_says(tmp_path):
    write_flo(tmp_path / "x.flo", np.array([[[1.5, -2.0], [3.0, 4.0]]], np.float32))
    assert (tmp_path / "x.flo").read_bytes() == b"PIEH" + struct.pack("<ii4f", 2, 1, 1.5, -2.0, 3.0, 4.0)


def test_a_flo_file_is_read_as_it_was_written_and_as_torchvision_reads_it(tmp_path):
    path, flow = tmp_path / "x.flo", field()
    write_flo(path, flow)
    read, valid = read_flo(path)
    assert np.array_equal(read, flow)
    assert read.dtype == np.float32
    assert valid.all()
    assert np.array_equal(witnesses._read_flo(str(path)).transpose(1, 2, 0), flow)


@pytest.mark.parametrize("unknown", [1.666666752e9, -2e9, np.nan, np.inf], ids=str)
def test_what_middlebury_does_not_know_is_not_valid(tmp_path, unknown):
    flow = field()
    flow[2, 3, 1] = unknown
    write_flo(tmp_path / "x.flo", flow)
    read, valid = read_flo(tmp_path / "x.flo")
    assert np.argwhere(~valid).tolist() == [[2, 3]]
    assert (read[2, 3] == 0).all()
    assert np.array_equal(read[valid], flow[valid])


def test_what_is_not_valid_is_written_as_middlebury_does(tmp_path):
    valid = np.random.default_rng(1).random((5, 7)) < 0.5
    write_flo(tmp_path / "x.flo", field(), valid)
    assert np.array_equal(read_flo(tmp_path / "x.flo")[1], valid)


HEADER = b"PIEH" + struct.pack("<ii", 7, 5)
BROKEN_FLO = {
    "empty": (b"", "no .flo file: it begins with b''"),
    "another magic": (b"HEIP" + HEADER[4:] + bytes(280), "no .flo file"),
    "no size": (HEADER[:10], "cut short: 10 bytes hold no width and height"),
    "cut short": (HEADER + bytes(279), "cut short: 7x5 pixels take 292 bytes, the file has 291"),
    "too long": (HEADER + bytes(281), "too long: 7x5 pixels take 292 bytes, the file has 293"),
    "a side of 0": (b"PIEH" + struct.pack("<ii", 0, 5), "claims a size of 0x5 pixels"),
    "a negative side": (b"PIEH" + struct.pack("<ii", 7, -5), "claims a size of 7x-5 pixels"),
    "a huge side": (b"PIEH" + struct.pack("<ii", 2**31 - 1, 2**31 - 1), "sides go from 1 to 99999"),
}


@pytest.mark.parametrize(("content", "told"), BROKEN_FLO.values(), ids=BROKEN_FLO)
def test_a_broken_flo_file_is_named(tmp_path, content, told):
    path = tmp_path / "broken.flo"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_flow(path)
    assert str(error.value).startswith(f"{path}: ")
    assert told in str(error.value)


# ---- KITTI ----


def test_kitti_flow_comes_back_exactly_in_its_steps_of_a_64th_and_as_torchvision_reads_it(tmp_path):
    rng = np.random.default_rng(0)
    flow = (rng.integers(-(2**15), 2**15, (33, 47, 2)) / 64).astype(np.float32)
    flow[0, 0], flow[0, 1] = (-512, 511.984375), (0, 0)  # both ends of the range, and nothing
    valid = rng.random((33, 47)) < 0.6
    valid[0, :2] = True
    path = tmp_path / "000000_10.png"
    write_kitti_flow(path, flow, valid)
    read, known = read_kitti_flow(path)
    assert np.array_equal(known, valid)
    assert np.array_equal(read[valid], flow[valid])
    assert (read[~valid] == 0).all()
    seen, seen_valid = witnesses._read_16bits_png_with_flow_and_valid_mask(str(path))
    assert np.array_equal(seen_valid, valid)
    assert np.array_equal(seen.transpose(1, 2, 0)[valid], flow[valid])


def test_kitti_rounds_to_the_nearest_step(tmp_path):
    flow = np.full((2, 2, 2), 1.0 / 64 * 0.6, np.float32)
    write_kitti_flow(tmp_path / "x.png", flow)
    assert (read_kitti_flow(tmp_path / "x.png")[0] == np.float32(1 / 64)).all()


@pytest.mark.parametrize("value", [512.0, -513.0, np.nan])
def test_flow_that_kitti_cannot_hold_is_refused(tmp_path, value):
    flow = np.zeros((2, 2, 2), np.float32)
    flow[1, 0, 0] = value
    with pytest.raises(DataError, match=r"x.png: KITTI's PNG holds flow of -512 to below 512"):
        write_kitti_flow(tmp_path / "x.png", flow)
    valid = np.ones((2, 2), bool)
    valid[1, 0] = False
    write_kitti_flow(tmp_path / "x.png", flow, valid)
    assert np.array_equal(read_kitti_flow(tmp_path / "x.png")[1], valid)


def write_8_bit(path: Path) -> None:
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)


def write_grey(path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(path)


def write_short(path: Path) -> None:
    write_kitti_flow(path, field(40, 40))
    path.write_bytes(path.read_bytes()[:-2000])


BROKEN_KITTI = {
    "not a PNG": (lambda path: path.write_bytes(b"P6 1 1 255 \0\0\0" * 4), "no PNG file"),
    "empty": (lambda path: path.write_bytes(b""), "no PNG file"),
    "8 bits": (write_8_bit, "PNG of 16-bit RGB, this one is 8-bit RGB"),
    "grey": (write_grey, "PNG of 16-bit RGB, this one is 16-bit grey"),
    "cut short": (write_short, "cannot be read"),
    "missing": (lambda path: None, "cannot be read (No such file or directory)"),
}


@pytest.mark.parametrize(("make", "told"), BROKEN_KITTI.values(), ids=BROKEN_KITTI)
def test_a_broken_kitti_file_is_named(tmp_path, make, told):
    path = tmp_path / "000000_10.png"
    make(path)
    with pytest.raises(DataError) as error:
        read_flow(path)
    assert str(error.value).startswith(f"{path}: ")
    assert told in str(error.value)


def test_a_kitti_file_with_any_byte_wrong_is_named_and_no_more(tmp_path):
    """torchvision's decoder ends the process at some of these."""
    path = tmp_path / "000000_10.png"
    write_kitti_flow(path, field(5, 7))
    whole = path.read_bytes()
    read_flow(path)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with pytest.raises(DataError, match=re.escape(f"{path}: ")):
            read_flow(path)
        path.write_bytes(whole[:place])
        with pytest.raises(DataError, match=re.escape(f"{path}: ")):
            read_flow(path)


# ---- both, and frames ----


def test_other_files_hold_no_flow(tmp_path):
    with pytest.raises(DataError, match=r"x.pfm: flow is read from .flo files"):
        read_flow(tmp_path / "x.pfm")


@pytest.mark.parametrize("write", [write_flo, write_kitti_flow])
def test_a_field_has_two_numbers_a_pixel(tmp_path, write):
    with pytest.raises(DataError, match=r"x: a field of flow is \(height, width, 2\), not \(2, 5, 7\)"):
        write(tmp_path / "x", np.zeros((2, 5, 7)))


@pytest.mark.parametrize("suffix", ["ppm", "png"])
def test_frames_are_read_as_bytes(tmp_path, suffix):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / f"x.{suffix}")
    assert np.array_equal(read_frame(tmp_path / f"x.{suffix}"), pixels)


def test_grey_frames_become_rgb_and_broken_ones_are_named(tmp_path):
    Image.fromarray(np.full((6, 9), 7, np.uint8)).save(tmp_path / "grey.png")
    assert (read_frame(tmp_path / "grey.png") == np.full((6, 9, 3), 7)).all()
    (tmp_path / "x.ppm").write_bytes(b"P6 100 100 255\n" + bytes(50))
    with pytest.raises(DataError, match=r"x.ppm: this frame cannot be read"):
        read_frame(tmp_path / "x.ppm")
    Image.fromarray(np.full((6, 9), 900, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"deep.png: this frame cannot be read \(mode I;16: more than 8 bits a channel"):
        read_frame(tmp_path / "deep.png")
