"""Pictures side by side, each with its title, for reports. numpy and Pillow only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["side_by_side"]

_GAP = 4  # pixels between two pictures
_SMALLEST = 13  # a letter's height from which it can be read
_SHARE = 1 / 32  # of a picture's width for a letter's height, so that titles can still be read where large pictures are shown small


def side_by_side(parts: Mapping[str, NDArray[np.uint8]]) -> Any:
    """A Pillow image of all `parts`, by their titles, in their order. They are of one size, (height, width, 3)."""
    from PIL import Image, ImageDraw, ImageFont

    height, width = next(iter(parts.values())).shape[:2]
    letter = max(_SMALLEST, round(_SHARE * width))
    title = round(1.5 * letter)
    sheet = Image.new("RGB", (len(parts) * (width + _GAP) - _GAP, title + height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(letter)
    for column, (words, pixels) in enumerate(parts.items()):
        left = column * (width + _GAP)
        pen.text((left + 2, 2), words, fill="black", font=font)
        sheet.paste(Image.fromarray(pixels), (left, title))
    return sheet
