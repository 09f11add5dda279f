"""Pictures from files, for all that read them one by one: which files are, and 8 bits a channel, three channels, and an error that names
the file. Needs no torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import DataError

__all__ = ["open_rgb", "picture_files"]

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


def picture_files(folder: Path) -> Iterator[Path]:
    """The pictures in a folder and those in it, in no order."""
    return (path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)


def open_rgb(path: str | Path, what: str) -> Any:
    """The picture in a file, as Pillow holds it; `what` is what an error calls it."""
    from PIL import Image

    try:
        with warnings.catch_warnings(), Image.open(path) as picture:
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # a bomb, not a photograph
            if picture.mode.startswith(("I", "F")):  # Pillow would cut all values off at 255, which leaves a white picture
                raise ValueError(f"mode {picture.mode}: more than 8 bits a channel; convert it")
            return picture.convert("RGB")
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: {what} cannot be read ({error}); mend or remove it, or set data.corrupt skip") from None
