"""Pictures from files, for all that read them one by one: 8 bits a channel, three channels, and an error that names the file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from .errors import DataError

__all__ = ["open_rgb"]


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
