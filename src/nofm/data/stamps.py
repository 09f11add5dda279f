"""Flying stamps: pairs of frames with exact optical flow, boxes and masks, made of photographs and cut-outs with alpha.

A scene is a stack of layers, each a picture with an affine placement in frame 1 and an affine motion from frame 1 to frame 2. Both
frames are rendered the same way: a pixel looks up, by inverse mapping and bilinear sampling, where in each layer's picture it lies,
and layers are laid over each other by their alpha. A pixel of frame 1 belongs to the topmost layer that covers at least half of it, and its
flow is that layer's motion at the pixel's centre: a formula, not an estimate. It is exact also where the point is hidden in frame 2 or has
left it; as in FlyingChairs and Sintel such pixels count as valid, and `occluded` says where they are.

Everything is a function of (seed, index). Whole pictures are held out: a stamp or photograph of the training part never appears in
validation. What is a usable stamp, and how a folder of Debian packages is searched, is in `stamp_sources`.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .stamp_sources import Sources

__all__ = ["Layer", "Motions", "Scene", "StampPair", "bilinear", "draw_scene", "flow_of", "make_pair", "make_pairs", "render"]

Floats = NDArray[np.float32]
Affine = NDArray[np.float64]  # (2, 3): a point (x, y) goes to A[:, :2] @ (x, y) + A[:, 2]


@dataclass(frozen=True, slots=True)
class Motions:
    """How much is drawn, how large, how fast. Lengths in pixels, stamp sides in shares of the frame's height."""

    stamps: tuple[int, int] = (4, 10)
    sides: tuple[float, float] = (0.104, 0.73)  # 40 to 280 pixels of 384
    drift: float = 6.0  # of the background: the scale of a Laplace distribution, along each axis
    stamp_drift: float = 12.0
    turn: float = 0.06  # standard deviation, in radians
    zoom: float = 0.05  # standard deviation of the logarithm of the scale


@dataclass(frozen=True, slots=True)
class Layer:
    """A picture with premultiplied alpha, where it lies in frame 1 (frame to picture), and how it moves (frame 1 to frame 2)."""

    picture_HW4: Floats
    place: Affine
    motion: Affine
    category: str = ""  # "" for the background, which goes on for ever, mirrored at its edges


@dataclass(frozen=True, slots=True)
class Scene:
    """Layers from back to front, for frames of one size."""

    height: int
    width: int
    layers: tuple[Layer, ...]


@dataclass(frozen=True, slots=True)
class StampPair:
    """Two frames and all that is known about them."""

    frame1: NDArray[np.uint8]  # (H, W, 3)
    frame2: NDArray[np.uint8]
    layers: NDArray[np.uint8]  # (H, W): which layer each pixel of frame 1 belongs to, 0 for the background
    occluded: NDArray[np.bool_]  # (H, W): what cannot be seen in frame 2
    motions: Affine  # (L, 2, 3), of each layer
    categories: tuple[str, ...]  # of each layer

    @property
    def flow(self) -> Floats:
        """(H, W, 2) in pixels."""
        return flow_of(self.layers, self.motions)


def make_pair(sources: Sources, height: int, width: int, seed: int, index: int, motions: Motions | None = None) -> StampPair:
    """The pair number `index` of `seed`."""
    rng = np.random.default_rng((seed, index))
    return render(draw_scene(sources, height, width, rng, motions or Motions()))


def make_pairs(
    sources: Sources, count: int, height: int, width: int, seed: int, motions: Motions | None = None, workers: int = 0
) -> Iterator[StampPair]:
    """The pairs 0 to `count` - 1, in order, made by `workers` processes (0: by this one)."""
    make = partial(make_pair, sources, height, width, seed, motions=motions)
    if not workers:
        yield from map(make, range(count))
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(make, range(count), chunksize=8)


# ---- scenes ----


def draw_scene(sources: Sources, height: int, width: int, rng: np.random.Generator, m: Motions) -> Scene:
    """A background with stamps on it, all drawn from `rng`."""
    centre = np.array([(width - 1) / 2, (height - 1) / 2])
    photograph = sources.photograph(int(rng.integers(sources.photographs)), height, width, rng)
    middle = (np.array(photograph.shape[1::-1]) - 1) / 2
    background = Layer(photograph, _about(middle, 1.0, 0.0, centre), _motion(rng, centre, m.drift, m))
    layers = [background]
    for _ in range(int(rng.integers(m.stamps[0], m.stamps[1] + 1))):
        side = height * math.exp(rng.uniform(*np.log(m.sides)))
        picture, category = sources.stamp(int(rng.integers(sources.stamps)), side, mirrored=bool(rng.integers(2)))
        at = rng.uniform((0, 0), (width - 1, height - 1))
        middle = (np.array(picture.shape[1::-1]) - 1) / 2
        place = _about(middle, 1.0, rng.normal(0, 0.3), at)
        layers.append(Layer(picture, place, _motion(rng, at, m.stamp_drift, m), category))
    return Scene(height, width, tuple(layers))


def _motion(rng: np.random.Generator, about: NDArray[Any], drift: float, m: Motions) -> Affine:
    move = np.clip(rng.laplace(0, drift, 2), -8 * drift, 8 * drift)
    return _about(about + move, math.exp(np.clip(rng.normal(0, m.zoom), -0.3, 0.3)), rng.normal(0, m.turn), about)


def _about(target: NDArray[Any], scale: float, angle: float, origin: NDArray[Any]) -> Affine:
    """Turn and scale about `origin`, which goes to `target`."""
    c, s = scale * math.cos(angle), scale * math.sin(angle)
    linear = np.array([[c, -s], [s, c]])
    return np.column_stack([linear, target - linear @ origin])


def _apply(affine: Affine, points: NDArray[Any]) -> NDArray[Any]:
    return points @ affine[:, :2].T + affine[:, 2]


def _inverse(affine: Affine) -> Affine:
    linear = np.linalg.inv(affine[:, :2])
    return np.column_stack([linear, -linear @ affine[:, 2]])


def _after(second: Affine, first: Affine) -> Affine:
    return np.column_stack([second[:, :2] @ first[:, :2], second[:, :2] @ first[:, 2] + second[:, 2]])


# ---- rendering ----


def render(scene: Scene) -> StampPair:
    """Both frames of a scene, and what belongs to which layer."""
    still = [layer.place for layer in scene.layers]
    moved = [_after(layer.place, _inverse(layer.motion)) for layer in scene.layers]
    frame1, layers1 = _frame(scene, still)
    frame2, layers2 = _frame(scene, moved)
    motions = np.stack([layer.motion for layer in scene.layers])
    occluded = _occluded(layers1, layers2, flow_of(layers1, motions))
    return StampPair(frame1, frame2, layers1, occluded, motions, tuple(layer.category for layer in scene.layers))


def flow_of(layers: NDArray[np.uint8], motions: Affine) -> Floats:
    """The flow of each pixel's layer at the pixel's centre."""
    height, width = layers.shape
    grid = np.stack(np.meshgrid(np.arange(width, dtype=np.float64), np.arange(height, dtype=np.float64)), axis=-1)
    m = motions[layers]  # (H, W, 2, 3)
    there = (m[..., :2] @ grid[..., None])[..., 0] + m[..., 2]
    return (there - grid).astype(np.float32)


def _frame(scene: Scene, maps: Sequence[Affine]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    canvas = np.zeros((scene.height, scene.width, 3), np.float32)
    owner = np.zeros((scene.height, scene.width), np.uint8)
    for number, (layer, to_picture) in enumerate(zip(scene.layers, maps, strict=True)):
        rows, columns = (slice(0, scene.height), slice(0, scene.width)) if number == 0 else _extent(scene, layer, to_picture)
        grid = np.stack(np.meshgrid(np.arange(columns.start, columns.stop), np.arange(rows.start, rows.stop)), axis=-1)
        if grid.size == 0:
            continue
        sampled = bilinear(layer.picture_HW4, _apply(to_picture, grid), mirror=number == 0)
        alpha = sampled[..., 3:]
        canvas[rows, columns] = sampled[..., :3] + (1 - alpha) * canvas[rows, columns]
        owner[rows, columns][alpha[..., 0] >= 0.5] = number
    return np.rint(255 * canvas).clip(0, 255).astype(np.uint8), owner


def _extent(scene: Scene, layer: Layer, to_picture: Affine) -> tuple[slice, slice]:
    """The rows and columns of the frame that the layer can reach."""
    height, width = layer.picture_HW4.shape[:2]
    corners = np.array([(x, y) for x in (-1, width) for y in (-1, height)])
    reached = _apply(_inverse(to_picture), corners)
    low = np.floor(reached.min(0)).astype(int).clip(0, (scene.width, scene.height))
    high = np.ceil(reached.max(0)).astype(int).clip(-1, (scene.width - 1, scene.height - 1)) + 1
    return slice(low[1], max(low[1], high[1])), slice(low[0], max(low[0], high[0]))


def bilinear(picture_HWC: Floats, points: NDArray[Any], *, mirror: bool) -> Floats:
    """`picture` at `points` (..., 2) of x and y; outside it is 0, or mirrored for ever."""
    height, width = picture_HWC.shape[:2]
    low = np.floor(points)
    share = (points - low).astype(np.float32)
    corner = low.astype(np.int64)
    result = np.zeros((*points.shape[:-1], picture_HWC.shape[2]), np.float32)
    for dx in (0, 1):
        for dy in (0, 1):
            x, y = corner[..., 0] + dx, corner[..., 1] + dy
            weight = (share[..., 0] if dx else 1 - share[..., 0]) * (share[..., 1] if dy else 1 - share[..., 1])
            if mirror:
                x, y = _mirrored(x, width), _mirrored(y, height)
            else:
                inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
                weight, x, y = weight * inside, x.clip(0, width - 1), y.clip(0, height - 1)
            result += weight[..., None] * picture_HWC[y, x]
    return result


def _mirrored(index: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    period = index % (2 * size)
    return np.where(period < size, period, 2 * size - 1 - period)


def _occluded(layers1: NDArray[np.uint8], layers2: NDArray[np.uint8], flow: Floats) -> NDArray[np.bool_]:
    """Where the point that a pixel of frame 1 shows is outside frame 2, or next to a pixel of frame 2 of another layer."""
    height, width = layers1.shape
    x, y = np.arange(width) + flow[..., 0].astype(np.float64), np.arange(height)[:, None] + flow[..., 1].astype(np.float64)
    outside = (x < 0) | (x > width - 1) | (y < 0) | (y > height - 1)
    hidden = np.zeros_like(outside)
    for near_x in (np.floor(x), np.ceil(x)):
        for near_y in (np.floor(y), np.ceil(y)):
            found = layers2[near_y.clip(0, height - 1).astype(int), near_x.clip(0, width - 1).astype(int)]
            hidden |= found != layers1
    return outside | hidden
