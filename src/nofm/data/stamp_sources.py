"""Stamps and photographs for `stamps`: found in folders, judged, split into training and validation, and scaled for a frame.

Debian packages serve: tuxpaint-stamps-default (cut-outs with alpha, in folders of categories), mate-backgrounds and
lomiri-wallpapers-16.04 (photographs). `apt-get download NAME` and `dpkg -x NAME.deb FOLDER` need no root; then ROOT is FOLDER.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import DataError

__all__ = ["Sources", "copy_sources", "find_sources", "usable_stamp"]

Floats = NDArray[np.float32]

_PACKAGED = ("usr/share/tuxpaint/stamps", "usr/share/backgrounds")
_PREPARED = ("stamps", "photographs")
_DRAWN = {"cartoon", "symbols"}  # folders of drawings
_SHORTEST, _COLOURS = 64, 400  # pixels of a stamp's shorter side; distinct colours, below which it is a drawing
_HELD_OUT = 5  # every fifth thing is for validation
_SHRUNK = 1600  # pixels: photographs are kept no larger


@dataclass(frozen=True, slots=True)
class Sources:
    """The pictures of one part, training or validation."""

    stamp_paths: tuple[Path, ...]
    categories: tuple[str, ...]  # of each stamp
    photograph_paths: tuple[Path, ...]

    @property
    def stamps(self) -> int:
        return len(self.stamp_paths)

    @property
    def photographs(self) -> int:
        return len(self.photograph_paths)

    def stamp(self, index: int, side: float, mirrored: bool) -> tuple[Floats, str]:
        """A stamp whose longer side is `side` pixels, with premultiplied alpha and a clear border, and its category."""
        from PIL import Image

        picture = _opened(self.stamp_paths[index], "RGBA")
        scale = side / max(picture.size)
        size = [max(1, round(scale * extent)) for extent in picture.size]
        # Premultiplied before it is scaled, or the colour of what is transparent would bleed into the edges.
        scaled = np.asarray(picture.convert("RGBa").resize(size, Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR))
        padded = np.pad(scaled, ((1, 1), (1, 1), (0, 0)))
        return _floats(padded[:, ::-1] if mirrored else padded), self.categories[index]

    def photograph(self, index: int, height: int, width: int, rng: np.random.Generator) -> Floats:
        """A part of a photograph, scaled so that it is somewhat larger than the frame, opaque."""
        from PIL import Image

        picture = _opened(self.photograph_paths[index], "RGB")
        target = (round(1.25 * width), round(1.25 * height))
        fit = min(picture.width / target[0], picture.height / target[1])
        zoom = fit * rng.uniform(0.4, 1.0)  # photograph's pixels for one of the frame
        part = (zoom * target[0], zoom * target[1])
        left, top = rng.uniform((0, 0), (picture.width - part[0], picture.height - part[1]))
        scaled = picture.resize(target, Image.Resampling.BICUBIC, box=(left, top, left + part[0], top + part[1]))
        if rng.integers(2):
            scaled = scaled.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.dstack([_floats(np.asarray(scaled)), np.ones((target[1], target[0]), np.float32)])


def _floats(pixels: NDArray[np.uint8]) -> Floats:
    return pixels.astype(np.float32) / np.float32(255)


@lru_cache(maxsize=512)
def _opened(path: Path, mode: str) -> Any:
    """A picture, decoded once, photographs made smaller."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            if mode == "RGB":
                picture.draft("RGB", (_SHRUNK, _SHRUNK))  # a JPEG is decoded at a fraction of its size
            made = picture.convert(mode)
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(f"{path}: this picture cannot be read ({error}); mend or remove it") from None
    if mode == "RGB" and max(made.size) > _SHRUNK:
        made.thumbnail((_SHRUNK, _SHRUNK))
    return made


def find_sources(root: str | Path, part: Literal["train", "val"]) -> Sources:
    """The stamps and photographs of a part, chosen from ROOT/usr/share as Debian's packages have them, or all in ROOT/stamps and
    ROOT/photographs, as `copy_sources` writes them.

    Numbered and sized versions of one thing stay together, and every fifth thing of a category is held out for validation.
    """
    root = Path(root)
    prepared = (root / "stamps").is_dir()
    stamp_root, photograph_root = (root / folder for folder in (_PREPARED if prepared else _PACKAGED))
    for folder in (stamp_root, photograph_root):
        if not folder.is_dir():
            raise DataError(
                f"{folder}: no such folder; ROOT holds stamps/CATEGORY/*.png and photographs/*.jpg, or what dpkg -x unpacks of "
                "the packages tuxpaint-stamps-default, mate-backgrounds and lomiri-wallpapers-16.04"
            )
    stamps = [path for path in sorted(stamp_root.rglob("*.png")) if prepared or usable_stamp(path, stamp_root)]
    stamps = [path for path, held_out in _held_out(stamps, stamp_root) if held_out == (part == "val")]
    photographs = [
        path for path, held_out in _held_out(sorted(photograph_root.rglob("*.jpg")), photograph_root) if held_out == (part == "val")
    ]
    for found, folder in ((stamps, stamp_root), (photographs, photograph_root)):
        if not found:
            raise DataError(f"{folder}: has no picture for the {part} part; it takes {_HELD_OUT} to have one for validation")
    categories = tuple(path.relative_to(stamp_root).parts[0] for path in stamps)
    return Sources(tuple(stamps), categories, tuple(photographs))


def copy_sources(root: str | Path, out: str | Path, stamp_side: int = 280, photograph_side: int = 1024) -> None:
    """Write what `find_sources` takes of ROOT to OUT, no larger than it is needed: about 15 MB of the three packages' 220."""
    for part in ("train", "val"):
        sources = find_sources(root, part)
        wanted: tuple[tuple[tuple[Path, ...], str, int, str, dict[str, int]], ...] = (
            (sources.stamp_paths, "RGBA", stamp_side, _PREPARED[0], {}),
            (sources.photograph_paths, "RGB", photograph_side, _PREPARED[1], {"quality": 92}),
        )
        for paths, mode, side, folder, options in wanted:
            for path in paths:
                picture = _opened(path, mode).copy()
                picture.thumbnail((side, side))
                target = Path(out, folder, path.relative_to(_top(Path(root), path)))
                target.parent.mkdir(parents=True, exist_ok=True)
                picture.save(target, **options)


def _top(root: Path, path: Path) -> Path:
    return next(root / folder for folder in (*_PREPARED, *_PACKAGED) if (root / folder) in path.parents)


def usable_stamp(path: Path, root: Path) -> bool:
    """Whether a picture is a photographed cut-out: in a category's folder, with alpha that shapes it, not tiny, of many colours."""
    from PIL import Image

    parts = path.relative_to(root).parts
    if len(parts) < 2 or _DRAWN & set(parts):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Pillow's, of palettes with alpha
        try:
            with Image.open(path) as picture:
                if min(picture.size) < _SHORTEST or not ("A" in picture.mode or "transparency" in picture.info):
                    return False
                pixels = np.asarray(picture.convert("RGBA"))
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            raise DataError(f"{path}: this stamp cannot be read ({error}); mend or remove it") from None
    opaque = pixels[..., 3] > 127
    if not 0.05 < opaque.mean() < 0.97:
        return False
    r, g, b = (pixels[opaque].astype(np.int32)[:, :3] // 4).T
    return len(np.unique(r << 12 | g << 6 | b)) >= _COLOURS


def _held_out(paths: list[Path], root: Path) -> list[tuple[Path, bool]]:
    """Each path, and whether it is for validation. Of one thing in several sizes (NAME_1920x1080) only the first is taken."""
    things: dict[str, dict[str, list[Path]]] = {}
    for path in paths:
        parts = path.relative_to(root).parts
        thing = re.sub(r"[\d_-]+[a-z]?$", "", re.sub(r"_\d+x\d+$", "", path.stem)).lower() or path.stem
        things.setdefault(parts[0] if len(parts) > 1 else "", {}).setdefault(thing, []).append(path)
    judged = []
    for group in things.values():
        for number, versions in enumerate(group.values()):
            sized = {re.sub(r"_\d+x\d+$", "", path.stem): path for path in reversed(versions)}
            judged += [(path, number % _HELD_OUT == _HELD_OUT - 1) for path in sorted(sized.values())]
    return judged
