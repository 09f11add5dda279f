"""Small pictures for tests of optical flow: smooth random textures, scenes of them, and folders of stamps and photographs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from nofm.data.stamps import Layer, Scene, StampPair, render


def texture(height: int, width: int, seed: int, grain: int = 6) -> np.ndarray:
    """(H, W, 3) bytes that vary smoothly over about `grain` pixels."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // grain + 2, width // grain + 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))


def picture(height: int, width: int, seed: int, alpha: np.ndarray | float = 1.0) -> np.ndarray:
    """(H, W, 4) floats with premultiplied alpha."""
    alpha_HW = np.broadcast_to(np.asarray(alpha, np.float32), (height, width))
    return np.dstack([texture(height, width, seed).astype(np.float32) / 255 * alpha_HW[..., None], alpha_HW]).astype(np.float32)


def affine(move: tuple[float, float] = (0, 0), turn: float = 0.0, scale: float = 1.0, about: tuple[float, float] = (0, 0)) -> np.ndarray:
    linear = scale * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    origin = np.array(about, float)
    return np.column_stack([linear, origin + np.array(move) - linear @ origin])


def disc(side: int) -> np.ndarray:
    """Alpha of a disc, 0 at the border of its square."""
    axis = np.arange(side) - (side - 1) / 2
    return (np.hypot(axis[:, None], axis) < side / 2 - 1).astype(np.float32)


def scene(height: int = 128, width: int = 144, background: np.ndarray | None = None, *stamps: tuple[tuple[int, int], np.ndarray]) -> Scene:
    """A background that moves by `background`, and discs of 40 pixels whose upper left corner is at (x, y), each with its motion."""
    still = affine() if background is None else background
    layers = [Layer(picture(height + 40, width + 40, 0), affine((20, 20)), still)]
    for number, ((x, y), motion) in enumerate(stamps, start=1):
        layers.append(Layer(picture(40, 40, number, disc(40)), affine((-x, -y)), motion, f"kind{number % 2}"))
    return Scene(height, width, tuple(layers))


def some_pairs(count: int, height: int = 136, width: int = 152) -> list[StampPair]:
    """Different pairs with small motions."""
    made = []
    for i in range(count):
        rng = np.random.default_rng(i)
        moves = rng.uniform(-4, 4, (3, 2))
        stamps = [
            ((int(x), int(y)), affine(tuple(m), 0.05, 1.03, (x + 20, y + 20)))
            for (x, y), m in zip(((20, 30), (70, 50)), moves, strict=False)
        ]
        made.append(render(scene(height, width, affine(tuple(moves[2]), 0.02), *stamps)))
    return made


def warped_back(pair: StampPair) -> np.ndarray:
    """Frame 2 at the places where the flow says that frame 1's pixels have gone, with torch's own sampler."""
    import torch
    from torch.nn import functional as F

    height, width = pair.layers.shape
    there = pair.flow + np.stack(np.meshgrid(np.arange(width), np.arange(height)), -1)
    grid = torch.from_numpy(2 * there / (width - 1, height - 1) - 1)[None]
    frame = torch.from_numpy(pair.frame2).permute(2, 0, 1)[None].double()
    return F.grid_sample(frame, grid, align_corners=True, padding_mode="border")[0].permute(1, 2, 0).numpy()


def write_stamp(path: Path, seed: int, side: int = 80, alpha: np.ndarray | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (255 * disc(side)).astype(np.uint8) if alpha is None else alpha
    Image.fromarray(np.dstack([texture(side, side, seed, 3), shape])).save(path)


def write_sources(root: Path, stamps: int = 10, photographs: int = 5) -> Path:
    """A folder as the Debian packages unpack to."""
    for i in range(stamps):
        write_stamp(root / "usr/share/tuxpaint/stamps" / ("animals" if i % 2 else "food") / f"{chr(97 + i)}thing.png", i)
    for i in range(photographs):
        path = root / "usr/share/backgrounds" / f"{chr(97 + i)}view.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(texture(300, 400, 100 + i)).save(path, quality=95)
    return root
