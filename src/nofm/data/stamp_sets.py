"""Sets of flying-stamp pairs on disk: as a FlyingChairs folder with COCO annotations, or as one compact file.

The compact file (.npz) holds frames as JPEG (4:4:4), and of the flow what it follows from: which layer each pixel belongs to and how each
layer moves. So the flow stays exact, 600 pairs of 256x320 take about 50 MB at quality 95, and `read_pack` gives them back as
`FlowArrays`. Nothing in it is pickled.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import DataError
from .flow import FlowArrays
from .flow_files import KITTI_UNIT, write_flo
from .stamps import StampPair, flow_of

__all__ = ["as_arrays", "coco", "read_pack", "shared_pack", "write_folder", "write_pack"]


# ---- FlyingChairs and COCO ----


def write_folder(root: str | Path, train: Iterable[StampPair], val: Iterable[StampPair]) -> None:
    """ROOT/data/00001_img1.ppm ... as FlyingChairs has it, and ROOT/instances_{train,val}.json with the stamps of frame 1."""
    from PIL import Image

    data = Path(root, "data")
    data.mkdir(parents=True, exist_ok=True)
    marks = []
    for part, mark, pairs in (("train", "1", train), ("val", "2", val)):
        images = []
        for pair in pairs:
            marks.append(mark)
            name = f"{len(marks):05d}"
            for number, frame in ((1, pair.frame1), (2, pair.frame2)):
                Image.fromarray(frame).save(data / f"{name}_img{number}.ppm")
            write_flo(data / f"{name}_flow.flo", pair.flow)
            images.append((f"data/{name}_img1.ppm", pair.layers, pair.categories))
        Path(root, f"instances_{part}.json").write_text(json.dumps(coco(images)))
    Path(root, "FlyingChairs_train_val.txt").write_text("\n".join(marks) + "\n")


def coco(images: Sequence[tuple[str, NDArray[np.uint8], Sequence[str]]]) -> dict[str, Any]:
    """COCO annotations of (file name, layer of each pixel, category of each layer): boxes and masks of what is seen of each stamp."""
    names = sorted({category for _, _, categories in images for category in categories[1:]})
    numbers = {name: number for number, name in enumerate(names, start=1)}
    described, annotations = [], list[dict[str, Any]]()
    for image_id, (file_name, layers, categories) in enumerate(images, start=1):
        height, width = layers.shape
        described.append({"id": image_id, "file_name": file_name, "width": width, "height": height})
        for layer in range(1, len(categories)):
            mask = layers == layer
            if not mask.any():
                continue  # hidden, or outside the frame
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            x, y = int(columns[0]), int(rows[0])
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": numbers[categories[layer]],
                    "bbox": [x, y, int(columns[-1]) - x + 1, int(rows[-1]) - y + 1],
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                    "segmentation": {"size": [height, width], "counts": _runs(mask)},
                }
            )
    return {"images": described, "annotations": annotations, "categories": [{"id": i, "name": name} for name, i in numbers.items()]}


def _runs(mask: NDArray[np.bool_]) -> list[int]:
    """COCO's run lengths, column by column, beginning with what is outside."""
    flat = np.concatenate([[False], mask.T.ravel()])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    return [int(run) for run in np.diff([0, *changes, mask.size])]


# ---- one file ----


def as_arrays(pairs: Iterable[StampPair]) -> FlowArrays:
    """Pairs of one size as tensors, flow rounded to 1/64 pixel."""
    made = [(pair.frame1, pair.frame2, _int16(pair.flow)) for pair in pairs]
    if not made:
        raise DataError("there are no pairs to put together")
    return FlowArrays(*(torch.from_numpy(np.stack(part).transpose(0, 3, 1, 2).copy()) for part in zip(*made, strict=True)))


def _int16(flow: NDArray[np.float32]) -> NDArray[np.int16]:
    steps = np.rint(flow * KITTI_UNIT)
    if np.abs(steps).max() > np.iinfo(np.int16).max:
        raise DataError(f"flow of {np.abs(flow).max():.0f} pixels does not fit in 16 bits of 1/{KITTI_UNIT} pixel: at most 511")
    return steps.astype(np.int16)


def write_pack(path: str | Path, pairs: Iterable[StampPair], quality: int = 95) -> int:
    """Write pairs of one size to one file; its size in bytes."""
    jpegs, layers, motions = list[bytes](), list[NDArray[Any]](), list[NDArray[Any]]()
    for pair in pairs:
        jpegs += [_jpeg(frame, quality) for frame in (pair.frame1, pair.frame2)]
        layers.append(pair.layers)
        motions.append(pair.motions)
    if not jpegs:
        raise DataError(f"{path}: there are no pairs to write")
    most = max(len(m) for m in motions)
    filled = [np.concatenate([m, np.full((most - len(m), 2, 3), np.nan)]) for m in motions]
    ends = np.cumsum([len(jpeg) for jpeg in jpegs])
    with Path(path).open("wb") as file:
        np.savez_compressed(
            file, jpegs=np.frombuffer(b"".join(jpegs), np.uint8), ends=ends, layers=np.stack(layers), motions=np.stack(filled)
        )
    return Path(path).stat().st_size


def _jpeg(frame: NDArray[np.uint8], quality: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=quality, subsampling=0)
    return file.getvalue()


def read_pack(path: str | Path) -> FlowArrays:
    """The pairs of a file that `write_pack` has written."""
    try:
        with np.load(path, allow_pickle=False) as file:
            raw, ends, layers, motions = (file[name] for name in ("jpegs", "ends", "layers", "motions"))
    except (OSError, KeyError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: is no file of flying stamps, or cut short ({error})") from None
    pieces = np.split(raw, ends[:-1])
    if len(ends) != 2 * len(layers) or len(motions) != len(layers) or not len(layers) or ends[-1] != len(raw):
        raise DataError(f"{path}: {len(ends)} frames, {len(layers)} fields and {len(motions)} motions do not make pairs")
    with ThreadPoolExecutor() as pool:  # both let go of the interpreter
        decoded = pool.map(partial(_decoded, path, layers.shape[1:]), range(len(pieces)), pieces)
        frames = torch.from_numpy(np.stack(list(decoded))).permute(0, 3, 1, 2)
        flow = torch.from_numpy(np.stack(list(pool.map(lambda each: _int16(flow_of(*each)), zip(layers, motions, strict=True)))))
    return FlowArrays(frames[0::2].contiguous(), frames[1::2].contiguous(), flow.permute(0, 3, 1, 2).contiguous())


_SHARED: WeakValueDictionary[tuple[str, int, int, str], FlowArrays] = WeakValueDictionary()


def shared_pack(path: str | Path, device: torch.device) -> FlowArrays:
    """The pairs of a file on `device`: read once, and one copy for as long as something uses it, such as runs that take turns."""
    try:
        about = Path(path).stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    key = str(Path(path).resolve()), about.st_mtime_ns, about.st_size, str(device)
    pairs = _SHARED.get(key)
    if pairs is None:
        pairs = _SHARED[key] = read_pack(path).to(device)
    return pairs


def _decoded(path: str | Path, shape: tuple[int, ...], number: int, piece: NDArray[np.uint8]) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(piece.tobytes())) as picture:
            frame = np.array(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: frame {number % 2 + 1} of pair {number // 2} cannot be read ({error})") from None
    if frame.shape[:2] != tuple(shape):
        raise DataError(f"{path}: frame {number % 2 + 1} of pair {number // 2} is {frame.shape[:2]}, its flow {tuple(shape)}")
    return frame
