"""Optical flow as colour: the wheel of Baker et al. 2007 that Middlebury and Sintel use, and pictures for reports. numpy and Pillow only.

The direction is the hue (right red, down yellow, left blue-green, up blue-violet), the length the saturation, from white for none to
full at `longest`; what is longer is darkened, what is unknown is black.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sheet import side_by_side

__all__ = ["draw_flow", "flow_sheet", "flow_to_rgb", "wheel"]

# How many steps the wheel takes from each colour to the next: as many as the eye tells apart.
_STEPS = (15, 6, 4, 11, 13, 6)
_CORNERS = ((255, 0, 0), (255, 255, 0), (0, 255, 0), (0, 255, 255), (0, 0, 255), (255, 0, 255), (255, 0, 0))
_TOO_LONG = 0.75  # how bright what is longer than `longest` remains


def wheel() -> NDArray[np.float64]:
    """The 55 colours (55, 3), from red by yellow, green, cyan, blue and magenta back towards red."""
    rows = []
    for steps, start, end in zip(_STEPS, _CORNERS, _CORNERS[1:], strict=False):
        a, b = np.array(start, float), np.array(end, float)
        moved = np.floor(255 * np.arange(steps) / steps)[:, None] / 255
        rows.append(a + (b - a) * moved)
    return np.concatenate(rows)


def flow_to_rgb(flow_HW2: NDArray[Any], longest: float | None = None, valid_HW: NDArray[Any] | None = None) -> NDArray[np.uint8]:
    """(H, W, 3) bytes. `longest` is the length at full colour; the longest of this field where nothing is said."""
    if flow_HW2.ndim != 3 or flow_HW2.shape[-1] != 2:
        raise ValueError(f"a field of flow is (height, width, 2), not {flow_HW2.shape}")
    flow = np.asarray(flow_HW2, dtype=np.float64)
    known = np.asarray(np.isfinite(flow).all(-1))
    if valid_HW is not None:
        known &= np.asarray(valid_HW, bool)
    flow = np.where(known[..., None], flow, 0)
    length = np.hypot(flow[..., 0], flow[..., 1])
    full = float(length.max()) if longest is None else float(longest)
    share = length / full if full > 0 else np.zeros_like(length)

    colours = wheel() / 255
    turn = np.arctan2(-flow[..., 1], -flow[..., 0]) / np.pi  # -1 to 1, and 1 is to the left
    position = (turn + 1) / 2 * (len(colours) - 1)
    low = np.floor(position).astype(int)
    part = (position - low)[..., None]
    hue = (1 - part) * colours[low] + part * colours[(low + 1) % len(colours)]
    pale = 1 - share[..., None] * (1 - hue)
    shown = np.where(share[..., None] <= 1 + 1e-9, pale, _TOO_LONG * hue)
    return np.where(known[..., None], np.floor(255 * shown.clip(0, 1)), 0).astype(np.uint8)


def draw_flow(
    path: str | Path,
    frame_HW3: NDArray[np.uint8],
    predictions: dict[str, NDArray[Any]],
    truth_HW2: NDArray[Any],
    valid_HW: NDArray[Any] | None = None,
) -> None:
    """Write what `flow_sheet` draws as a PNG."""
    sheet = flow_sheet(frame_HW3, predictions, truth_HW2, valid_HW)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, "PNG")


def flow_sheet(
    frame_HW3: NDArray[np.uint8],
    predictions: dict[str, NDArray[Any]],
    truth_HW2: NDArray[Any],
    valid_HW: NDArray[Any] | None = None,
) -> Any:
    """The frame, each named prediction, and the true flow, side by side and in one scale, the true flow's longest: a Pillow image."""
    known = np.ones(truth_HW2.shape[:2], bool) if valid_HW is None else np.asarray(valid_HW, bool)
    lengths = np.hypot(truth_HW2[..., 0], truth_HW2[..., 1])[known]
    longest = float(lengths.max()) if lengths.size else 0.0
    parts = {"frame": frame_HW3}
    for name, flow in predictions.items():
        if flow.shape != truth_HW2.shape:
            raise ValueError(f"prediction {name!r} is {flow.shape}, the true flow {truth_HW2.shape}")
        error = np.hypot(*np.moveaxis(flow - truth_HW2, -1, 0))[known]
        parts[f"{name}: EPE {error.mean():.2f} px"] = flow_to_rgb(flow, longest)
    parts[f"true flow, up to {longest:.0f} px"] = flow_to_rgb(truth_HW2, longest, known)
    return side_by_side(parts)
