"""Files of optical flow: frames, `.flo` fields, and the 16-bit PNGs of KITTI. Arrays in, arrays out; every error names its file.

A field is (H, W, 2) float32, u to the right and v down, in pixels, with an (H, W) mask of where it is known.

.flo   "PIEH" (the float 202021.25), width and height as int32, then u and v interleaved, row by row, all little-endian. Middlebury
       writes what it does not know as numbers above 1e9, which come back as invalid.
.png   KITTI: 16-bit RGB, R = 64 u + 2^15, G = 64 v + 2^15, B = 1 where the flow is known. Pillow would cut such a file down to 8
       bits, so torchvision's decoder reads it; nothing writes it, so the few chunks of a PNG are put together here.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import DataError
from .pictures import open_rgb

__all__ = ["KITTI_UNIT", "read_flo", "read_flow", "read_frame", "read_kitti_flow", "write_flo", "write_kitti_flow"]

Flow: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.bool_]

KITTI_UNIT = 64  # steps of a pixel in 16 bits
_MAGIC = struct.pack("<f", 202021.25)
_UNKNOWN = 1e9
_LARGEST = 99_999  # pixels of a side, as Middlebury's own reader allows
_PNG = b"\x89PNG\r\n\x1a\n"


def read_flow(path: str | Path) -> tuple[Flow, Mask]:
    """A field and where it is known, from a `.flo` or a KITTI `.png`."""
    path = Path(path)
    readers = {".flo": read_flo, ".png": read_kitti_flow}
    if path.suffix not in readers:
        raise DataError(f"{path}: flow is read from .flo files and from the 16-bit .png files of KITTI, not from {path.suffix or 'this'}")
    return readers[path.suffix](path)


# ---- .flo ----


def read_flo(path: str | Path) -> tuple[Flow, Mask]:
    """A `.flo` file. Values above 1e9, as Middlebury writes them, and NaN are not known: 0 there, and False in the mask."""
    raw = _bytes(path)
    if raw[:4] != _MAGIC:
        raise DataError(f"{path}: no .flo file: it begins with {raw[:4]!r}, not with {_MAGIC!r}")
    if len(raw) < 12:
        raise DataError(f"{path}: cut short: {len(raw)} bytes hold no width and height")
    width, height = struct.unpack("<ii", raw[4:12])
    if not (0 < width <= _LARGEST and 0 < height <= _LARGEST):
        raise DataError(f"{path}: claims a size of {width}x{height} pixels; sides go from 1 to {_LARGEST}")
    expected = 12 + 8 * width * height
    if len(raw) != expected:
        trouble = "cut short" if len(raw) < expected else "too long"
        raise DataError(f"{path}: {trouble}: {width}x{height} pixels take {expected} bytes, the file has {len(raw)}")
    flow = np.frombuffer(raw, "<f4", offset=12).reshape(height, width, 2)
    valid = (np.abs(flow) <= _UNKNOWN).all(-1)  # False for NaN
    return np.where(valid[..., None], flow, np.float32(0)).astype(np.float32), valid


def write_flo(path: str | Path, flow: NDArray[Any], valid: Mask | None = None) -> None:
    """Write a field; where `valid` is False, as Middlebury writes what it does not know."""
    _check_field(path, flow)
    values = flow.astype("<f4") if valid is None else np.where(valid[..., None], flow, 1.666666752e9).astype("<f4")
    height, width = flow.shape[:2]
    Path(path).write_bytes(_MAGIC + struct.pack("<ii", width, height) + values.tobytes())


# ---- KITTI ----


def read_kitti_flow(path: str | Path) -> tuple[Flow, Mask]:
    """A 16-bit PNG of KITTI. Where the third channel is 0 nothing is known: 0 in the field."""
    import torch
    from torchvision.io import ImageReadMode, decode_png

    raw = _bytes(path)
    if raw[:8] != _PNG or raw[12:16] != b"IHDR" or len(raw) < 29:
        raise DataError(f"{path}: no PNG file")
    depth, colour = raw[24], raw[25]
    if (depth, colour) != (16, 2):
        kinds = {0: "grey", 2: "RGB", 3: "palette", 4: "grey with alpha", 6: "RGBA"}
        raise DataError(f"{path}: KITTI's flow is a PNG of 16-bit RGB, this one is {depth}-bit {kinds.get(colour, 'of an unknown kind')}")
    _check_chunks(path, raw)
    try:
        pixels = decode_png(torch.frombuffer(bytearray(raw), dtype=torch.uint8), ImageReadMode.UNCHANGED)
    except RuntimeError as error:
        raise DataError(f"{path}: cannot be read ({str(error).splitlines()[0]}); is it cut short?") from None
    values = pixels.numpy().astype(np.int32).transpose(1, 2, 0)
    valid = values[..., 2] > 0
    flow = (values[..., :2] - 2**15).astype(np.float32) / KITTI_UNIT
    return np.where(valid[..., None], flow, np.float32(0)), valid


def write_kitti_flow(path: str | Path, flow: NDArray[Any], valid: Mask | None = None) -> None:
    """Write a field as KITTI does: rounded to 1/64 pixel, up to 512 pixels long."""
    _check_field(path, flow)
    known = np.ones(flow.shape[:2], bool) if valid is None else valid
    steps = np.rint(np.where(known[..., None], flow, 0).astype(np.float64) * KITTI_UNIT) + 2**15
    if not ((steps >= 0) & (steps < 2**16)).all():  # NaN is neither
        raise DataError(f"{path}: KITTI's PNG holds flow of -512 to below 512 pixels, and finite; mark the rest as not valid")
    values = np.dstack([np.where(known[..., None], steps, 0), known]).astype(">u2")
    height, width = known.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), values.reshape(height, -1).view(np.uint8)], axis=1)  # 0: rows as they are
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    Path(path).write_bytes(_PNG + b"".join(_chunk(*chunk) for chunk in chunks))


def _check_chunks(path: str | Path, raw: bytes) -> None:
    """Raise unless every chunk of a PNG is as it was written. Some damaged files end torchvision's decoder, and this process with it."""
    place, name = len(_PNG), b""
    while name != b"IEND":
        length, name = struct.unpack(">I4s", raw[place : place + 8].ljust(8, b"\0"))
        body, checksum = raw[place + 8 : place + 8 + length], raw[place + 8 + length : place + 12 + length]
        if checksum != struct.pack(">I", zlib.crc32(name + body)):
            raise DataError(f"{path}: cannot be read (its part at byte {place} is damaged or cut short)")
        place += 12 + length


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


# ---- frames ----


def read_frame(path: str | Path) -> NDArray[np.uint8]:
    """A frame (.ppm, .png, .jpg) as (H, W, 3) bytes; grey ones become RGB."""
    return np.array(open_rgb(path, "this frame"))


def _bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def _check_field(path: str | Path, flow: NDArray[Any]) -> None:
    if flow.ndim != 3 or flow.shape[-1] != 2:
        raise DataError(f"{path}: a field of flow is (height, width, 2), not {flow.shape}")
