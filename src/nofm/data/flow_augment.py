"""Crops, flips, scales and colours for pairs of frames, with the flow that follows from them.

`Augmentation()` has the values that RAFT's authors use for FlyingChairs. All chance comes from the generator that is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import DataError

__all__ = ["Augmentation", "Example", "augment", "crop", "flip", "resize"]


@dataclass(frozen=True, slots=True)
class Example:
    """Two frames (3, H, W) of bytes, the flow (2, H, W) between them in pixels, and where it is known (H, W)."""

    image1: Tensor
    image2: Tensor
    flow: Tensor
    valid: Tensor

    def each(self, change: Any) -> Example:
        """The same change for all four."""
        return Example(*(change(x) for x in (self.image1, self.image2, self.flow, self.valid)))


@dataclass(frozen=True, slots=True)
class Augmentation:
    """What may happen to a training pair."""

    size: tuple[int, int] = (368, 496)  # height and width of the crop
    scale: tuple[float, float] = (-0.1, 1.0)  # powers of two
    scale_chance: float = 0.8
    stretch: float = 0.2  # largest power of two by which one side is scaled more than the other
    stretch_chance: float = 0.8
    mirror_chance: float = 0.5
    upside_down_chance: float = 0.1
    colour: float = 0.4  # brightness, contrast, saturation
    hue: float = 0.159
    asymmetric_chance: float = 0.2  # that the two frames get different colours
    erase_chance: float = 0.5  # that parts of the second frame are painted over, as if something had come in front
    erase_sides: tuple[int, int] = (50, 100)


def augment(example: Example, a: Augmentation, generator: torch.Generator) -> Example:
    """A new example of the crop's size."""
    draw = _Draws(generator)
    example = _erased(_coloured(example, a, draw), a, draw)
    height, width = example.valid.shape
    power = draw.between(*a.scale)
    powers = [power, power]
    if draw.chance(a.stretch_chance):
        powers = [power + draw.between(-a.stretch, a.stretch) for _ in range(2)]
    # A crop must fit, with room to move.
    factors = [max(2**p, (side + 8) / extent) for p, side, extent in zip(powers, a.size, (height, width), strict=True)]
    too_small = a.size[0] > height or a.size[1] > width
    if draw.chance(a.scale_chance) or too_small:
        example = resize(example, round(height * factors[0]), round(width * factors[1]))
    example = flip(example, draw.chance(a.mirror_chance), draw.chance(a.upside_down_chance))
    height, width = example.valid.shape
    return crop(example, draw.whole(0, height - a.size[0]), draw.whole(0, width - a.size[1]), a.size)


class _Draws:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def chance(self, probability: float) -> bool:
        return self.between(0, 1) < probability

    def whole(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self._generator))


# ---- geometry ----


def crop(example: Example, top: int, left: int, size: tuple[int, int]) -> Example:
    """A part of `size`, from row `top` and column `left` on."""
    height, width = example.valid.shape
    if not (0 <= top <= height - size[0] and 0 <= left <= width - size[1]):
        raise DataError(f"frames of {height}x{width} pixels are too small for a crop of {size[0]}x{size[1]}")
    return example.each(lambda x: x[..., top : top + size[0], left : left + size[1]])


def flip(example: Example, mirror: bool, upside_down: bool) -> Example:
    """Mirrored left to right, turned upside down, or both; the flow turns with it."""
    dims = [dim for dim, wanted in ((-1, mirror), (-2, upside_down)) if wanted]
    if not dims:
        return example
    turned = example.each(lambda x: x.flip(dims))
    sign = torch.tensor([-1.0 if mirror else 1.0, -1.0 if upside_down else 1.0]).view(2, 1, 1)
    return Example(turned.image1, turned.image2, turned.flow * sign, turned.valid)


def resize(example: Example, height: int, width: int) -> Example:
    """Scaled to a size; flow grows with its axis. Flow that is known at some pixels only is moved, never mixed with what is not."""
    old_height, old_width = example.valid.shape
    factors = torch.tensor([width / old_width, height / old_height]).view(2, 1, 1)
    images = torch.stack([example.image1, example.image2]).float()
    scaled = F.interpolate(images, (height, width), mode="bilinear", align_corners=False).round().clamp(0, 255).to(torch.uint8)
    if example.valid.all():
        flow = F.interpolate(example.flow[None], (height, width), mode="bilinear", align_corners=False)[0] * factors
        valid = torch.ones(height, width, dtype=torch.bool)
    else:
        flow, valid = torch.zeros(2, height, width), torch.zeros(height, width, dtype=torch.bool)
        rows, columns = example.valid.nonzero(as_tuple=True)
        new_rows = ((rows + 0.5) * (height / old_height)).floor().long().clamp(max=height - 1)
        new_columns = ((columns + 0.5) * (width / old_width)).floor().long().clamp(max=width - 1)
        flow[:, new_rows, new_columns] = example.flow[:, rows, columns] * factors[:, :, 0]
        valid[new_rows, new_columns] = True
    return Example(scaled[0], scaled[1], flow, valid)


# ---- looks ----


def _coloured(example: Example, a: Augmentation, draw: _Draws) -> Example:
    if not (a.colour or a.hue):
        return example
    if draw.chance(a.asymmetric_chance):
        first, second = (_jitter(image, a, draw) for image in (example.image1, example.image2))
    else:
        first, second = _jitter(torch.stack([example.image1, example.image2]), a, draw)
    return Example(first, second, example.flow, example.valid)


def _jitter(images: Tensor, a: Augmentation, draw: _Draws) -> Tensor:
    from torchvision.transforms.v2 import functional as colours

    images = colours.adjust_brightness(images, draw.between(1 - a.colour, 1 + a.colour))
    images = colours.adjust_contrast(images, draw.between(1 - a.colour, 1 + a.colour))
    images = colours.adjust_saturation(images, draw.between(1 - a.colour, 1 + a.colour))
    result: Tensor = colours.adjust_hue(images, draw.between(-a.hue, a.hue))
    return result


def _erased(example: Example, a: Augmentation, draw: _Draws) -> Example:
    if not draw.chance(a.erase_chance):
        return example
    image = example.image2.clone()
    mean = image.float().mean((1, 2)).round().to(torch.uint8).view(3, 1, 1)
    for _ in range(draw.whole(1, 2)):
        top, left = draw.whole(0, image.shape[1] - 1), draw.whole(0, image.shape[2] - 1)
        image[:, top : top + draw.whole(*a.erase_sides), left : left + draw.whole(*a.erase_sides)] = mean
    return Example(example.image1, image, example.flow, example.valid)
